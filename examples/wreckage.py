"""Killing the processes of a Runtime, with SIGKILL, and taking down when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from perdure import Run, Runtime
from perdure.actors.kernel import kill_process
from perdure.store.events import ToolCallStarted

Identity = tuple[int, float, str, str]
KINDS = ("run actor", "tool worker", "journal", "supervisor")
LOOK_S = 0.02


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again, until it holds."""
    while True:
        if await holds():
            return
        await asyncio.sleep(LOOK_S)


@dataclass(frozen=True)
class Kill:
    """One process killed. `run_ids` are the runs that it was working on, as far as that is known."""

    kind: str
    pid: int
    at: float
    run_ids: tuple[str, ...] = ()
    back_s: float | None = None
    """When its successor was at work, for the kinds that have one."""


@dataclass
class Wrecker:
    """Kills what it is told to kill, and says so."""

    runtime: Runtime
    say: Callable[[str], None]
    kills: list[Kill] = field(default_factory=list)

    async def run_actor(self) -> None:
        """Kill the busiest run actor, and another one if all that it drove had ended just then."""
        held: list[tuple[str, int]] = []
        pid, started = 0, 0.0

        async def busy() -> bool:
            nonlocal held, pid, started
            for drives, identity in await self._run_actors():
                if len(drives) > len(held):
                    held, (pid, started, *_) = drives, identity
            return bool(held)

        taken_over = False
        while not taken_over:
            held = []
            await until(busy)
            await self._kill("run actor", pid, started, tuple(run_id for run_id, _ in held))
            taken_over = await self._taken_over(dict(held))

    async def _taken_over(self, held: dict[str, int]) -> bool:
        """Whether one of these runs, each with the epoch of its owner, got another one before all had ended."""
        while True:
            rows = await self.runtime.log.runs(ids=list(held))
            if any(row.epoch > held[row.run_id] for row in rows):
                return True
            if all(row.status.is_terminal for row in rows):
                return False
            await asyncio.sleep(LOOK_S)

    async def _run_actors(self) -> list[tuple[list[tuple[str, int]], Identity]]:
        """The runs and the process of every run actor."""
        namespace, found = self.runtime.settings.namespace, []
        for listed in list_named_actors(all_namespaces=True):
            if listed["namespace"] != namespace or not listed["name"].startswith("run-"):
                continue
            try:
                async with asyncio.timeout(2):
                    actor = ray.get_actor(listed["name"], namespace)
                    found.append((await actor.held.remote(), await actor.ping.remote()))
            except (RayError, ValueError, TimeoutError):
                continue  # it is just being started, or buried
        return found

    async def tool_worker(self, run: Run, begun: ToolCallStarted) -> None:
        """Kill the process that is in the middle of a tool call."""
        await self._kill("tool worker", begun.pid, begun.pid_started, (run.run_id,))

    async def leaseholder(self, kind: str, run_ids: tuple[str, ...] = ()) -> None:
        """Kill the journal or the supervisor, and see the next one take its place."""
        if (lease := await self.runtime.log.lease(kind)) is None:
            raise RuntimeError(f"no {kind} works on this store")
        number = await self._kill(kind, lease.pid, lease.pid_started, run_ids)

        async def replaced() -> bool:
            now = await self.runtime.log.lease(kind)
            return now is not None and now.nonce != lease.nonce

        await until(replaced)
        kill = self.kills[number]
        self.kills[number] = Kill(kind, kill.pid, kill.at, run_ids, time.time() - kill.at)

    async def _kill(self, kind: str, pid: int, started: float, run_ids: tuple[str, ...]) -> int:
        at = time.time()
        await asyncio.to_thread(kill_process, pid, started)
        self.say(f"SIGKILL to {kind:11} (process {pid}), {_count(run_ids)}")
        self.kills.append(Kill(kind, pid, at, run_ids))
        return len(self.kills) - 1


def _count(run_ids: tuple[str, ...]) -> str:
    if len(run_ids) == 1:
        return f"at work on run {int(run_ids[0])}"
    return f"at work on {len(run_ids)} runs" if run_ids else "which serves all runs"
