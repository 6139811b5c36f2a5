"""Sixty runs of a support desk, while every kind of process that serves them is killed.

    python -m perdure.examples.demo

Each kill is a real SIGKILL, sent when the runs have come to a certain point. At the end the ledger, which is no part
of perdure, is held against what the runs should have paid. Ends with 1 if anything is doubled, missing or left over.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from perdure import Run, Runtime
from perdure.actors.kernel import runtime_folder
from perdure.cli.terminal import Terminal
from perdure.store.events import ToolCallRequested, ToolCallStarted

from .audit import Refund, Report, check_ledger, check_logs
from .plan import Hang, hangs, orders_of, points
from .support_desk import payments, shop_order
from .wreckage import Wrecker, until

AGENT = f"{Path(__file__).with_name('support_desk.py')}:desk"
TIMEOUT_S = 240
LEAVING_S = 10
Say = Callable[[str], None]


class Progress:
    """How many runs are done, and who waits for how many."""

    def __init__(self, runs: int, say: Say) -> None:
        self._runs, self._say = runs, say
        self._done = 0
        self._news = asyncio.Condition()

    async def see(self, run: Run) -> None:
        await run.outcome()
        async with self._news:
            self._done += 1
            if self._done % max(1, self._runs // 6) == 0:
                self._say(f"{self._done} of {self._runs} runs have ended")
            self._news.notify_all()

    async def reach(self, share: float) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self._done >= share * self._runs)


async def launch(runtime: Runtime, runs: int, folder: Path) -> list[Run]:
    """One batch; run n has the id n, so that they start in this order."""
    hanging = {hang.run: f"{hang.moment} paying {hang.order}" for hang in hangs(runs)}

    async def one(number: int) -> Run:
        task = f"Refund what is damaged of the orders {' and '.join(orders_of(number))}"
        world = {"world": str(folder), "hangs": hanging.get(number)}
        return await runtime.launch(AGENT, task, run_id=f"{number:032d}", batch="demo", metadata=world)

    return await asyncio.gather(*map(one, range(runs)))


async def strike_a_refund(wrecker: Wrecker, run: Run, hang: Hang, folder: Path) -> None:
    """Wait until the run's refund hangs, then kill the process that serves it, or the journal."""
    call = ""
    async for stored in run.events():
        event = stored.event
        if isinstance(event, ToolCallRequested) and event.name == "refund" and f'"{hang.order}"' in event.arguments:
            call = event.tool_call_id
        if isinstance(event, ToolCallStarted) and event.tool_call_id == call:
            break
    else:
        raise RuntimeError(f"run {run.run_id} ended without that refund")

    async def reached() -> bool:
        paid = any((entry["run"], entry["order"]) == (run.run_id, hang.order) for entry in payments(folder))
        return paid or hang.moment == "before"

    await until(reached)
    wrecker.say(f"run {hang.run}: its refund hangs {hang.moment} paying")
    if hang.target == "journal":
        await wrecker.leaseholder("journal")
    else:
        await wrecker.tool_worker(run, event)


async def strike_in_order(wrecker: Wrecker, progress: Progress, runs: int) -> None:
    """Kill run actors and supervisors as the batch goes on."""
    for share, kind in points(runs):
        await progress.reach(share)
        await (wrecker.run_actor() if kind == "run actor" else wrecker.leaseholder(kind))


async def wreck(runtime: Runtime, runs: int, folder: Path, say: Say) -> Report:
    """Launch, kill, wait for the end, and look."""
    wrecker, progress = Wrecker(runtime, say), Progress(runs, say)
    launched = await launch(runtime, runs, folder)
    say(f"{runs} runs are launched")
    report = Report(runs)
    try:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            for hang in hangs(runs):
                group.create_task(strike_a_refund(wrecker, launched[hang.run], hang, folder))
            group.create_task(strike_in_order(wrecker, progress, runs))
            for run in launched:
                group.create_task(progress.see(run))
    except TimeoutError:
        report.trouble.append(f"not done within {TIMEOUT_S} s")
    report.kills = sorted(wrecker.kills, key=lambda kill: kill.at)
    await check_logs(report, runtime)
    wanted: set[Refund] = {
        (run.run_id, order)
        for number, run in enumerate(launched)
        for order in orders_of(number)
        if shop_order(order)["damaged"]
    }
    check_ledger(report, folder, wanted)
    return report


@asynccontextmanager
async def leaving_nothing(trouble: list[str], folder: Path) -> AsyncIterator[Runtime]:
    """A Runtime of four actors; a process that is left of it afterwards is trouble."""
    runtime = Runtime(folder / "runs.db", actors=4, concurrency=24)
    async with runtime:
        yield runtime
        processes = psutil.Process().children(recursive=True)
    await asyncio.to_thread(psutil.wait_procs, processes, LEAVING_S)
    trouble += [f"process {process.pid} is left behind" for process in processes if _lives(process)]
    locks = runtime_folder(runtime.settings.name)
    trouble += [f"lock file {path} is left behind" for path in locks.glob("*")]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def demonstrate(runs: int, say: Say) -> Report:
    """The whole demonstration, in a folder that is gone afterwards."""
    left: list[str] = []
    with tempfile.TemporaryDirectory(prefix="perdure-demo-") as name:
        async with leaving_nothing(left, Path(name)) as runtime:
            say("the runtime is up")
            report = await wreck(runtime, runs, Path(name), say)
    report.trouble += left
    return report


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=60, help="how many runs, at least 12 (default: 60)")
    runs = max(12, parser.parse_args().runs)
    began, terminal = time.monotonic(), Terminal()

    def say(text: str) -> None:
        terminal.put(f"{time.monotonic() - began:6.1f} s  {text}")

    with terminal.alone():  # Ray comments on every kill
        report = asyncio.run(demonstrate(runs, say))
    terminal.put("")
    for name, value in report.lines():
        terminal.put(f"{name:24}{value}")
    return 1 if report.trouble else 0


if __name__ == "__main__":
    sys.exit(main())
