"""What thousands of runs that wait for a person cost, and how soon an approved one goes on.

A store is filled with runs whose only call waits for approval, by the commands that a run actor would send. Then:
`perdure list` and `perdure questions`; the start of a supervisor on that store, beside one on an empty store, and the
processes that each keeps once it has swept; and, with `perdure up`, the time from the commit of an approval to the
run's next event (its claim), to the dispatch of its call, and to its end: first without any actor for the agent (cold),
then one by one (warm).

    python benchmarks/parked.py --runs 10000 --samples 20

Ends with 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from perdure import Runtime
from perdure.actors.loading import LoadedAgent
from perdure.actors.model import ModelReply, ToolUse
from perdure.actors.turn import turn_events
from perdure.benchmarks.processes import percentile, processes
from perdure.client.launching import Request, check_agent, create
from perdure.store.events import ApprovalDecided, TurnStarted
from perdure.store.log import Append, Claim, Command, Refused
from perdure.store.rows import Lease
from perdure.store.sql import SqlLog, open_log
from perdure.store.states import Status

AGENT = """
from pathlib import Path

from perdure import Agent, ToolContext, tool


@tool(effect="non_idempotent", approval="always", settles_after_s=0)
def pay(ctx: ToolContext, order: int) -> str:
    with Path(__file__).with_name("paid").open("a") as file:
        file.write(f"{ctx.run_id}\\n")
    return "paid"


def model(request):
    return "paid" if request.turn_index else {"tool_calls": [{"name": "pay", "arguments": {"order": 17}}]}


agent = Agent(name="payer", model=model, tools=(pay,))
"""
LIST_S = 1.0
START_S = 5.0
"""How much longer a supervisor may take to start than on an empty store; most of it is the start of Ray."""
NEXT_EVENT_S = 0.2
GROUP = 500
SWEEPS_S = 4.0
"""Time for a few sweeps over the whole store; there is one a second."""
REPEATS = 5


async def fill(event_log: SqlLog, loaded: LoadedAgent, runs: int) -> list[str]:
    """Park that many runs; their ids."""
    lease = Lease("supervisor", "bench", "node", "boot", 1, 0.0, 4e9)
    assert await event_log.take_lease(lease, None)
    ids: list[str] = []
    for start in range(0, runs, GROUP):
        commands: list[Command] = []
        for number in range(start, min(start + GROUP, runs)):
            commands += await parking(loaded, number, lease)
            ids.append(commands[-1].run_id)
        for verdict in await event_log.commit(commands):
            assert not isinstance(verdict, Refused), verdict
    await event_log.drop_lease("supervisor", "bench")
    return ids


async def parking(loaded: LoadedAgent, number: int, lease: Lease) -> list[Command]:
    """The commands of one run up to its question."""
    request = Request(f"order {number}")
    reply = ModelReply(tool_calls=(ToolUse(name="pay", arguments={"order": number}),))
    events = TurnStarted(turn_index=0), *await turn_events(request.run_id, 0, reply, loaded.agent)
    return [
        create(loaded, request),
        Claim(request.run_id, f"owner-{number}", lease.nonce, 0),
        Append(request.run_id, 1, 2, events),
    ]


class Bench:
    """A folder with an agent, a store of parked runs and an empty one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.db, self.empty = folder, folder / "runs.db", folder / "empty.db"
        (folder / "agent.py").write_text(AGENT)
        self.found: dict[str, float] = {}

    def command(self, *args: str, db: Path | None = None) -> float:
        """Wall time of a command."""
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "perdure", "--db", str(db or self.db), *args],
            check=True,
            cwd=self.folder,
            capture_output=True,
        )
        return time.perf_counter() - began

    async def filled(self, runs: int) -> list[str]:
        loaded = check_agent(f"{self.folder / 'agent.py'}:agent")
        event_log, empty = await open_log(self.db), await open_log(self.empty)
        began = time.perf_counter()
        ids = await fill(event_log, loaded, runs)
        self.found["fill_s"] = time.perf_counter() - began
        parked = await event_log.runs(statuses=[Status.AWAITING_APPROVAL])
        assert len(parked) == runs and all(row.parked for row in parked)
        await event_log.close()
        await empty.close()
        return ids

    def readers(self) -> None:
        for name in ("list", "questions"):
            for where, db in (("", self.db), ("_empty", self.empty)):
                times = [self.command(name, db=db) for _ in range(REPEATS)]
                self.found[f"{name}{where}_s"] = median(times)
            self.found[f"{name}_all_s"] = self.command(name, "--limit", "1000000")

    async def supervisors(self) -> None:
        """Start one on each store, the empty one first; the time until it is at work, and its processes."""
        for where, db in (("_empty", self.empty), ("", self.db)):
            began = time.perf_counter()
            async with Runtime(db) as runtime:
                self.found[f"start{where}_s"] = time.perf_counter() - began
                await asyncio.sleep(SWEEPS_S)
                self.found[f"processes{where}"] = len(processes("actor", "tool", "journal", "supervisor"))
                assert (await runtime.status())["live"] == 0

    async def approvals(self, ids: list[str]) -> None:
        """Approve these runs one after another, under a supervisor that stands."""
        self.command("up")
        event_log = await open_log(self.db, create=False)
        try:
            delays = [await self.approval(event_log, run_id) for run_id in ids]
        finally:
            await event_log.close()
            self.command("down")
        for name, values in zip(("claimed", "dispatched", "ended"), zip(*delays[1:], strict=True), strict=True):
            self.found[f"{name}_p50_s"], self.found[f"{name}_p95_s"] = percentile(values, 0.5), percentile(values, 0.95)
        self.found |= dict(zip(("claimed_cold_s", "dispatched_cold_s", "ended_cold_s"), delays[0], strict=True))
        paid = (self.folder / "paid").read_text().split()
        assert sorted(paid) == sorted(ids), "each approved call has run once, and no other"

    async def approval(self, event_log: SqlLog, run_id: str) -> tuple[float, float, float]:
        """From the commit of an approval to the next event, to the call's dispatch, and to the run's end."""
        await asyncio.to_thread(self.command, "approve", run_id, "--by", "bench")
        async with asyncio.timeout(60):
            while (row := await event_log.run(run_id)) and not row.status.is_terminal:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stored = await event_log.read(run_id)
        decided = next(number for number, one in enumerate(stored) if isinstance(one.event, ApprovalDecided))
        after = {one.event.type: one.at - stored[decided].at for one in reversed(stored[decided + 1 :])}
        assert "run_completed" in after, stored[-1]
        return stored[decided + 1].at - stored[decided].at, after["tool_call_retried"], after["run_completed"]

    def broken(self) -> Iterator[str]:
        """The bounds that do not hold."""
        found = self.found
        starts_within = found["start_empty_s"] + START_S
        for name, most in (("list_s", LIST_S), ("start_s", starts_within), ("claimed_p95_s", NEXT_EVENT_S)):
            if found[name] > most:
                yield f"{name} is {found[name]:.3f}, over {most:.3f}"
        if found["processes"] > found["processes_empty"]:
            yield f"{found['processes']} processes on the store, {found['processes_empty']} on an empty one"


async def measure(runs: int, samples: int) -> Bench:
    with tempfile.TemporaryDirectory(prefix="parked-") as folder:
        bench = Bench(Path(folder))
        ids = await bench.filled(runs)
        await asyncio.to_thread(bench.readers)
        await bench.supervisors()
        await bench.approvals(ids[:: max(1, len(ids) // (samples + 1))][: samples + 1])
        return bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=20, help="approvals that are timed, besides the cold one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench = asyncio.run(measure(options.runs, options.samples))
    broken = list(bench.broken())
    figures: dict[str, Any] = {"runs": options.runs, "samples": options.samples, **bench.found, "broken": broken}
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<20} {value:.3f}" if isinstance(value, float) else f"{name:<20} {value}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
