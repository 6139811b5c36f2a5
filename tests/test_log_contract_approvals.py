"""What every event log does with approvals: nothing of a gated call begins before the one decision that releases it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.store.events import ApprovalDecided, Decision, Effect, RunCompleted, ToolResult
from perdure.store.log import (
    Abandon,
    Accepted,
    Append,
    Cancel,
    Claim,
    EventLog,
    Leave,
    Refused,
    Requeue,
    Result,
    Unsettle,
)
from perdure.store.sql import open_log
from perdure.store.states import Status

from .store_kit import (
    BESIDE,
    LEASE,
    RUN,
    Clock,
    accept,
    asks,
    call_of,
    cancel,
    decides,
    failed,
    gated,
    kinds,
    mark,
    refusals,
    refuse,
    request,
    requeue,
    result,
    retry,
    running,
    unsettled,
    with_calls,
    with_events,
)

# -- asking ---------------------------------------------------------------------------------------------------


async def test_a_run_whose_only_call_is_asked_about_is_parked(log: EventLog, clock: Clock) -> None:
    row = await gated(log, timeout_s=60.0, default="reject")
    assert (row.status, row.parked, row.due_at) == (Status.AWAITING_APPROVAL, True, 1060.0)
    call = await call_of(log)
    assert (call.gate, call.attempt, call.question, call.digest) == ("asked", 0, "ask-c1", "digest-c1")
    assert (call.due_at, call.default, call.waits, call.started) == (1060.0, "reject", True, False)
    assert await log.run(RUN) == row
    assert (await refuse(log, Claim(RUN, "c", LEASE.nonce, 1))).reason == "ended", "a parked run needs no owner"


async def test_beside_a_free_call_the_run_goes_on(log: EventLog) -> None:
    row = await gated(log, BESIDE)
    assert (row.status, row.parked, row.due_at) == (Status.AWAITING_TOOL, False, None)
    await accept(log, Leave(RUN, "c2", 1))
    parked = (await accept(log, Result(RUN, result("c2")))).row
    assert (parked.status, parked.parked) == (Status.AWAITING_APPROVAL, True)


@pytest.mark.parametrize("attempt", [0, 1])
async def test_nothing_of_a_call_begins_while_it_is_asked_about(log: EventLog, attempt: int) -> None:
    await gated(log)
    assert await refusals(log, attempt) == {"gated"}


async def test_a_call_that_may_have_begun_is_not_asked_about(log: EventLog) -> None:
    row = await with_calls(log, request("c1"), request("c2"), request("c3"))
    await accept(log, mark("c2"))
    await accept(log, Result(RUN, result("c3")))
    seq = row.seq + 2
    for call_id in ("c1", "c2", "c3", "c4"):
        assert (await refuse(log, Append(RUN, 1, seq, (asks(call_id),)))).reason == "illegal"


async def test_a_call_is_asked_about_once(log: EventLog) -> None:
    row = await gated(log)
    again = asks(question="again")
    assert (await refuse(log, Append(RUN, 1, row.seq, (again,)))).reason == "illegal"
    await accept(log, decides())
    await accept(log, retry(1))
    assert (await refuse(log, Append(RUN, 1, row.seq + 2, (again,)))).reason == "illegal", "it is dispatched"


async def test_nobody_is_asked_any_more_in_a_run_that_is_being_cancelled(log: EventLog) -> None:
    row = await running(log)
    await accept(log, Cancel(RUN, cancel()))
    assert (await refuse(log, Append(RUN, 1, row.seq + 1, (asks(),)))).reason == "cancelled"


# -- deciding -------------------------------------------------------------------------------------------------


async def test_an_approved_call_gets_its_first_attempt_by_a_retry(log: EventLog) -> None:
    await gated(log, timeout_s=60.0)
    approved = await accept(log, decides(by="ann", reason="a good customer"))
    assert (approved.row.status, approved.row.due_at, kinds(approved)) == (
        Status.AWAITING_TOOL,
        None,
        ["approval_decided"],
    )
    call = await call_of(log)
    assert (call.gate, call.attempt, call.waits, call.due_at) == ("approved", 0, False, None)
    assert call.decision_text == "approved by ann at 1970-01-01 00:16:40 UTC: a good customer"
    assert (await refuse(log, Leave(RUN, "c1", 0))).reason == "gated", "0 is no attempt"
    assert (await refuse(log, mark(attempt=0))).reason == "gated"
    assert (await refuse(log, Result(RUN, result()))).reason == "gated"
    assert (await refuse(log, mark())).reason == "gated"
    assert (await refuse(log, retry(2))).reason == "superseded"
    assert (await accept(log, retry(1))).calls[0].attempt == 1
    assert (await refuse(log, retry(1))).reason == "superseded"
    await accept(log, mark())
    assert (await accept(log, Result(RUN, result()))).row.status is Status.RUNNING


async def test_edited_arguments_stand_in_the_log(log: EventLog) -> None:
    await gated(log)
    decision = decides(arguments='{"amount":1}')
    (stored,) = (await accept(log, decision)).events
    assert stored.event == decision.event
    assert (await log.read(RUN))[-1].event == decision.event


async def test_a_rejected_call_is_closed_by_a_result_that_says_who_and_why(log: EventLog) -> None:
    await gated(log)
    rejected = await accept(log, decides("reject", by="bob", reason="too dear"))
    assert (kinds(rejected), rejected.row.status) == (["approval_decided", "tool_result"], Status.RUNNING)
    closing = rejected.events[1].event
    assert isinstance(closing, ToolResult)
    assert (closing.is_error, closing.source, closing.attempt) == (True, "rejection", 0)
    assert json.loads(closing.content) == "not run: rejected by a person (bob): too dear"
    assert rejected.calls == ()
    assert (await refuse(log, retry(1))).reason == "closed"


async def test_each_decision_counts_for_its_own_call(log: EventLog) -> None:
    await gated(log, request("c2"), asks("c2"))
    one = await accept(log, decides(call_id="c2"))
    assert (one.row.status, [call.gate for call in one.calls]) == (Status.AWAITING_TOOL, ["asked", "approved"])
    assert (await refuse(log, mark())).reason == "gated"
    await accept(log, retry(1, "c2"))
    await accept(log, mark("c2"))
    assert (await accept(log, Result(RUN, result("c2")))).row.status is Status.AWAITING_APPROVAL
    assert (await accept(log, decides("reject"))).row.status is Status.RUNNING


@pytest.mark.parametrize(("first", "said"), [("approve", "was approved by ann"), ("reject", "was rejected by ann")])
@pytest.mark.parametrize("second", ["approve", "reject"])
async def test_of_two_deciders_the_second_is_told_how_it_was_decided(
    log: EventLog, first: Decision, second: Decision, said: str
) -> None:
    await gated(log)
    winner, loser = decides(first, by="ann", reason="it is monday"), decides(second, by="bob")
    won, lost = await log.commit([winner, loser])
    assert isinstance(won, Accepted)
    assert isinstance(lost, Refused)
    assert lost.reason == "decided"
    assert f"{said} at 1970-01-01 00:16:40 UTC: it is monday" in lost.message
    assert (await refuse(log, loser)).message == lost.message, "also in a transaction of its own"


async def test_a_decision_that_is_sent_again_is_there_already_whatever_has_happened_since(log: EventLog) -> None:
    await gated(log)
    decision = decides()
    first = await accept(log, decision)
    again = await accept(log, decision)
    assert (again.already, again.row, again.events) == (True, first.row, ())
    await accept(log, retry(1))
    await accept(log, mark())
    await accept(log, Unsettle(RUN, unsettled()))
    assert (await accept(log, decision)).already
    await accept(log, Result(RUN, result()))
    assert (await accept(log, decision)).already
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    assert (await accept(log, decision)).already


async def test_a_decision_about_other_arguments_is_refused(log: EventLog) -> None:
    await gated(log)
    refused = await refuse(log, decides(digest="another"))
    assert (refused.reason, "other arguments" in refused.message) == ("superseded", True)
    await accept(log, decides())


async def test_a_call_that_nobody_was_asked_about_is_not_decided_on(log: EventLog) -> None:
    await gated(log, BESIDE)
    assert (await refuse(log, decides(call_id="c2"))).reason == "superseded"
    assert (await refuse(log, decides(question=""))).reason == "superseded"
    assert (await refuse(log, decides(call_id="c9"))).reason == "not_found"


async def test_a_question_whether_it_happened_is_no_question_whether_it_may(log: EventLog) -> None:
    await gated(log)
    await accept(log, decides())
    await accept(log, retry(1))
    await accept(log, mark())
    await accept(log, Unsettle(RUN, unsettled()))
    assert (await refuse(log, decides(question="what-c1-1"))).reason == "superseded"


# -- too late -------------------------------------------------------------------------------------------------


async def test_a_cancel_closes_a_parked_run_with_true_texts_and_later_decisions_are_refused(log: EventLog) -> None:
    await gated(log, request("c2"), asks("c2"), request("c3"))
    await accept(log, mark("c3"))
    await accept(log, Unsettle(RUN, unsettled("c3")))
    cancelled = await accept(log, Cancel(RUN, cancel("changed my mind")))
    assert kinds(cancelled) == ["cancel_requested", *["tool_result"] * 3, "run_cancelled"]
    texts = [json.loads(s.event.content) for s in cancelled.events if isinstance(s.event, ToolResult)]
    assert texts[:2] == ["cancelled: never started"] * 2
    assert texts[2] == "cancelled: outcome unknown, attempt 1 had started and may have taken effect"
    assert (cancelled.row.status, cancelled.row.error) == (Status.CANCELLED, "changed my mind")
    late = await refuse(log, decides())
    assert (late.reason, late.message) == ("cancelled", f"run {RUN} is cancelled or about to be")


@pytest.mark.parametrize("effect", ["read_only", "idempotent_write", "non_idempotent"])
async def test_a_call_that_was_approved_and_never_dispatched_never_started(log: EventLog, effect: Effect) -> None:
    await with_events(log, request(effect=effect), request("c2", "read_only"), asks(effect=effect), asks("c2"))
    await accept(log, decides())
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    await accept(log, Requeue(RUN, requeue()))
    assert [call.gate for call in await log.calls(RUN)] == ["approved", "due"]
    cancelled = await accept(log, Cancel(RUN, cancel()))
    texts = [json.loads(s.event.content) for s in cancelled.events if isinstance(s.event, ToolResult)]
    assert texts == ["cancelled: never started"] * 2


async def test_no_decision_passes_a_cancel_that_the_owner_has_yet_to_carry_out(log: EventLog) -> None:
    row = await gated(log, BESIDE, timeout_s=60.0)
    asked = await accept(log, Cancel(RUN, cancel()))
    assert (asked.row.status, asked.row.due_at) == (Status.AWAITING_TOOL, None)
    assert (await refuse(log, decides())).reason == "cancelled"
    closing = result("c1", 0, is_error=True, source="cancel"), result("c2", is_error=True, source="cancel")
    assert (await accept(log, Append(RUN, 1, row.seq + 1, closing))).row.status is Status.RUNNING


async def test_a_result_that_leaves_only_waiting_calls_in_a_cancelled_run_ends_it(log: EventLog) -> None:
    await gated(log, BESIDE)
    await accept(log, Cancel(RUN, cancel()))
    done = await accept(log, Result(RUN, result("c2")))
    assert kinds(done) == ["tool_result", "tool_result", "run_cancelled"]
    assert (done.row.status, done.calls) == (Status.CANCELLED, ())


async def test_a_decision_is_late_once_the_clock_says_so_although_nobody_swept(log: EventLog, clock: Clock) -> None:
    await gated(log, timeout_s=60.0, default="approve")
    clock.now = 1060.0
    for decision in (decides(), decides("reject")):
        late = await refuse(log, decision)
        assert (late.reason, "the time to decide has passed" in late.message) == ("expired", True)
    clock.now = 1059.0
    await accept(log, decides("reject"))


async def test_a_decision_for_a_run_that_has_ended_says_so(log: EventLog) -> None:
    await gated(log, BESIDE)
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    late = await refuse(log, decides())
    assert (late.reason, late.message) == ("ended", f"run {RUN} has ended as failed")


async def test_who_decides_after_a_decided_run_has_ended_is_told_how(log: EventLog) -> None:
    await gated(log)
    row = (await accept(log, decides("reject", by="bob"))).row
    await accept(log, Append(RUN, 1, row.seq, (RunCompleted(output=1, stop_reason="end"),)))
    late = await refuse(log, decides())
    assert (late.reason, "was rejected by bob" in late.message) == ("decided", True)


# -- races ----------------------------------------------------------------------------------------------------


async def test_of_two_who_decide_at_once_on_connections_of_their_own_exactly_one_wins(tmp_path: Path) -> None:
    logs = [await open_log(tmp_path / "x.db") for _ in range(3)]
    await logs[0].take_lease(LEASE, None)
    for number in range(100):
        name = f"run-{number:03}"
        await with_events(logs[0], request(), asks(), run_id=name)
        rivals = [decides("approve", by="ann"), decides("reject", by="bob")][:: (-1) ** number]
        sent = [log.commit([replace(rival, run_id=name)]) for log, rival in zip(logs[1:], rivals, strict=True)]
        verdicts = await asyncio.gather(*sent)
        won = [verdict for (verdict,) in verdicts if isinstance(verdict, Accepted)]
        lost = [verdict for (verdict,) in verdicts if isinstance(verdict, Refused)]
        assert (len(won), [refusal.reason for refusal in lost]) == (1, ["decided"])
        (decision,) = [s.event for s in await logs[0].read(name) if isinstance(s.event, ApprovalDecided)]
        assert won[0].events[0].event == decision
        said = {"ann": "was approved by ann", "bob": "was rejected by bob"}[decision.by]
        assert said in lost[0].message
    await asyncio.gather(*(log.close() for log in logs))
