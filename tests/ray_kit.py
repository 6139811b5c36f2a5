"""Real Ray for tests: one Runtime for a module, runs that do what they are told, and a ledger outside the product."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import JsonValue

from perdure import Run, Runtime
from perdure.actors.machine import fold
from perdure.client.launching import Request, check_agent
from perdure.store.events import Stored, ToolCallStarted, ToolResult
from perdure.store.rows import Lease

AGENT = f"{Path(__file__).parent / 'agents' / 'effects.py'}:agent"
PATIENCE_S = 60.0


async def until(holds: Callable[[], Awaitable[Any]], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait for a condition that no event tells of; its first true value."""
    try:
        async with asyncio.timeout(patience_s):
            while not (value := await holds()):  # noqa: ASYNC110 - of other processes no event tells
                await asyncio.sleep(0.02)
            return value
    except TimeoutError:
        raise AssertionError(f"not seen within {patience_s:g} s: {what}") from None


@dataclass(frozen=True)
class Line:
    """A line of the ledger."""

    kind: str
    run_id: str
    call: str
    attempt: int
    key: str
    pid: int
    at: float


class Case:
    """One run, its folder and its ledger."""

    def __init__(self, bench: Bench, folder: Path, run: Run) -> None:
        self.bench, self.folder, self.run = bench, folder, run

    def ledger(self, kind: str = "effect") -> list[Line]:
        path = self.folder / "ledger"
        rows = [line.split(",") for line in path.read_text().splitlines()] if path.exists() else []
        lines = [Line(k, r, c, int(a), key, int(pid), float(at)) for k, r, c, a, key, pid, at in rows]
        return [line for line in lines if line.kind == kind and line.run_id == self.run.run_id]

    async def begun(self, count: int = 1) -> Line:
        """Wait until that many attempts have begun; the newest."""

        async def enough() -> Line | None:
            lines = self.ledger("begin")
            return lines[count - 1] if len(lines) >= count else None

        line: Line = await until(enough, f"{count} attempts begun")
        return line

    async def acted(self) -> Line:
        async def there() -> Line | None:
            return next(iter(self.ledger()), None)

        line: Line = await until(there, "an effect")
        return line

    def go(self) -> None:
        """Let waiting tools go on."""
        (self.folder / "go").touch()

    async def outcome(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.run.outcome()

    async def events(self) -> list[Stored]:
        return await self.bench.runtime.log.read(self.run.run_id)

    async def results(self) -> list[ToolResult]:
        return [stored.event for stored in await self.events() if isinstance(stored.event, ToolResult)]

    async def kinds(self) -> list[str]:
        return [stored.event.type for stored in await self.events()]

    async def marks(self) -> list[ToolCallStarted]:
        return [stored.event for stored in await self.events() if isinstance(stored.event, ToolCallStarted)]

    async def check_log(self) -> None:
        """The log is gapless and refolds to the stored row."""
        row = await self.bench.runtime.log.run(self.run.run_id)
        state = fold(await self.events())
        assert row is not None
        assert (state.status, state.seq, state.epoch) == (row.status, row.seq, row.epoch)


class Bench:
    """A Runtime and what tests do to its processes."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime, self.folder = runtime, folder
        self.loaded = check_agent(AGENT)

    async def start(self, *turns: Any) -> Case:
        """Launch a run that makes these turns; a turn is a list of (tool, what to do)."""
        folder = self.folder / uuid4().hex
        folder.mkdir()
        asked: list[JsonValue] = [
            turn if isinstance(turn, str) else [{"name": name, "arguments": {"do": do}} for name, do in turn]
            for turn in turns
        ]
        request = Request({"turns": asked}, metadata={"dir": str(folder)})
        runs = await self.runtime.launch_many(self.loaded, [request])
        return Case(self, folder, runs[0])

    async def holder(self, run_id: str) -> tuple[int, Any]:
        """pid and handle of the actor that drives a run."""
        import ray

        async def look() -> tuple[int, Any] | None:
            for entry in ray.util.list_named_actors(all_namespaces=True):
                if entry["namespace"] != self.runtime.settings.namespace or not entry["name"].startswith("run-"):
                    continue
                try:
                    actor = ray.get_actor(entry["name"], entry["namespace"])
                    async with asyncio.timeout(2):
                        if run_id in [held for held, _ in await actor.held.remote()]:
                            return (await actor.ping.remote())[0], actor
                except (ValueError, TimeoutError, ray.exceptions.RayError):
                    continue  # being started, or gone
            return None

        found: tuple[int, Any] = await until(look, f"an actor that drives run {run_id}")
        return found

    async def lease(self, name: str) -> Lease:
        lease = await self.runtime.log.lease(name)
        assert lease is not None
        return lease

    async def replaced(self, old: Lease) -> Lease:
        """Wait until a lease names another process."""

        async def other() -> Lease | None:
            new = await self.runtime.log.lease(old.name)
            return new if new and new.pid != old.pid else None

        new: Lease = await until(other, f"a new {old.name}")
        return new


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def quick(runtime: Runtime, **changes: Any) -> Runtime:
    """The runtime with shorter times, so that a frozen process is found out soon."""
    runtime.settings = replace(runtime.settings, **({"ping_s": 0.5, "hung_s": 4.0} | changes))
    return runtime
