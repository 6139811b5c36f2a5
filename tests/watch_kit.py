"""A supervisor without Ray: its run actors drive until the test says how they end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from perdure.actors.requests import Ended, Settings, Start
from perdure.actors.supervision import Supervision
from perdure.store.log import EventLog
from perdure.store.rows import Lease
from perdure.store.writer import GroupWriter
from perdure.supervisor import SUPERVISOR

from .fakes import ManualClock


class HeldMember:
    """A run actor that drives until the test says how it ends."""

    apart = False

    def __init__(self) -> None:
        self.end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.start: Start | None = None

    async def ask(self, start: Start) -> Ended:
        self.start = start
        return await self.end


class HeldPool:
    """A pool of such actors, one for each run."""

    def __init__(self) -> None:
        self.members: dict[str, HeldMember] = {}
        self.buried: list[HeldMember] = []
        self.looks: list[tuple[str, int]] = []
        self.deaf = False
        """Nobody can be told to look."""

    async def take(self, run_id: str, *_: Any) -> HeldMember:
        return self.members.setdefault(run_id, HeldMember())

    def join(self, member: HeldMember, run_id: str) -> None:
        pass

    def leave(self, member: HeldMember, run_id: str) -> None:
        self.members.pop(run_id, None)

    async def look(self, run_id: str, epoch: int) -> bool:
        self.looks.append((run_id, epoch))
        return not self.deaf

    async def bury(self, member: HeldMember) -> None:
        self.buried.append(member)

    async def adopt(self) -> list[Any]:
        return []

    def status(self) -> dict[str, Any]:
        return {}


class Watch:
    """A supervisor without Ray."""

    def __init__(self, log: EventLog, lease: Lease, clock: ManualClock) -> None:
        self.pool = cast(Any, HeldPool())
        settings = Settings("store", "name", actors=4, concurrency=4, lease_s=10.0)
        self.supervision = Supervision(log, GroupWriter(log).submit_all, self.pool, settings, lease, clock)

    def epoch(self, run_id: str) -> int:
        """The epoch in which it has the run driven, 0 if it has not."""
        member = self.pool.members.get(run_id)
        return member.start.epoch if member and member.start else 0


def lease_of(nonce: str, expires_at: float) -> Lease:
    return Lease(SUPERVISOR, nonce, "node", "boot", 1, 1.0, expires_at)
