"""Runs that wait for a person, as the supervisor sees them: parked without an owner, released, expired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure.actors import supervision
from perdure.actors.agent import Agent
from perdure.actors.pool import MemberDied
from perdure.actors.requests import Await, Ended, Nudge
from perdure.actors.tools import Approval, Tool, ToolOptions
from perdure.actors.turn import turn_events
from perdure.store.events import ApprovalDecided, CancelRequested, RunCancelled, RunClaimed, TurnStarted
from perdure.store.log import Append, Cancel, Create, Decide
from perdure.store.memory import MemoryLog
from perdure.store.projections import closing_results
from perdure.store.states import Status

from .fakes import ManualClock, accepted, created, held, settle_down, until
from .shapes import asks
from .watch_kit import HeldMember, Watch, lease_of


class Case:
    """A supervisor over runs whose only call is gated."""

    def __init__(self, approval: Approval) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(self.clock)
        tool = Tool(lambda x: x, ToolOptions("non_idempotent"), "pay", approval)
        self.agent = Agent(name="a", model="script:x", tools=(tool,))
        self.lease = lease_of("one", 1e12)
        self.watch = Watch(self.log, self.lease, self.clock)
        self.sweep = self.watch.supervision.sweep

    def member(self, run_id: str) -> HeldMember | None:
        member: HeldMember | None = self.watch.pool.members.get(run_id)
        return member

    async def begins(self, run_id: str, **options: Any) -> HeldMember:
        """A run that is created and claimed; its member drives it."""
        await accepted(self.log, Create(run_id, created(**options)))
        await self.sweep()
        return await self.driven(run_id)

    async def driven(self, run_id: str) -> HeldMember:
        await until(lambda: self.watch.epoch(run_id) > 0)
        member = self.member(run_id)
        assert member
        return member

    async def asks(self, run_id: str) -> None:
        """The owner's append that asks and so parks the run."""
        row = await self.log.run(run_id)
        assert row
        events = (TurnStarted(turn_index=row.turns), *await turn_events(run_id, row.turns, asks("pay"), self.agent))
        assert (await accepted(self.log, Append(run_id, row.epoch, row.seq, events))).row.parked

    async def waits(self, run_id: str) -> None:
        """The owner leaves the run to a person."""
        member = self.member(run_id)
        assert member and member.start
        member.end.set_result(Ended(run_id, member.start.epoch, Status.AWAITING_APPROVAL, "waits"))
        await settle_down()

    async def parked(self, run_id: str = "run") -> None:
        await self.begins(run_id)
        await self.asks(run_id)
        await self.waits(run_id)
        assert self.member(run_id) is None

    async def cancelled(self, run_id: str, member: HeldMember) -> None:
        """The owner ends its run because somebody has cancelled it."""
        row = (await accepted(self.log, Cancel(run_id, CancelRequested(by="me")))).row
        end = RunCancelled(reason="r")
        closing = closing_results(call for call in await self.log.calls(run_id) if call.result_seq is None)
        await accepted(self.log, Append(run_id, row.epoch, row.seq, (*closing, end)))
        member.end.set_result(Ended(run_id, row.epoch, Status.CANCELLED, "ended", end))
        await settle_down()

    async def decides(self, run_id: str = "run", **fields: Any) -> None:
        """Somebody decides by a connection of their own."""
        (call,) = [call for call in await self.log.calls(run_id) if call.result_seq is None]
        values = {"question": call.question, "digest": call.digest, "decision": "approve", "by": "ann"} | fields
        await accepted(self.log, Decide(run_id, ApprovalDecided(tool_call_id=call.tool_call_id, **values)))

    async def reasons(self, run_id: str = "run") -> list[str]:
        events = [stored.event for stored in await self.log.read(run_id)]
        return [event.reason for event in events if isinstance(event, RunClaimed)]

    def ask(self, run_id: str = "run") -> asyncio.Task[Ended]:
        """A client that wants to know how the run ends."""
        return asyncio.create_task(self.watch.supervision.serve(Await(run_id)))


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    made = Case(Approval("always", timeout_s=60.0))
    await made.log.take_lease(made.lease, None)
    yield made


async def test_a_parked_run_has_no_owner_and_takes_no_slot_however_often_the_store_is_swept(case: Case) -> None:
    for number in range(6):
        await case.parked(f"run {number}")
    for _ in range(3):
        await case.sweep()
    assert case.watch.pool.members == {} and case.watch.supervision.status()["live"] == 0
    assert {row.epoch for row in await case.log.runs()} == {1}


async def test_who_asks_for_a_parked_run_is_told_that_it_waits(case: Case) -> None:
    member = await case.begins("run")
    asking = case.ask()
    await case.asks("run")
    assert not member.end.done()
    await case.waits("run")
    assert (await held(asking)).outcome == "waits"
    assert (await held(case.ask())).outcome == "waits", "also who asks later"


async def test_a_released_run_is_claimed_by_the_next_sweep_and_that_is_no_respawn(case: Case) -> None:
    await case.parked()
    await case.decides()
    await case.sweep()
    await case.driven("run")
    assert await case.reasons() == ["start", "decision"]
    row = await case.log.run("run")
    assert row and row.charges == () and not row.parked


async def test_a_decision_that_comes_before_the_owner_has_left_is_found_at_once(case: Case) -> None:
    await case.begins("run")
    await case.asks("run")
    asking = case.ask()
    await case.decides()
    await case.waits("run")
    await until(lambda: case.watch.epoch("run") == 2)
    assert not asking.done(), "it does not wait any more"
    assert await case.reasons() == ["start", "decision"]


@pytest.mark.parametrize("how", ["nudge", "knock"])
async def test_news_of_a_decision_releases_the_run_without_waiting_for_a_timer(
    case: Case, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "SWEEP_S", 3600.0)
    working = asyncio.create_task(case.watch.supervision.run())
    await settle_down()
    await case.watch.supervision.serve(Nudge())
    await accepted(case.log, Create("run", created()))
    await case.watch.supervision.serve(Nudge())
    await case.driven("run")
    await case.asks("run")
    await case.waits("run")
    await case.decides()
    await settle_down()
    assert case.member("run") is None
    if how == "nudge":
        await case.watch.supervision.serve(Nudge(("run",)))
    else:
        case.watch.supervision.look()
    await until(lambda: case.watch.epoch("run") == 2)
    working.cancel()


async def test_released_runs_wait_for_slots_go_before_queued_ones_and_need_no_further_look_at_the_store(
    case: Case,
) -> None:
    names = [f"run {number}" for number in range(6)]
    for name in names:
        await case.parked(name)
    for name in names:
        await case.decides(name)
    await accepted(case.log, Create("queued", created(priority=9)))
    await case.sweep()
    await settle_down()
    assert sorted(case.watch.pool.members) == names[:4], "the oldest go first"
    await case.cancelled(names[0], await case.driven(names[0]))
    await case.sweep(full=False)
    await case.driven(names[4])
    assert len(case.watch.pool.members) == 4 and case.member("queued") is None


async def test_a_question_that_expires_ends_its_run_and_tells_who_asked(case: Case) -> None:
    await case.parked()
    case.clock.now += 59
    await case.sweep()
    row = await case.log.run("run")
    assert row and row.status is Status.AWAITING_APPROVAL
    case.clock.now += 2
    await case.sweep()
    ended = await held(case.ask())
    assert (ended.status, ended.outcome, ended.end.type) == (Status.TIMED_OUT, "ended", "run_timed_out")


async def test_a_default_that_approves_releases_its_run_in_the_same_sweep(case: Case) -> None:
    case.agent = Case(Approval("always", timeout_s=60.0, default="approve")).agent
    await case.parked()
    case.clock.now += 61
    await case.sweep()
    await case.driven("run")
    assert await case.reasons() == ["start", "decision"]


async def test_who_asks_after_a_cancel_by_another_hand_is_told_of_that(case: Case) -> None:
    await case.parked()
    await accepted(case.log, Cancel("run", CancelRequested(by="me")))
    ended = await held(case.ask())
    assert (ended.status, ended.outcome) == (Status.CANCELLED, "ended")


async def test_the_death_of_an_actor_whose_run_was_parked_already_claims_nothing(case: Case) -> None:
    member = await case.begins("run")
    await case.asks("run")
    member.end.set_exception(MemberDied("respawn", 1))
    await settle_down()
    assert case.watch.pool.buried == [member]
    asking = case.ask()
    await settle_down()
    await case.sweep()
    assert (await held(asking)).outcome == "waits"
    assert await case.reasons() == ["start"]


async def test_a_stream_of_news_does_not_keep_the_supervisor_from_looking_at_everything(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "SWEEP_S", 0.01)
    await case.parked()
    working = asyncio.create_task(case.watch.supervision.run())
    await settle_down()
    await case.decides()

    async def chatter() -> None:
        while not case.watch.epoch("run"):
            case.watch.supervision._news.set()
            await asyncio.sleep(0)

    await held(chatter())
    assert await case.reasons() == ["start", "decision"]
    working.cancel()
