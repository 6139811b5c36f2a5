"""What every event log does with runs that may take only so long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.store.events import Event, RunCancelled, RunCompleted, RunRequeued, ToolResult, TurnStarted
from perdure.store.log import Abandon, Append, Cancel, Claim, Create, EventLog, Requeue, Result
from perdure.store.rows import RunRow
from perdure.store.states import Status

from .store_kit import (
    LEASE,
    RUN,
    Clock,
    accept,
    asks,
    cancel,
    created,
    decides,
    expire_at,
    failed,
    kinds,
    mark,
    message,
    refuse,
    request,
    requeue,
    result,
)

START = (TurnStarted(turn_index=0), message())


async def limited(log: EventLog, *events: Event, timeout_s: Any = 60) -> RunRow:
    """A run that is created at 1000, claimed, and has these events."""
    await accept(log, Create(RUN, created(config={"limits": {"max_turns": 5, "timeout_s": timeout_s}})))
    await log.take_lease(LEASE, None)
    row = (await accept(log, Claim(RUN, "claim", LEASE.nonce, 0))).row
    return (await accept(log, Append(RUN, row.epoch, row.seq, events))).row if events else row


async def test_a_queued_run_is_cancelled_when_its_time_is_over(log: EventLog, clock: Clock) -> None:
    row = (await accept(log, Create(RUN, created(config={"limits": {"timeout_s": 60}})))).row
    assert (row.timeout_s, row.deadline_at) == (60.0, 1060.0)
    assert (await refuse(log, expire_at(clock, 1060.0))).reason == "stale_lease"
    await log.take_lease(LEASE, None)
    assert (await accept(log, expire_at(clock, 1059.9))).already
    done = await accept(log, expire_at(clock, 1060.0))
    assert kinds(done) == ["cancel_requested", "run_cancelled"]
    assert [getattr(stored.event, "reason", "") for stored in done.events] == ["deadline", "deadline"]
    assert (done.row.status, done.row.error, done.row.deadline_at) == (Status.CANCELLED, "deadline", None)
    assert (await accept(log, expire_at(clock, 2000.0))).already


@pytest.mark.parametrize("events", [(), (*START, request())])
async def test_a_run_with_an_owner_gets_a_cancel_that_its_owner_acts_on(
    log: EventLog, clock: Clock, events: tuple[Event, ...]
) -> None:
    before = await limited(log, *events)
    done = await accept(log, expire_at(clock, 1060.0))
    assert kinds(done) == ["cancel_requested"]
    row = done.row
    assert (row.status, row.cancel, row.error, row.deadline_at) == (before.status, True, "deadline", None)
    assert (await accept(log, expire_at(clock, 2000.0))).already, "once"
    assert (await accept(log, Cancel(RUN, cancel()))).already


async def test_a_run_that_waits_for_a_person_times_out_and_its_questions_are_asked_anew_when_it_is_resumed(
    log: EventLog, clock: Clock
) -> None:
    await limited(log, *START, request(), asks(timeout_s=120.0, default="approve"))
    done = await accept(log, expire_at(clock, 1060.0))
    assert kinds(done) == ["run_timed_out"]
    assert (done.row.status, done.row.error) == (Status.TIMED_OUT, "deadline")
    assert (done.row.due_at, done.row.deadline_at) == (None, None)
    assert (await refuse(log, decides())).reason == "expired"
    again = await accept(log, Requeue(RUN, requeue()))
    assert [(call.gate, call.due_at) for call in again.calls] == [("due", None)]
    assert again.row.deadline_at == 1120.0, "as long again, from the resume on"
    row = (await accept(log, Claim(RUN, "again", LEASE.nonce, 1))).row
    asked = await accept(log, Append(RUN, 2, row.seq, (asks(question="anew", timeout_s=10.0),)))
    assert (asked.row.due_at, asked.row.deadline_at) == (1070.0, 1120.0)


async def test_a_question_that_expires_first_is_decided_first(log: EventLog, clock: Clock) -> None:
    await limited(log, *START, request(), asks(timeout_s=30.0, default="approve"))
    done = await accept(log, expire_at(clock, 1030.0))
    assert kinds(done) == ["approval_decided"]
    assert (done.row.status, done.row.deadline_at) == (Status.AWAITING_TOOL, 1060.0)
    assert kinds(await accept(log, expire_at(clock, 1060.0))) == ["cancel_requested"]


@pytest.mark.parametrize(
    "limits, deadline_at",
    [(None, 1160.0), ({"max_turns": 9}, 1160.0), ({"timeout_s": 5}, 1105.0), ({"timeout_s": None}, None)],
)
async def test_a_resume_may_change_how_long_the_run_may_take(
    log: EventLog, clock: Clock, limits: dict[str, Any] | None, deadline_at: float | None
) -> None:
    row = await limited(log)
    ended = await accept(log, Cancel(RUN, cancel()))
    assert ended.row.deadline_at is None
    end = await accept(log, Append(RUN, 1, row.seq + 1, (RunCancelled(reason="user"),)))
    assert end.row.error == "user"
    clock.now = 1100.0
    again = await accept(log, Requeue(RUN, RunRequeued(by="me", limits=limits)))
    assert again.row.deadline_at == deadline_at
    assert again.row == await log.run(RUN)


async def test_a_run_that_has_ended_has_no_deadline(log: EventLog, clock: Clock) -> None:
    end = RunCompleted(output="x", stop_reason="end_turn")
    row = await limited(log, *START, end)
    assert (row.status, row.deadline_at) == (Status.COMPLETED, None)
    assert (await accept(log, expire_at(clock, 2000.0))).already
    assert await log.runs(due_before=1e9) == []


async def test_runs_are_found_by_their_deadline(log: EventLog) -> None:
    await limited(log, timeout_s=0.5)
    await accept(log, Create("free", created()))
    await accept(log, Create("long", created(config={"limits": {"timeout_s": 1e6}})))

    async def due(before: float) -> list[str]:
        return [row.run_id for row in await log.runs(due_before=before, oldest_first=True)]

    assert (await due(1000.4), await due(1000.5), await due(1e9)) == ([], [RUN], ["long", RUN])


async def test_a_cancelled_run_that_comes_to_wait_for_a_person_ends_with_the_reason_of_the_cancel(
    log: EventLog, clock: Clock
) -> None:
    await limited(log, *START, request(), request("c2", "read_only"), asks())
    await accept(log, expire_at(clock, 1060.0))
    done = await accept(log, Result(RUN, result("c2")))
    assert kinds(done) == ["tool_result", "tool_result", "run_cancelled"]
    closing = done.events[1].event
    assert isinstance(closing, ToolResult) and json.loads(closing.content) == "cancelled: never started"
    assert (done.row.status, done.row.error) == (Status.CANCELLED, "deadline")
    assert (await refuse(log, decides())).reason == "cancelled"


async def test_a_run_that_is_given_up_while_it_is_being_cancelled_ends_as_cancelled(log: EventLog) -> None:
    await limited(log, *START, request(), request("c2"))
    await accept(log, mark("c2"))
    await accept(log, Cancel(RUN, cancel("too dear")))
    done = await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    assert kinds(done) == ["tool_result", "tool_result", "run_cancelled"]
    assert (done.row.status, done.row.error) == (Status.CANCELLED, "too dear")
    texts = [json.loads(stored.event.content) for stored in done.events if isinstance(stored.event, ToolResult)]
    assert [text.partition(",")[0] for text in texts] == ["cancelled: never started", "cancelled: outcome unknown"]
    assert (await refuse(log, Abandon(RUN, LEASE.nonce, 1, failed()))).reason == "ended"
