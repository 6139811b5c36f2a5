"""The door of a command to a store: the supervisor that stands on this machine, or a Runtime of its own.

Both create runs durably and leave them to a supervisor; what becomes of them is read from the store. So a command
works the same way through either.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ..actors.kernel import boot_id, process_started
from ..store.errors import LeaseHeld, PerdureError
from ..store.log import Create, EventLog, Lease, Refused
from ..store.sql import SqlLog, open_log
from ..store.writer import GroupWriter
from .runtime import Runtime
from .standing import Standing, find_standing

SUPERVISOR: Final = "supervisor"
"""Name of the supervisor's lease."""
HELD_AFTER_S: Final = 3.0
"""A lease that is renewed after this long is held by a supervisor that means to stay. One whose cluster was just killed
may still be seen alive for a moment."""
LEASE_POLL_S: Final = 0.2


@dataclass(frozen=True)
class Size:
    """How much a Runtime of one's own may do at once; a standing supervisor has its own bounds."""

    actors: int | None = None
    concurrency: int | None = None


class Door(Protocol):
    """What commands need of whoever works on the store."""

    log: SqlLog

    async def create(self, creates: Sequence[Create]) -> None:
        """Create runs, all durable when this returns. A run that exists already is left as it is."""
        ...

    async def nudge(self) -> None:
        """The store has news. It is swept every second in any case."""
        ...

    async def check(self) -> None:
        """Raises PerdureError when nobody works on the store any more."""
        ...

    def kill(self) -> None:
        """Leave without a farewell, and leave no process behind."""
        ...


class StandingDoor:
    """A client of a standing supervisor: it appends to the store on a connection of its own."""

    def __init__(self, event_log: SqlLog, standing: Standing) -> None:
        self.log, self._standing = event_log, standing
        self._writer = GroupWriter(event_log)

    async def create(self, creates: Sequence[Create]) -> None:
        for verdict in await self._writer.submit_all(creates):
            if isinstance(verdict, Refused) and verdict.reason != "exists":
                raise verdict

    async def nudge(self) -> None:
        pass

    async def check(self) -> None:
        if not await self._standing.works(self.log):
            raise PerdureError("the standing supervisor is gone; the runs stay resumable: `perdure resume`")

    def kill(self) -> None:
        pass


@contextlib.asynccontextmanager
async def open_door(db: str, address: str | None = None, size: Size = Size()) -> AsyncIterator[Door]:
    """Whoever works on the store: the standing supervisor, else a Runtime until the block ends.

    Raises UsageError or LeaseHeld before any process is started.
    """
    event_log = await open_log(db)
    try:
        standing = find_standing(db)
        if standing and await standing.works(event_log):
            yield StandingDoor(event_log, standing)
            return
        await wait_for_lease(event_log)
    finally:
        await event_log.close()
    async with Runtime(db, address=address, actors=size.actors, concurrency=size.concurrency) as runtime:
        yield runtime


async def wait_for_lease(event_log: EventLog) -> None:
    """Return when no supervisor works on the store. Raises LeaseHeld when one does and goes on to."""
    began, first = time.monotonic(), await event_log.lease(SUPERVISOR)
    holder = first
    while holder and first and not lease_is_over(holder):
        if holder.expires_at > first.expires_at and time.monotonic() - began > HELD_AFTER_S:
            raise LeaseHeld(
                f"another supervisor (process {holder.pid} on node {holder.node[:8]}) works on this store; wait until "
                "it is done, or end it: `perdure down` ends one that `perdure up` started"
            )
        await asyncio.sleep(LEASE_POLL_S)
        holder = await event_log.lease(SUPERVISOR)


def lease_is_over(lease: Lease) -> bool:
    """Whether a lease has run out, or its process on this machine is gone."""
    if lease.expires_at < time.time():
        return True
    return lease.boot_id == boot_id() and process_started(lease.pid) != lease.pid_started
