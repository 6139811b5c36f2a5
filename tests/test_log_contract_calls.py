"""What every event log does with tool calls: permissions to begin, results in time and too late."""

from __future__ import annotations

import pytest

from perdure.store.events import ToolEvidence
from perdure.store.log import Abandon, Answer, Cancel, EventLog, Leave, Result
from perdure.store.states import Status

from .store_kit import (
    LEASE,
    RUN,
    Clock,
    accept,
    cancel,
    failed,
    mark,
    refuse,
    request,
    result,
    retry,
    with_calls,
)

# -- permission to begin --------------------------------------------------------------------------------------


async def test_a_mark_is_granted_once_and_again_to_the_same_task_only(log: EventLog, clock: Clock) -> None:
    await with_calls(log)
    clock.now = 1010.0
    first = await accept(log, mark(nonce="task-1"))
    again = await accept(log, mark(nonce="task-1"))
    assert (first.already, again.already, again.row.seq) == (False, True, first.row.seq)
    assert (await refuse(log, mark(nonce="task-2"))).reason == "taken"
    (call,) = await log.calls(RUN)
    assert (call.started, call.started_attempt, call.nonce, call.started_at) == (True, 1, "task-1", 1010.0)


async def test_a_mark_is_not_granted_again_after_a_cancel(log: EventLog) -> None:
    await with_calls(log)
    await accept(log, mark())
    await accept(log, Cancel(RUN, cancel()))
    assert (await refuse(log, mark())).reason == "cancelled"


async def test_no_attempt_begins_when_it_is_older_closed_cancelled_or_its_run_has_ended(log: EventLog) -> None:
    await with_calls(log, request("c1"), request("c2"), request("c3", "read_only"))
    await accept(log, retry(2))
    await accept(log, Result(RUN, result("c2")))
    await accept(log, Leave(RUN, "c3", 1))
    assert (await refuse(log, mark(attempt=1))).reason == "superseded"
    assert (await refuse(log, mark("c2"))).reason == "closed"
    assert (await refuse(log, Leave(RUN, "c3", 2))).reason == "superseded"
    await accept(log, Cancel(RUN, cancel()))
    assert (await refuse(log, mark(attempt=2))).reason == "cancelled"
    assert (await refuse(log, Leave(RUN, "c3", 1))).reason == "cancelled"
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    assert (await refuse(log, Leave(RUN, "c3", 1))).reason == "ended"
    assert (await refuse(log, mark(attempt=2))).reason == "ended"


async def test_leave_appends_nothing(log: EventLog) -> None:
    row = await with_calls(log, request("c1", "read_only"))
    assert (await accept(log, Leave(RUN, "c1", 1))).row == row
    assert await log.run(RUN) == row


async def test_a_retry_opens_the_next_attempt_once(log: EventLog) -> None:
    await with_calls(log)
    assert (await accept(log, retry(2))).calls[0].attempt == 2
    assert (await refuse(log, retry(2))).reason == "superseded"
    assert (await refuse(log, retry(4))).reason == "superseded"
    await accept(log, mark(attempt=2))


async def test_a_retry_needs_the_epoch_and_the_mark_that_were_seen_an_open_call_and_no_cancel(log: EventLog) -> None:
    await with_calls(log)
    assert (await refuse(log, retry(2, epoch=0))).reason == "stale_epoch"
    await accept(log, mark())
    assert (await refuse(log, retry(2, seen_started=0))).reason == "superseded", "it has begun in between"
    await accept(log, Cancel(RUN, cancel()))
    assert (await refuse(log, retry(2, seen_started=1))).reason == "cancelled"
    await accept(log, Result(RUN, result()))
    assert (await refuse(log, retry(2, seen_started=1))).reason == "closed"


# -- results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_error", "attempt", "current_is_marked", "counts"),
    [
        (False, 2, False, True),
        (False, 2, True, True),
        (True, 2, False, True),
        (True, 2, True, True),
        (False, 1, False, True),
        (False, 1, True, False),
        (True, 1, False, False),
        (True, 1, True, False),
    ],
)
async def test_a_late_result_counts_only_as_a_success_while_the_current_attempt_has_not_begun(
    log: EventLog, is_error: bool, attempt: int, current_is_marked: bool, counts: bool
) -> None:
    await with_calls(log)
    await accept(log, mark(attempt=1, nonce="task-1"))
    await accept(log, retry(2, seen_started=1))
    if current_is_marked:
        await accept(log, mark(attempt=2, nonce="task-2"))
    reported = result(attempt=attempt, is_error=is_error)
    accepted = await accept(log, Result(RUN, reported))
    (stored,) = accepted.events
    assert stored.event.type == ("tool_result" if counts else "tool_evidence")
    assert stored.event.event_id == reported.event_id
    (call,) = await log.calls(RUN)
    assert (call.result_seq is not None) == counts
    if counts:
        assert (await refuse(log, mark(attempt=2, nonce="task-3"))).reason == "closed"
    else:
        assert accepted.row.status is Status.AWAITING_TOOL, "evidence moves no state"
        assert call.evidence_seq == (None if is_error else stored.seq)


async def test_a_second_result_is_kept_as_evidence_and_a_repeated_one_not_at_all(log: EventLog) -> None:
    await with_calls(log)
    first, second = result(), result()
    done = await accept(log, Result(RUN, first))
    assert (done.row.status, done.calls) == (Status.RUNNING, ())
    assert (await accept(log, Result(RUN, first))).already
    late = await accept(log, Result(RUN, second))
    assert isinstance(late.events[0].event, ToolEvidence)
    assert (await accept(log, Result(RUN, second))).already
    assert [stored.event.type for stored in await log.read(RUN, 5)] == ["tool_result", "tool_evidence"]
    (call,) = await log.calls(RUN)
    assert (call.result_id, call.result_seq) == (first.event_id, 6)


async def test_a_result_for_a_run_that_has_ended_is_evidence(log: EventLog) -> None:
    await with_calls(log)
    await accept(log, mark())
    ended = (await accept(log, Abandon(RUN, LEASE.nonce, 1, failed("unsettled_effect")))).row
    late = await accept(log, Result(RUN, result()))
    assert late.events[0].event.type == "tool_evidence"
    assert (late.row.status, late.row.end_seq) == (Status.FAILED, ended.end_seq)
    (call,) = await log.calls(RUN)
    assert (call.result_seq, call.evidence_seq) == (None, late.events[0].seq)


async def test_the_run_waits_until_its_last_call_has_a_result(log: EventLog) -> None:
    await with_calls(log, request("c1"), request("c2", "read_only"))
    one = await accept(log, Result(RUN, result("c2")))
    assert (one.row.status, [call.tool_call_id for call in one.calls]) == (Status.AWAITING_TOOL, ["c1"])
    assert (await accept(log, Result(RUN, result("c1")))).row.status is Status.RUNNING


async def test_a_probes_answer_counts_for_the_attempt_it_asked_about_only(log: EventLog) -> None:
    await with_calls(log)
    await accept(log, mark())
    happened = result(source="probe")
    await accept(log, retry(2, seen_started=1))
    assert (await refuse(log, Answer(RUN, happened))).reason == "superseded"
    happened = result(attempt=2, source="probe")
    assert (await accept(log, Answer(RUN, happened))).row.status is Status.RUNNING
    assert (await accept(log, Answer(RUN, happened))).already
    assert (await refuse(log, Answer(RUN, result(attempt=2, source="probe")))).reason == "closed"


async def test_a_probes_answer_is_refused_after_a_cancel_or_an_end(log: EventLog) -> None:
    await with_calls(log)
    await accept(log, mark())
    await accept(log, Cancel(RUN, cancel()))
    assert (await refuse(log, Answer(RUN, result(source="probe")))).reason == "cancelled"
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    assert (await refuse(log, Answer(RUN, result(source="probe")))).reason == "ended"
