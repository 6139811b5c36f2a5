"""Real MCP servers through calls, kills, cancels and timeouts: the filesystem server of npm, and the SQLite server of
PyPI. What is counted: how the calls ended, the effects in their worlds, the processes that are left, and how long each
thing took.

    pip install mcp-server-sqlite; python benchmarks/real_mcp.py --calls 10

PERDURE_MCP_FILES and PERDURE_MCP_SQLITE name other commands than `npx -y @modelcontextprotocol/server-filesystem` and
`mcp-server-sqlite`. A server that is not installed is left out, and that is said. Ends with 1 if anything is not as it
should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from perdure import Agent, MCPServer, ModelRequest, Run, Runtime
from perdure.actors.kernel import process_started
from perdure.client.launching import Request, check_agent
from perdure.store.events import ToolCallStarted, ToolResult

FOLDER = os.environ.get("PERDURE_MCP_FOLDER", "")
FILES = shlex.split(os.environ.get("PERDURE_MCP_FILES", "npx -y @modelcontextprotocol/server-filesystem"))
SQLITE = shlex.split(os.environ.get("PERDURE_MCP_SQLITE", "mcp-server-sqlite"))
REAL = os.path.realpath(tempfile.gettempdir())
"""Of a linked folder the server would refuse the paths."""
FOR_EVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n WHERE i < 0"


def model(request: ModelRequest) -> dict[str, Any]:
    calls: list[Any] = request.input  # type: ignore[assignment]
    return {"tool_calls": calls} if request.turn_index == 0 else {"text": "all done"}


def server(name: str, command: list[str], **options: Any) -> MCPServer:
    return MCPServer(name, command=command, **options)


def servers() -> dict[str, tuple[MCPServer, ...]]:
    """Each server twice, for the second one has little time."""
    commands = {"files": [*FILES, FOLDER], "sqlite": [*SQLITE, "--db-path", f"{FOLDER}/world.db"]}
    return {
        name: (server(name, command), server(f"brief-{name}", command, timeout_s=8, start_timeout_s=7))
        for name, command in commands.items()
        if shutil.which(command[0])
    }


agent = Agent(name="real", model=model, tools=tuple(each for pair in servers().values() for each in pair))


@dataclass
class World:
    """A server's world: a call that takes effect, one that hangs, and the count of the effects."""

    name: str
    folder: Path

    def effect(self, number: int) -> dict[str, Any]:
        if self.name == "files":
            path = str(self.folder / f"{number}.txt")
            return {"name": "files__write_file", "arguments": {"path": path, "content": "x"}}
        query = f"INSERT INTO effects VALUES ({number})"
        return {"name": "sqlite__write_query", "arguments": {"query": query}}

    def hang(self, prefix: str = "") -> dict[str, Any]:
        if self.name == "files":
            return {"name": f"{prefix}files__read_text_file", "arguments": {"path": str(self.folder / "pipe")}}
        query = f"INSERT INTO effects SELECT * FROM ({FOR_EVER})"
        return {"name": f"{prefix}sqlite__write_query", "arguments": {"query": query}}

    def effects(self) -> int:
        if self.name == "files":
            return len(list(self.folder.glob("*.txt")))
        with sqlite3.connect(self.folder / "world.db") as world:
            return int(world.execute("SELECT count(*) FROM effects").fetchone()[0])


def tree(run_id: str) -> list[int]:
    """Living processes with the mark of a run."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if f".{run_id}.".encode() in (path / "environ").read_bytes() and process_started(int(path.name)):
                found.append(int(path.name))
        except OSError:
            continue  # not a process, gone, or another user's
    return found


async def gone(pids: list[int], began: float) -> float:
    """Wait for the end of processes; the time since then."""
    while any(process_started(pid) for pid in pids):  # noqa: ASYNC110 - of other processes no event tells
        await asyncio.sleep(0.01)
    return time.monotonic() - began


class Driver:
    def __init__(self, runtime: Runtime, world: World) -> None:
        self.runtime, self.world = runtime, world
        self.loaded = check_agent(f"{__file__}:agent")
        self.wrong = 0

    def tell(self, what: str, right: bool, text: str) -> None:
        self.wrong += not right
        print(f"{self.world.name:7} {what:34} {text}{'' if right else '   WRONG'}", flush=True)

    async def start(self, *calls: dict[str, Any]) -> Run:
        (run,) = await self.runtime.launch_many(self.loaded, [Request(list(calls))])
        return run

    async def busy(self, run: Run, seconds: float = 4.0) -> int:
        """Wait until the server of a run has been at work for some time; its tool worker's pid."""
        while not tree(run.run_id):  # noqa: ASYNC110 - of other processes no event tells
            await asyncio.sleep(0.02)
        await asyncio.sleep(seconds)
        found = tree(run.run_id)
        (worker,) = {psutil.Process(pid).ppid() for pid in found} - set(found)
        return worker

    async def results(self, run: Run) -> list[ToolResult]:
        stored = await self.runtime.log.read(run.run_id)
        return [each.event for each in stored if isinstance(each.event, ToolResult)]

    async def calls(self, count: int) -> None:
        before, took = self.world.effects(), []
        for number in range(count):
            run = await self.start(self.world.effect(before + number))
            outcome = await run.outcome()
            took += [result.took_s or 0.0 for result in await self.results(run) if not result.is_error]
            assert outcome.status == "completed", outcome
        effects = self.world.effects() - before
        right = effects == count == len(took)
        self.tell("calls", right, f"{count} calls, {effects} effects, {median(took):.2f} s each in the median")

    async def kill_worker(self) -> None:
        run = await self.start(self.world.hang())
        worker = await self.busy(run)
        held, began = tree(run.run_id), time.monotonic()
        os.kill(worker, signal.SIGKILL)
        gone_s = await gone(held, began)
        left = f"{len(held)} processes gone after {gone_s:.2f} s"
        await self.cancel(run)
        marks = [e for e in await self.runtime.log.read(run.run_id) if isinstance(e.event, ToolCallStarted)]
        self.tell("worker killed in a call", gone_s < 8, f"{left}, {len(marks)} start marks")

    async def kill_actors(self) -> None:
        run = await self.start(self.world.hang())
        await self.busy(run, 2.0)
        lease = await self.runtime.log.lease("journal")
        assert lease
        began, held = time.monotonic(), tree(run.run_id)
        os.kill(lease.pid, signal.SIGKILL)
        gone_s = await gone(held, began)
        await self.cancel(run)
        self.tell("journal killed in a call", gone_s < 12, f"{len(held)} processes gone after {gone_s:.2f} s")

    async def cancel(self, run: Run | None = None) -> None:
        tells, run = run is None, run or await self.start(self.world.hang())
        if tells:
            await self.busy(run)
        began, held = time.monotonic(), tree(run.run_id)
        await self.runtime.cancel(run.run_id)
        outcome = await self.runtime.outcome(run.run_id)
        took_s, left = time.monotonic() - began, [pid for pid in held if process_started(pid)] + tree(run.run_id)
        if tells:
            (result,) = await self.results(run)
            text = f"{outcome.status} after {took_s:.2f} s, {len(held)} processes, {len(left)} left"
            self.tell("cancel in a call", outcome.status == "cancelled" and not left and took_s < 8, text)
            print(" " * 8 + json.loads(result.content)["message"])

    async def timeout(self) -> None:
        run = await self.start(self.world.hang("brief-"))
        outcome = await run.outcome()
        waits = outcome.status == "awaiting_approval"
        results, left = await self.results(run), tree(run.run_id)
        how = "a person is asked" if waits else f"{results[0].source}"
        self.tell(
            "no answer in 8 s", not left and (waits or results[0].source == "timeout"), f"{how}, {len(left)} left"
        )
        if waits:
            await self.cancel(run)


async def main(calls: int) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory(dir=REAL) as name:
        folder = Path(name)
        os.environ["PERDURE_MCP_FOLDER"] = str(folder)
        os.mkfifo(folder / "pipe")
        with sqlite3.connect(folder / "world.db") as world:
            world.execute("CREATE TABLE effects (number INTEGER)")
        async with Runtime(folder / "runs.db", actors=2) as runtime:
            for each, command in (("files", FILES), ("sqlite", SQLITE)):
                if not shutil.which(command[0]):
                    print(f"{each}: {command[0]} is not installed, left out")
                    continue
                driver = Driver(runtime, World(each, folder))
                await driver.calls(calls)
                await driver.timeout()
                await driver.cancel()
                await driver.kill_worker()
                await driver.kill_actors()
                await driver.calls(1)
                wrong += driver.wrong
    print(f"{wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=10)
    sys.exit(asyncio.run(main(parser.parse_args().calls)))
