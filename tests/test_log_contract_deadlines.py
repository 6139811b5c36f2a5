"""What every event log does with questions that nobody answers in time, and with those of a run that is resumed."""

from __future__ import annotations

import json

from perdure.store.events import ApprovalDecided, ProcessesChecked, ToolResult, TurnStarted
from perdure.store.log import (
    Abandon,
    Append,
    Cancel,
    Check,
    Claim,
    EventLog,
    Expire,
    Requeue,
    Result,
)
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
    expire_at,
    failed,
    gated,
    kinds,
    refusals,
    refuse,
    request,
    requeue,
    result,
    retry,
    running,
)

# -- deadlines ------------------------------------------------------------------------------------------------


async def test_a_question_that_expires_alone_times_the_run_out(log: EventLog, clock: Clock) -> None:
    await gated(log, timeout_s=60.0)
    early = await accept(log, expire_at(clock, 1059.9))
    assert (early.already, early.events) == (True, ())
    late = await accept(log, expire_at(clock, 1060.0))
    assert kinds(late) == ["approval_expired", "run_timed_out"]
    row = late.row
    assert (row.status, row.due_at, row.end_seq) == (Status.TIMED_OUT, None, row.seq)
    assert row.error == "nobody decided in time about call c1 (refund)"
    assert [(call.gate, call.due_at, call.result_seq) for call in late.calls] == [("expired", None, None)]
    refused = await refuse(log, decides())
    assert (refused.reason, "resume it and it asks anew" in refused.message) == ("expired", True)
    assert (await accept(log, expire_at(clock, 2000.0))).already


async def test_a_question_that_expires_beside_a_running_call_times_the_run_out_when_that_ends(
    log: EventLog, clock: Clock
) -> None:
    await gated(log, BESIDE, request("c3"), asks("c3", timeout_s=500.0), timeout_s=60.0)
    noted = await accept(log, expire_at(clock, 1070.0))
    assert (kinds(noted), noted.row.status, noted.row.due_at) == (["approval_expired"], Status.AWAITING_TOOL, 1500.0)
    assert await refusals(log, 1) == {"gated"}
    assert (await refuse(log, decides())).reason == "expired"
    await accept(log, decides(call_id="c3"))
    await accept(log, retry(1, "c3"))
    assert (await accept(log, Result(RUN, result("c2")))).row.status is Status.AWAITING_TOOL
    ended = await accept(log, Result(RUN, result("c3")))
    assert (kinds(ended), ended.row.status) == (["tool_result", "run_timed_out"], Status.TIMED_OUT)


async def test_a_default_rejects_in_time(log: EventLog, clock: Clock) -> None:
    await gated(log, timeout_s=60.0, default="reject")
    done = await accept(log, expire_at(clock, 1060.0))
    assert (kinds(done), done.row.status) == (["approval_decided", "tool_result"], Status.RUNNING)
    closing = done.events[1].event
    assert isinstance(closing, ToolResult)
    said = "not run: rejected: nobody decided in time; the tool's default is to reject"
    assert (json.loads(closing.content), closing.source) == (said, "rejection")
    late = await refuse(log, decides())
    assert (late.reason, "was rejected by deadline at 1970-01-01 00:17:40 UTC" in late.message) == ("decided", True)


async def test_a_default_approves_in_time(log: EventLog, clock: Clock) -> None:
    await gated(log, timeout_s=60.0, default="approve")
    done = await accept(log, expire_at(clock, 1060.0))
    assert (kinds(done), done.row.status) == (["approval_decided"], Status.AWAITING_TOOL)
    await accept(log, retry(1))
    assert (await accept(log, expire_at(clock, 2000.0))).already


async def test_all_that_is_due_is_decided_in_order_and_the_rest_keeps_its_time(log: EventLog, clock: Clock) -> None:
    others = ("c2", 120.0, "reject"), ("c3", 180.0, "approve"), ("c4", 240.0, None)
    requests = [request(call_id) for call_id, _, _ in others]
    questions = [asks(call_id, timeout_s=timeout_s, default=default) for call_id, timeout_s, default in others]
    row = await gated(log, *requests, *questions, timeout_s=60.0, default="approve")
    assert row.due_at == 1060.0
    done = await accept(log, expire_at(clock, 1200.0))
    decided = [stored.event for stored in done.events if isinstance(stored.event, ApprovalDecided)]
    assert [(event.tool_call_id, event.decision, event.by) for event in decided] == [
        ("c1", "approve", "deadline"),
        ("c2", "reject", "deadline"),
        ("c3", "approve", "deadline"),
    ]
    assert (done.row.status, done.row.due_at) == (Status.AWAITING_TOOL, 1240.0)


async def test_only_the_supervisor_expires_and_never_in_a_cancelled_run(log: EventLog, clock: Clock) -> None:
    await gated(log, BESIDE, timeout_s=60.0, default="approve")
    command = expire_at(clock, 2000.0)
    assert (await refuse(log, Expire(RUN, "another"))).reason == "stale_lease"
    await accept(log, Cancel(RUN, cancel()))
    assert (await accept(log, command)).already, "nothing is decided after a cancel"
    assert (await call_of(log)).gate == "asked"


async def test_nothing_expires_in_a_run_that_has_ended(log: EventLog, clock: Clock) -> None:
    await gated(log, BESIDE, timeout_s=60.0, default="approve")
    assert (await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))).row.due_at is None
    assert (await accept(log, expire_at(clock, 2000.0))).already
    assert await log.runs(due_before=1e9) == []
    again = await accept(log, Requeue(RUN, requeue()))
    assert (again.row.due_at, [call.due_at for call in again.calls]) == (None, [None, None])


async def test_a_closed_call_is_due_no_more(log: EventLog) -> None:
    await gated(log, request("c2"), asks("c2", timeout_s=30.0), timeout_s=60.0)
    await accept(log, Cancel(RUN, cancel()))
    assert [call.due_at for call in await log.calls(RUN)] == [None, None]


async def test_a_cancelled_run_is_due_until_its_processes_were_looked_for(log: EventLog, clock: Clock) -> None:
    await running(log, "no-turn")
    await accept(log, Cancel("no-turn", cancel()))
    look = ProcessesChecked(asked=1, machines=())
    await gated(log)
    assert (await refuse(log, Check(RUN, look))).reason == "not_ended"
    assert (await accept(log, Cancel(RUN, cancel()))).row.due_at == clock()
    assert [row.run_id for row in await log.runs(statuses=[Status.CANCELLED], due_before=clock())] == [RUN]
    done = await accept(log, Check(RUN, look))
    assert (done.row.due_at, done.row.status, len(done.events)) == (None, "cancelled", 1)
    assert (await accept(log, Check(RUN, look))).already
    assert (await accept(log, Check(RUN, ProcessesChecked(asked=2, machines=())))).already
    await accept(log, Requeue(RUN, requeue()))
    assert (await refuse(log, Check(RUN, look))).reason == "not_ended"


async def test_a_cancelled_run_that_is_resumed_before_anybody_looked_is_not_due(log: EventLog) -> None:
    await gated(log)
    await accept(log, Cancel(RUN, cancel()))
    assert (await accept(log, Requeue(RUN, requeue()))).row.due_at is None


async def test_runs_are_found_by_when_their_first_question_expires(log: EventLog, clock: Clock) -> None:
    await gated(log, request("c2"), asks("c2", timeout_s=30.0), timeout_s=60.0)
    await running(log, "another")

    async def due(before: float) -> list[str]:
        return [row.run_id for row in await log.runs(due_before=before)]

    assert (await due(1029.9), await due(1030.0), await due(1e9)) == ([], [RUN], [RUN])
    await accept(log, decides(call_id="c2"))
    assert (await due(1059.9), await due(1060.0)) == ([], [RUN])
    assert await log.runs(due_before=2000.0, statuses=[Status.RUNNING]) == []
    assert [row.run_id for row in await log.runs(due_before=2000.0, ids=[RUN, "another"], limit=1)] == [RUN]
    await accept(log, decides())
    assert await due(1e9) == []


# -- resuming -------------------------------------------------------------------------------------------------


async def test_a_resumed_run_asks_anew_and_old_answers_count_no_more(log: EventLog, clock: Clock) -> None:
    await gated(log, request("c2"), asks("c2"), request("c3"), asks("c3"), timeout_s=60.0)
    await accept(log, decides(call_id="c3"))
    await accept(log, retry(1, "c3"))
    await accept(log, expire_at(clock, 1060.0))
    await accept(log, Result(RUN, result("c3")))
    again = await accept(log, Requeue(RUN, requeue()))
    assert [(call.gate, call.question, call.attempt) for call in again.calls] == [("due", "", 0)] * 2
    assert (again.row.status, again.row.parked, again.row.due_at) == (Status.QUEUED, False, None)
    assert list(again.calls) == [call for call in await log.calls(RUN) if call.result_seq is None]
    row = (await accept(log, Claim(RUN, "again", LEASE.nonce, 1))).row
    assert row.status is Status.AWAITING_TOOL
    assert (await refuse(log, decides())).reason == "superseded"
    assert await refusals(log, 1) == {"gated"}, "it is asked first"
    anew = asks(question="anew", digest="changed", timeout_s=10.0), asks("c2", question="anew-2")
    row = (await accept(log, Append(RUN, 2, row.seq, anew))).row
    assert (row.status, row.parked, row.due_at) == (Status.AWAITING_APPROVAL, True, 1070.0)
    assert (await refuse(log, decides())).reason == "superseded"
    assert (await refuse(log, decides(question="anew"))).reason == "superseded", "the arguments are others"
    await accept(log, decides(question="anew", digest="changed"))


async def test_an_approval_outlives_the_end_of_its_run(log: EventLog) -> None:
    await gated(log, BESIDE)
    await accept(log, decides())
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    again = await accept(log, Requeue(RUN, requeue()))
    assert [(call.gate, call.attempt) for call in again.calls] == [("approved", 0), ("", 1)]
    await accept(log, Claim(RUN, "again", LEASE.nonce, 1))
    await accept(log, retry(1, epoch=2))


async def test_an_approved_call_of_which_nothing_was_dispatched_may_be_asked_about_again(log: EventLog) -> None:
    row = await gated(log)
    await accept(log, decides())
    again = await accept(log, Append(RUN, 1, row.seq + 1, (asks(question="again", digest="changed"),)))
    assert (again.row.status, again.calls[0].gate, again.calls[0].decision_text) == (
        Status.AWAITING_APPROVAL,
        "asked",
        "",
    )
    assert (await refuse(log, decides("reject"))).reason == "superseded"


async def test_a_run_is_parked_until_its_next_claim(log: EventLog) -> None:
    await gated(log)
    row = (await accept(log, decides())).row
    assert (row.status, row.parked) == (Status.AWAITING_TOOL, True)
    row = (await accept(log, Claim(RUN, "again", LEASE.nonce, 1, "decision"))).row
    assert (row.status, row.parked, row.epoch) == (Status.AWAITING_TOOL, False, 2)
    assert await log.run(RUN) == row


async def test_a_turn_may_begin_when_the_last_decision_has_closed_its_call(log: EventLog) -> None:
    await gated(log)
    row = (await accept(log, decides("reject"))).row
    row = (await accept(log, Claim(RUN, "again", LEASE.nonce, 1, "decision"))).row
    assert (await accept(log, Append(RUN, 2, row.seq, (TurnStarted(turn_index=1),)))).row.status is Status.RUNNING
