"""What every event log does with tool calls: permissions to begin, results in time and too late."""

from __future__ import annotations

import pytest

from perdure.store.events import CodeChanged, Effect, Raised, ToolEvidence
from perdure.store.log import Abandon, Accepted, Answer, Append, Cancel, EventLog, Leave, Result, Unsettle
from perdure.store.states import Status

from .store_kit import (
    LEASE,
    RUN,
    Clock,
    accept,
    asks,
    call_of,
    cancel,
    decides,
    failed,
    mark,
    refuse,
    request,
    result,
    retry,
    settles,
    unsettled,
    with_calls,
    with_events,
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


# -- code that has changed ------------------------------------------------------------------------------------


def changes(expected_seq: int, raised: dict[str, Effect] | None = None, epoch: int = 1) -> Append:
    """The owner's note that its code has changed, and which calls are of a stricter class by it."""
    stricter = {call_id: Raised(effect=effect, hold_s=65.0) for call_id, effect in (raised or {}).items()}
    return Append(RUN, epoch, expected_seq, (CodeChanged(was="d1", digest="d2", tools={}, raised=stricter),))


async def raises(log: EventLog, **raised: Effect) -> Accepted:
    row = await log.run(RUN)
    assert row
    return await accept(log, changes(row.seq, raised))


async def test_the_owners_new_code_is_in_the_runs_row_and_changes_no_call(log: EventLog) -> None:
    before = await with_calls(log, request("c1", "idempotent_write"))
    calls = await log.calls(RUN)
    done = await raises(log)
    assert (done.row.digest, done.row.status, done.row.seq) == ("d2", before.status, before.seq + 1)
    assert await log.run(RUN) == done.row
    assert await log.calls(RUN) == calls
    await accept(log, Leave(RUN, "c1", 1))


async def test_only_the_owner_of_the_run_as_it_stands_notes_new_code(log: EventLog) -> None:
    row = await with_calls(log)
    assert (await refuse(log, changes(row.seq, epoch=0))).reason == "stale_epoch"
    assert (await refuse(log, changes(row.seq - 1))).reason == "conflict"
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    assert (await refuse(log, changes(row.seq + 1))).reason == "ended"


async def test_a_call_that_may_have_run_counts_as_marked_when_its_class_is_raised(log: EventLog, clock: Clock) -> None:
    await with_calls(log, request("c1", "idempotent_write"))
    await accept(log, Leave(RUN, "c1", 1))
    clock.now = 1010.0
    await raises(log, c1="non_idempotent")
    call = await call_of(log)
    assert (call.effect, call.started, call.started_at, call.hold_s) == ("non_idempotent", True, 1010.0, 65.0)
    assert (call.nonce, call.lock) == ("", ""), "nobody knows who runs it"
    assert (await refuse(log, mark())).reason == "taken"
    assert (await refuse(log, retry(2))).reason == "superseded", "decided before it was known that it may have run"
    await accept(log, Unsettle(RUN, unsettled()))
    await accept(log, settles("not_happened"))
    await accept(log, retry(2))
    await accept(log, mark(attempt=2))


async def test_no_task_begins_without_a_mark_once_its_class_is_raised(log: EventLog) -> None:
    await with_calls(log, request("c1", "read_only"), request("c2", "read_only"))
    await raises(log, c1="non_idempotent", c2="idempotent_write")
    assert (await refuse(log, Leave(RUN, "c1", 1))).reason == "illegal"
    await accept(log, Leave(RUN, "c2", 1))
    assert not (await call_of(log, "c2")).started


async def test_the_result_of_a_task_that_began_before_its_class_was_raised_counts(log: EventLog) -> None:
    await with_calls(log, request("c1", "idempotent_write"))
    await raises(log, c1="non_idempotent")
    await accept(log, Result(RUN, result()))
    assert (await call_of(log)).result_seq is not None


async def test_a_call_without_an_attempt_is_raised_and_has_begun_by_nothing(log: EventLog) -> None:
    await with_events(log, request("c1", "idempotent_write"), request("c2"), asks())
    await accept(log, decides())
    await raises(log, c1="non_idempotent")
    call = await call_of(log)
    assert (call.effect, call.attempt, call.started, call.gate) == ("non_idempotent", 0, False, "approved")
    await accept(log, retry(1))
    await accept(log, mark())


@pytest.mark.parametrize("effect", ["read_only", "idempotent_write"])
async def test_a_class_is_never_lowered(log: EventLog, effect: Effect) -> None:
    row = await with_calls(log, request("c1", "idempotent_write"))
    assert (await refuse(log, changes(row.seq, {"c1": effect}))).reason == "illegal"


async def test_only_open_calls_are_raised(log: EventLog) -> None:
    await with_calls(log, request("c1", "read_only"), request("c2"))
    row = (await accept(log, Result(RUN, result()))).row
    assert (await refuse(log, changes(row.seq, {"c1": "non_idempotent"}))).reason == "illegal"
    assert (await refuse(log, changes(row.seq, {"c3": "non_idempotent"}))).reason == "illegal"
