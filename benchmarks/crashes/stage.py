"""One Runtime, and hands on its processes: who they are, freezing and killing them; and its store from outside.

A process is stopped first, then it is made sure that it stands where it was meant to, and only then it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from perdure import Runtime
from perdure.actors.kernel import process_started
from perdure.client.launching import check_agent
from perdure.store.rows import Lease

T = TypeVar("T")
AGENT: Final = f"{Path(__file__).resolve().with_name('agent.py')}:agent"
PATIENCE_S: Final = 90.0
POLL_S: Final = 0.001
TRIES: Final = 5_000
"""How often a process is stopped to meet it inside of a transaction."""
OTHERS_LOCK_S: Final = 0.05
"""A write lock that is held for longer than this by somebody is held by the process that is stopped."""


async def until(look: Callable[[], Awaitable[T | None]], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true value of something that no event tells of. Raises AssertionError after patience_s."""
    try:
        async with asyncio.timeout(patience_s):
            while not (value := await look()):  # noqa: ASYNC110 - of other processes no event tells
                await asyncio.sleep(POLL_S)
            return value
    except TimeoutError:
        raise AssertionError(f"not seen within {patience_s:g} s: {what}") from None


def runtime_for(folder: Path, **changes: Any) -> Runtime:
    """A Runtime that finds out soon who is frozen."""
    runtime = Runtime(folder / "runs.db", actors=4, concurrency=32)
    quick = {"ping_s": 0.5, "hung_s": 4.0, "lease_s": 2.0, "respawns_max": 1000}
    runtime.settings = replace(runtime.settings, **(quick | changes))
    return runtime


class Stage:
    """A Runtime and what is done to its processes. `sent` counts the signals by the kind of process."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime, self.folder, self.loaded = runtime, folder, check_agent(AGENT)
        self.sent: Counter[str] = Counter()
        self._store = sqlite3.connect(folder / "runs.db", timeout=0, isolation_level=None)

    def close(self) -> None:
        self._store.close()

    def query(self, sql: str, *values: Any) -> list[Any]:
        """Rows of the store, as whoever opens its file sees them."""
        return self._store.execute(sql, values).fetchall()

    def holds_result(self, run_id: str, call_id: str) -> bool:
        found = self.query("SELECT result_seq FROM calls WHERE run_id = ? AND tool_call_id = ?", run_id, call_id)
        return bool(found) and found[0][0] is not None

    def live(self, run_ids: Sequence[str]) -> int:
        """How many of these runs have not ended."""
        ends = "('completed', 'failed', 'cancelled', 'timed_out')"
        return sum(len(self.query(f"SELECT 1 FROM runs WHERE run_id = ? AND status NOT IN {ends}", r)) for r in run_ids)

    def written(self, run_ids: Sequence[str]) -> dict[str, list[str]]:
        """The ids of all events of these runs: once seen they may never go."""
        return {
            run_id: [
                event_id
                for (event_id,) in self.query("SELECT event_id FROM events WHERE run_id = ? ORDER BY seq", run_id)
            ]
            for run_id in run_ids
        }

    async def working(self, name: str) -> Lease:
        """The journal's or the supervisor's lease, once a living process has it."""

        async def living() -> Lease | None:
            lease = await self.runtime.log.lease(name)
            return lease if lease and process_started(lease.pid) == lease.pid_started else None

        return await until(living, f"a living {name}")

    async def replaced(self, old: Lease) -> Lease:
        async def other() -> Lease | None:
            new = await self.working(old.name)
            return new if new.pid != old.pid else None

        return await until(other, f"another {old.name}")

    # -- signals ------------------------------------------------------------------------------------------

    def stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    def thaw(self, pid: int) -> bool:
        """Whether there still was such a process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            return True
        return False

    def kill(self, kind: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.sent[kind] += 1

    def locked(self) -> bool:
        """Whether somebody is inside of a write transaction."""
        try:
            self._store.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        self._store.execute("ROLLBACK")
        return False

    async def stop_between_writes(self, pid: int) -> None:
        """Stop a process that holds no write lock, so that others can write."""

        async def caught() -> bool:
            self.stop(pid)
            if not await self._holds():
                return True
            self.thaw(pid)
            return False

        await until(caught, f"process {pid} outside of a transaction")

    async def stop_in_a_write(self, pid: int, pause_s: Callable[[], float]) -> bool:
        """Stop a process inside of a write transaction. False when it was not met in one."""
        for _ in range(TRIES):
            self.stop(pid)
            if await self._holds():
                return True
            self.thaw(pid)
            await asyncio.sleep(pause_s())
        return False

    async def _holds(self) -> bool:
        """Whether the write lock is held and stays so: then by the process that is stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_LOCK_S):
                while self.locked():  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(POLL_S)
                return False
        return True
