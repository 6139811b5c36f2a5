"""The supervisor gives a run that it claims the code that is there now, and an actor of that version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.loading import folder_digest
from perdure.actors.pool import MemberDied
from perdure.actors.requests import Launch, Start
from perdure.store.events import AgentRef, CodeChanged
from perdure.store.log import Append, Create, EventLog
from perdure.store.memory import MemoryLog

from .fakes import ManualClock, accepted, created, held, settle_down, until
from .watch_kit import HeldMember, HeldPool, Watch, lease_of


class Pool(HeldPool):
    """Remembers for which version each actor was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[AgentRef] = []
        self.new = asyncio.Queue[HeldMember]()

    async def take(self, run_id: str, *about: Any) -> HeldMember:
        self.taken.append(about[0])
        member = await super().take(run_id)
        self.new.put_nowait(member)
        return member


class Case:
    """A supervisor, and an agent's file that is rewritten."""

    def __init__(self, folder: Path) -> None:
        self.file, self.clock = folder / "agents.py", ManualClock()
        self.log: EventLog = MemoryLog(self.clock)
        self.lease = lease_of("one", 1e12)
        self.watch = Watch(self.log, self.lease, self.clock)
        self.pool = self.watch.supervision._pool = self.watch.pool = Pool()  # type: ignore[assignment]
        self.watch.supervision._code._clock = self.clock

    def write(self, text: str) -> AgentRef:
        """The agent as it is from now on."""
        self.file.write_text(text)
        self.clock.now += 10
        return AgentRef(ref=f"{self.file}:agent", digest=folder_digest(self.file.parent), root=str(self.file.parent))

    async def started(self, epoch: int) -> Start:
        """What the actor that is taken next is told."""
        member: HeldMember = await held(self.pool.new.get())
        await until(lambda: member.start is not None)
        assert member.start and member.start.epoch == epoch
        return member.start


@pytest.fixture
async def case(tmp_path: Path) -> AsyncIterator[Case]:
    made = Case(tmp_path)
    await made.log.take_lease(made.lease, None)
    await made.watch.supervision.sweep()
    yield made


async def test_a_launch_that_is_claimed_at_once_keeps_the_code_that_its_client_has_loaded(case: Case) -> None:
    launched = case.write("1")
    case.write("22")
    await case.watch.supervision.serve(Launch((Create("run", created(agent=launched)),)))
    assert (await case.started(1)).agent == launched
    assert case.pool.taken == [launched]


async def test_a_queued_run_is_started_with_the_code_that_is_there_by_then(case: Case) -> None:
    await accepted(case.log, Create("run", created(agent=case.write("1"))))
    now = case.write("22")
    await case.watch.supervision.sweep()
    assert (await case.started(1)).agent == now
    assert case.pool.taken == [now]


async def test_a_respawned_run_gets_an_actor_of_the_code_that_is_there_by_then(case: Case) -> None:
    launched = case.write("1")
    await case.watch.supervision.serve(Launch((Create("run", created(agent=launched)),)))
    await case.started(1)
    now = case.write("22")
    case.pool.members["run"].end.set_exception(MemberDied("respawn", 1))
    assert (await case.started(2)).agent == now
    assert case.pool.taken == [launched, now]


async def test_a_run_whose_change_was_noted_is_known_by_its_newest_code(case: Case) -> None:
    launched = case.write("1")
    await case.watch.supervision.serve(Launch((Create("run", created(agent=launched)),)))
    start = await case.started(1)
    now = case.write("22")
    event = CodeChanged(was=launched.digest, digest=now.digest, tools={})
    await accepted(case.log, Append("run", start.epoch, 2, (event,)))
    case.file.unlink()
    case.file.parent.rmdir()
    case.clock.now += 10
    case.pool.members["run"].end.set_exception(MemberDied("respawn", 1))
    assert (await case.started(2)).agent == now, "its folder is elsewhere: there is nothing newer to be known"
    await settle_down()
