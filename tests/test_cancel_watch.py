"""Cancels and deadlines as the supervisor sees them: it tells owners, and keeps queued runs from starting."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from perdure.actors.pool import MemberDied
from perdure.actors.requests import Await, Ended, Nudge
from perdure.store.events import CancelRequested, RunCancelled
from perdure.store.log import Cancel, Create
from perdure.store.memory import MemoryLog
from perdure.store.states import Status

from .fakes import ManualClock, accepted, created, held, settle_down, until
from .watch_kit import Watch, lease_of


class Floor:
    """A supervisor over runs that are driven."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(self.clock)
        self.lease = lease_of("one", 1e12)
        self.watch = Watch(self.log, self.lease, self.clock)
        self.sweep = self.watch.supervision.sweep

    async def begins(self, run_id: str, **limits: Any) -> None:
        await accepted(self.log, Create(run_id, created(config={"limits": limits})))
        await self.sweep()
        await until(lambda: self.watch.epoch(run_id) > 0)

    def drives(self, run_id: str, epoch: int) -> bool:
        return self.watch.epoch(run_id) == epoch

    async def cancel(self, run_id: str) -> None:
        await accepted(self.log, Cancel(run_id, CancelRequested(by="ann")))

    async def swept(self) -> list[tuple[str, int]]:
        """Who was told to look, by now and one more sweep."""
        await self.sweep()
        await settle_down()
        looks: list[tuple[str, int]] = self.watch.pool.looks
        return looks


@pytest.fixture
async def floor() -> Floor:
    made = Floor()
    await made.log.take_lease(made.lease, None)
    return made


async def test_the_owner_of_a_cancelled_run_is_told_once_and_no_other(floor: Floor) -> None:
    await floor.begins("one")
    await floor.begins("two")
    assert await floor.swept() == []
    await floor.cancel("one")
    assert await floor.swept() == [("one", 1)]
    assert await floor.swept() == [("one", 1)]


async def test_an_owner_that_cannot_be_told_is_told_by_a_later_sweep(floor: Floor) -> None:
    await floor.begins("one")
    await floor.cancel("one")
    floor.watch.pool.deaf = True
    assert await floor.swept() == [("one", 1)]
    floor.watch.pool.deaf = False
    assert await floor.swept() == [("one", 1)] * 2
    assert await floor.swept() == [("one", 1)] * 2


async def test_the_next_owner_of_a_cancelled_run_is_told_too(floor: Floor) -> None:
    await floor.begins("one")
    await floor.cancel("one")
    await floor.swept()
    floor.watch.pool.members["one"].end.set_exception(MemberDied("respawn", 1))
    await until(lambda: floor.watch.epoch("one") == 2)
    assert await floor.swept() == [("one", 1), ("one", 2)]


async def test_a_run_that_dies_too_often_while_it_is_being_cancelled_is_told_as_cancelled(floor: Floor) -> None:
    await floor.begins("one")
    asked = asyncio.create_task(floor.watch.supervision.serve(Await("one")))
    await floor.cancel("one")
    for epoch in range(1, 7):
        await until(partial(floor.drives, "one", epoch))
        floor.watch.pool.members["one"].end.set_exception(MemberDied("respawn", 1))
    ended = await held(asked)
    assert (ended.status, type(ended.end)) == ("cancelled", RunCancelled)


async def test_a_nudge_has_the_cancel_seen_at_once(floor: Floor) -> None:
    await floor.begins("one")
    sweeping = asyncio.create_task(floor.watch.supervision.run())
    await settle_down()
    await floor.cancel("one")
    await floor.watch.supervision.serve(Nudge())
    await until(lambda: floor.watch.pool.looks == [("one", 1)])
    sweeping.cancel()


async def test_a_run_that_takes_too_long_is_cancelled_and_its_owner_is_told(floor: Floor) -> None:
    await floor.begins("one", timeout_s=60)
    await floor.begins("two", timeout_s=None)
    floor.clock.now += 59.9
    assert await floor.swept() == []
    floor.clock.now += 0.1
    assert await floor.swept() == [("one", 1)]
    cancels = [stored.event for stored in await floor.log.read("one") if isinstance(stored.event, CancelRequested)]
    assert [(event.by, event.reason) for event in cancels] == [("deadline", "deadline")]
    assert await floor.swept() == [("one", 1)]


async def test_a_queued_run_that_takes_too_long_never_starts_and_who_waits_for_it_is_answered(floor: Floor) -> None:
    for number in range(4):
        await floor.begins(f"full {number}")
    await accepted(floor.log, Create("late", created(config={"limits": {"timeout_s": 60}})))
    asked = asyncio.create_task(floor.watch.supervision.serve(Await("late")))
    await floor.swept()
    assert not asked.done()
    floor.clock.now += 60.0
    await floor.swept()
    ended = await held(asked)
    assert (ended.status, ended.end.reason) == ("cancelled", "deadline")
    assert [stored.event.type for stored in await floor.log.read("late")] == [
        "run_created",
        "cancel_requested",
        "run_cancelled",
    ]


async def test_a_queued_run_that_is_cancelled_never_starts_when_a_slot_gets_free(floor: Floor) -> None:
    for number in range(4):
        await floor.begins(f"full {number}")
    await accepted(floor.log, Create("late", created()))
    await floor.swept()
    await floor.cancel("late")
    floor.watch.pool.members["full 0"].end.set_result(Ended("full 0", 1, Status.FAILED, "lost"))
    await floor.swept()
    assert floor.watch.epoch("late") == 0
    row = await floor.log.run("late")
    assert row and (row.status, row.epoch) == (Status.CANCELLED, 0)
