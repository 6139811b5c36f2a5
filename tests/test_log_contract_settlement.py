"""What every event log does with attempts of which nobody knows whether they happened: one answer settles each."""

from __future__ import annotations

import json

import pytest

from perdure.store.events import Settlement, ToolResult
from perdure.store.log import (
    Abandon,
    Accepted,
    Answer,
    Cancel,
    Claim,
    EventLog,
    Expire,
    Leave,
    Refused,
    Requeue,
    Result,
    Unsettle,
)
from perdure.store.states import Status

from .store_kit import (
    LEASE,
    RUN,
    Clock,
    accept,
    call_of,
    cancel,
    decides,
    doubtful,
    failed,
    gated,
    kinds,
    mark,
    refuse,
    request,
    requeue,
    result,
    retry,
    settles,
    unsettled,
    with_calls,
)

BESIDE = request("c2", "read_only")
OUTCOMES: tuple[Settlement, ...] = ("happened", "not_happened", "abandon")


# -- asking ---------------------------------------------------------------------------------------------------


async def test_a_run_whose_only_call_is_in_doubt_is_parked_without_a_deadline(log: EventLog) -> None:
    row = await doubtful(log)
    assert (row.status, row.parked, row.due_at) == (Status.AWAITING_APPROVAL, True, None)
    call = await call_of(log)
    assert (call.unsettled, call.waits, call.question, call.gate) == (True, True, "what-c1-1", "")


async def test_a_call_is_in_doubt_once_for_its_current_attempt(log: EventLog) -> None:
    await doubtful(log)
    assert (await accept(log, Unsettle(RUN, unsettled()))).already
    assert (await refuse(log, Unsettle(RUN, unsettled(attempt=2)))).reason == "superseded"
    again = await accept(log, settles("not_happened"))
    assert [(call.attempt, call.unsettled, call.waits) for call in again.calls] == [(1, False, False)]
    assert (await refuse(log, Unsettle(RUN, unsettled()))).reason == "superseded", "a question is opened once"
    await accept(log, retry(2))
    await accept(log, Result(RUN, result(attempt=2)))
    assert (await refuse(log, Unsettle(RUN, unsettled(attempt=2)))).reason == "closed"


async def test_nothing_begins_while_it_is_in_doubt_whether_the_call_happened(log: EventLog) -> None:
    await doubtful(log)
    for command in (mark(), Leave(RUN, "c1", 1), retry(2, seen_started=1)):
        assert (await refuse(log, command)).reason == "gated"


# -- settling -------------------------------------------------------------------------------------------------


async def test_a_call_that_happened_gets_the_result_that_a_person_gives(log: EventLog) -> None:
    await doubtful(log)
    done = await accept(log, settles("happened", content='{"receipt":7}', reason="saw it"))
    assert (kinds(done), done.row.status) == (["tool_call_settled", "tool_result"], Status.RUNNING)
    closing = done.events[1].event
    assert isinstance(closing, ToolResult)
    assert (closing.content, closing.is_error, closing.source, closing.attempt) == ('{"receipt":7}', False, "person", 1)
    assert (await call_of(log)).decision_text == "settled as happened by ann at 1970-01-01 00:16:40 UTC: saw it"


@pytest.mark.parametrize("content", ["", "done", "{", '{"a":1} 2'])
async def test_a_call_that_happened_needs_its_result_as_json(log: EventLog, content: str) -> None:
    await doubtful(log)
    assert (await refuse(log, settles("happened", content=content))).reason == "illegal"
    await accept(log, settles("happened", content="null"))


async def test_a_call_that_is_given_up_gets_an_error_that_says_that_nobody_knows(log: EventLog) -> None:
    await doubtful(log)
    done = await accept(log, settles("abandon", reason="the shop is gone"))
    assert (kinds(done), done.row.status) == (["tool_call_settled", "tool_result"], Status.RUNNING)
    closing = done.events[1].event
    assert isinstance(closing, ToolResult)
    said = "abandoned by ann: it is unknown whether attempt 1 took effect: the shop is gone"
    assert (json.loads(closing.content), closing.is_error, closing.source) == (said, True, "person")


async def test_a_call_that_did_not_happen_is_in_doubt_no_more_and_waits_for_its_next_attempt(log: EventLog) -> None:
    await doubtful(log)
    done = await accept(log, settles("not_happened", reason="looked"))
    assert (kinds(done), done.row.status) == (["tool_call_settled"], Status.AWAITING_TOOL)
    (call,) = done.calls
    assert (call.attempt, call.started, call.withdrawn) == (1, False, True)
    assert (await refuse(log, mark(attempt=1))).reason == "superseded", "its task must not begin by the old mark"
    assert (await refuse(log, mark(attempt=1, nonce="task-2"))).reason == "superseded", "nor another one"
    anew = unsettled().model_copy(update={"event_id": "anew"})
    assert (await refuse(log, Unsettle(RUN, anew))).reason == "superseded", "a person has said what became of it"
    await accept(log, retry(2))
    assert not (await call_of(log)).withdrawn
    assert (await refuse(log, mark(attempt=1))).reason == "superseded"
    await accept(log, mark(attempt=2, nonce="task-2"))
    assert (await accept(log, Result(RUN, result(attempt=2)))).row.status is Status.RUNNING


async def test_a_call_is_settled_beside_running_ones(log: EventLog) -> None:
    row = await doubtful(log, BESIDE)
    assert (row.status, row.parked) == (Status.AWAITING_TOOL, False)
    assert (await accept(log, settles("abandon"))).row.status is Status.AWAITING_TOOL
    assert (await accept(log, Result(RUN, result("c2")))).row.status is Status.RUNNING


async def test_one_of_two_calls_in_doubt_is_settled_and_the_run_stays_parked(log: EventLog) -> None:
    await doubtful(log, request("c2"))
    await accept(log, mark("c2"))
    await accept(log, Unsettle(RUN, unsettled("c2")))
    row = (await accept(log, settles("abandon"))).row
    assert (row.status, row.parked) == (Status.AWAITING_APPROVAL, True)
    assert (await accept(log, settles("not_happened", "c2", question="what-c2-1"))).row.status is Status.AWAITING_TOOL


@pytest.mark.parametrize("second", OUTCOMES)
@pytest.mark.parametrize("first", OUTCOMES)
async def test_of_two_who_settle_the_second_is_told_how_it_was_settled(
    log: EventLog, first: Settlement, second: Settlement
) -> None:
    await doubtful(log)
    won, lost = await log.commit([settles(first, content="1"), settles(second, by="bob", content="1")])
    assert isinstance(won, Accepted)
    assert isinstance(lost, Refused)
    words = {"happened": "settled as happened", "not_happened": "settled as not happened", "abandon": "abandoned"}
    assert lost.reason == "decided"
    assert f"was {words[first]} by ann at 1970-01-01 00:16:40 UTC" in lost.message


async def test_a_settlement_that_is_sent_again_is_there_already_whatever_has_happened_since(log: EventLog) -> None:
    await doubtful(log)
    settlement = settles("not_happened")
    first = await accept(log, settlement)
    again = await accept(log, settlement)
    assert (again.already, again.events, again.row) == (True, (), first.row)
    await accept(log, retry(2))
    await accept(log, mark(attempt=2))
    await accept(log, Unsettle(RUN, unsettled(attempt=2)))
    assert (await accept(log, settlement)).already
    await accept(log, settles("abandon", attempt=2, question="what-c1-2"))
    assert (await accept(log, settlement)).already


# -- the wrong question ---------------------------------------------------------------------------------------


async def test_an_answer_about_an_older_attempt_is_refused(log: EventLog) -> None:
    await doubtful(log)
    await accept(log, settles("not_happened"))
    await accept(log, retry(2))
    await accept(log, mark(attempt=2))
    assert (await refuse(log, settles("abandon", attempt=2))).reason == "decided", "the question was about attempt 1"
    await accept(log, Unsettle(RUN, unsettled(attempt=2)))
    assert (await refuse(log, settles("happened", content="1"))).reason == "superseded"
    assert (await refuse(log, settles("happened", content="1", question="what-c1-2"))).reason == "superseded"
    await accept(log, settles("happened", content="1", question="what-c1-2", attempt=2))


async def test_a_call_that_is_not_in_doubt_is_not_settled(log: EventLog) -> None:
    await with_calls(log)
    await accept(log, mark())
    for settlement in (settles("happened", content="1"), settles("abandon", question="")):
        assert (await refuse(log, settlement)).reason == "superseded"
    assert (await refuse(log, settles("abandon", "c9"))).reason == "not_found"


async def test_a_question_whether_it_may_run_is_no_question_whether_it_happened(log: EventLog) -> None:
    await gated(log)
    assert (await refuse(log, settles("abandon", question="ask-c1", attempt=0))).reason == "superseded"
    await accept(log, decides())


async def test_a_resumed_run_asks_anew_and_old_answers_count_no_more(log: EventLog) -> None:
    await doubtful(log, BESIDE)
    await accept(log, Abandon(RUN, LEASE.nonce, 1, failed()))
    assert (await refuse(log, settles("abandon"))).reason == "ended"
    again = await accept(log, Requeue(RUN, requeue()))
    assert [call.unsettled for call in again.calls] == [False, False]
    await accept(log, Claim(RUN, "again", LEASE.nonce, 1))
    assert (await refuse(log, settles("abandon"))).reason == "superseded"
    assert (await refuse(log, Unsettle(RUN, unsettled()))).reason == "superseded", "a question is opened once"
    anew = unsettled().model_copy(update={"event_id": "anew"})
    await accept(log, Unsettle(RUN, anew))
    assert (await refuse(log, settles("abandon"))).reason == "superseded"
    await accept(log, settles("abandon", question="anew"))


# -- other answers --------------------------------------------------------------------------------------------


async def test_a_late_result_settles_the_call_and_moves_the_run(log: EventLog) -> None:
    await doubtful(log)
    late = await accept(log, Result(RUN, result()))
    assert (kinds(late), late.row.status, late.calls) == (["tool_result"], Status.RUNNING, ())
    refused = await refuse(log, settles("not_happened"))
    assert (refused.reason, "has its result already" in refused.message) == ("closed", True)


async def test_a_late_success_counts_until_the_new_attempt_has_begun(log: EventLog) -> None:
    await doubtful(log)
    await accept(log, settles("not_happened"))
    await accept(log, retry(2))
    assert kinds(await accept(log, Result(RUN, result()))) == ["tool_result"]
    assert (await refuse(log, mark(attempt=2))).reason == "closed"


async def test_a_probe_may_find_out_while_a_person_is_asked(log: EventLog) -> None:
    await doubtful(log)
    found = await accept(log, Answer(RUN, result(source="probe")))
    assert (found.row.status, found.calls) == (Status.RUNNING, ())


async def test_a_cancelled_run_is_not_settled(log: EventLog) -> None:
    row = await doubtful(log, BESIDE)
    await accept(log, Cancel(RUN, cancel()))
    assert (await refuse(log, settles("abandon"))).reason == "cancelled"
    assert (await refuse(log, Answer(RUN, result(source="probe")))).reason == "cancelled"
    done = await accept(log, Result(RUN, result("c2")))
    assert (done.row.status, done.row.seq) == (Status.CANCELLED, row.seq + 4)
    assert (await refuse(log, settles("abandon"))).reason == "cancelled"


async def test_a_call_that_falls_into_doubt_beside_an_expired_question_times_the_run_out(
    log: EventLog, clock: Clock
) -> None:
    await gated(log, request("c2"), timeout_s=10.0)
    await accept(log, mark("c2"))
    clock.now += 10.0
    await accept(log, Expire(RUN, LEASE.nonce))
    ended = await accept(log, Unsettle(RUN, unsettled("c2")))
    assert (kinds(ended), ended.row.status) == (["tool_call_unsettled", "run_timed_out"], Status.TIMED_OUT)
    assert (await refuse(log, settles("abandon", "c2"))).reason == "expired"
