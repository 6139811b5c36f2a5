"""The door of a command to a store: the supervisor that stands on this machine, or a Runtime of its own.

Both create runs durably and leave them to a supervisor; what becomes of them is read from the store. So a command
works the same way through either.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..store.errors import PerdureError
from ..store.log import Create, Refused
from ..store.sql import SqlLog, open_log
from ..store.writer import GroupWriter
from .lease import wait_for_lease
from .nudge import nudge
from .runtime import Runtime
from .standing import Standing, find_standing


@dataclass(frozen=True)
class Size:
    """How much a Runtime of one's own may do at once; a standing supervisor has its own bounds."""

    actors: int | None = None
    concurrency: int | None = None


def is_own(db: str, address: str | None) -> bool:
    """Whether runs will be driven with the environment of this process, by a Runtime of its own on this machine."""
    return address is None and find_standing(db) is None


class Door(Protocol):
    """What commands need of whoever works on the store."""

    @property
    def log(self) -> SqlLog: ...

    async def create(self, creates: Sequence[Create]) -> None:
        """Create runs, all durable when this returns. A run that exists already is left as it is."""
        ...

    async def nudge(self, run_ids: Iterable[str] = ()) -> None:
        """The store has news: these runs were requeued. It is swept every second in any case."""
        ...

    async def check(self) -> None:
        """Raises PerdureError when nobody works on the store any more."""
        ...

    def kill(self) -> None:
        """Leave without a farewell, and leave no process behind."""
        ...


class StandingDoor:
    """A client of a standing supervisor: it appends to the store on a connection of its own."""

    def __init__(self, db: str, event_log: SqlLog, standing: Standing) -> None:
        self.log, self._db, self._standing = event_log, db, standing
        self._writer = GroupWriter(event_log)

    async def create(self, creates: Sequence[Create]) -> None:
        for verdict in await self._writer.submit_all(creates):
            if isinstance(verdict, Refused) and verdict.reason != "exists":
                raise verdict
        nudge(self._db)

    async def nudge(self, run_ids: Iterable[str] = ()) -> None:
        nudge(self._db)

    async def check(self) -> None:
        if not await self._standing.works(self.log):
            raise PerdureError("the standing supervisor is gone; the runs stay resumable: `perdure resume`")

    def kill(self) -> None:
        pass


@contextlib.asynccontextmanager
async def open_door(
    db: str,
    address: str | None = None,
    size: Size = Size(),
    at_hand: Callable[[Door], None] = lambda door: None,
) -> AsyncIterator[Door]:
    """Whoever works on the store: the standing supervisor, else a Runtime until the block ends.

    `at_hand` gets the door before anything is started, so that what is being started can be killed. Raises
    UsageError or LeaseHeld before any process is started.
    """
    event_log = await open_log(db)
    try:
        standing = find_standing(db)
        if standing and await standing.works(event_log):
            door = StandingDoor(db, event_log, standing)
            at_hand(door)
            yield door
            return
        await wait_for_lease(event_log)
    finally:
        await event_log.close()
    runtime = Runtime(db, address=address, actors=size.actors, concurrency=size.concurrency)
    at_hand(runtime)
    async with runtime:
        yield runtime
