"""Calls of which only a person can tell whether they took effect: asked about, settled in each way, settled once."""

from __future__ import annotations

import asyncio

import pytest

from perdure.actors.tools import Approval, Settled
from perdure.store.events import (
    CancelRequested,
    RunRequeued,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallUnsettled,
    ToolResult,
)
from perdure.store.log import Answer, Cancel, Requeue, Result, Retry, Settle

from .fakes import RUN, accepted, held, refused, until
from .gate_kit import ALWAYS, LOOK, NEVER, ONE, Office, paying
from .shapes import asks, says


def interrupted(approval: Approval = NEVER, probe: bool = False) -> Office:
    """A run whose tool pays and dies before it can tell."""
    tool = paying(approval, "non_idempotent")
    if probe:
        tool.reconcile(lambda x: Settled.unknown("no receipt"))
    office = Office(ONE, tool)
    office.tools.killed = {"pay"}
    return office


async def parked(approval: Approval = NEVER, probe: bool = False) -> Office:
    """The same, parked with the question whether it happened."""
    office = interrupted(approval, probe)
    if approval is ALWAYS:
        await office.drive()
        await office.decide(arguments='{"x":7}')
    assert await office.drive() == "awaiting_approval"
    return office


@pytest.mark.parametrize(("probe", "why"), [(False, "no reconcile probe"), (True, "no receipt")])
async def test_a_run_is_parked_with_the_question_and_why_it_is_asked(probe: bool, why: str) -> None:
    office = await parked(probe=probe)
    (question,) = await office.events(ToolCallUnsettled)
    assert why in question.why and question.attempt == 1
    assert (await office.call()).question == question.event_id
    (verdict,) = await office.log.commit([Requeue(RUN, RunRequeued(by="me"))])
    assert str(verdict) == f"run {RUN} waits for a person: whether call t0c0 (pay) took effect"
    await office.check()


async def test_what_happened_is_recorded_as_it_is_told_and_nothing_runs_again() -> None:
    office = await parked()
    await office.settle("happened", '"paid 0"')
    assert (await office.row()).status == "running" and (await office.row()).parked
    assert await office.drive() == "completed"
    (result,) = await office.events(ToolResult)
    assert (result.content, result.source, result.is_error, result.attempt) == ('"paid 0"', "person", False, 1)
    assert office.tools.dispatched() == [("t0c0", 1)]
    await office.check()


async def test_what_did_not_happen_is_dispatched_once_more_with_the_same_key() -> None:
    office = await parked()
    await office.settle("not_happened", reason="the bank says no")
    office.tools.killed.clear()
    assert await office.drive() == "completed"
    first, second = office.tools.works
    assert (first.attempt, second.attempt) == (1, 2) and second.idempotency_key == first.idempotency_key
    assert [event.attempt for event in await office.events(ToolCallRetried)] == [2]
    assert "settled as not happened by ann" in (await office.events(ToolCallRetried))[0].reason
    assert office.seen()[0]["content"] == "paid 0"
    await office.check()


async def test_an_abandoned_call_tells_the_model_that_nobody_knows() -> None:
    office = await parked()
    await office.settle("abandon", reason="the bank is closed")
    assert await office.drive() == "completed"
    (seen,) = office.seen()
    assert seen["is_error"] and "unknown whether attempt 1 took effect" in seen["content"]
    assert "abandoned by ann" in seen["content"] and "the bank is closed" in seen["content"]
    assert len(office.tools.works) == 1
    await office.check()


async def test_a_call_is_settled_once_and_the_second_is_told_how() -> None:
    office = await parked()
    call = await office.call()
    other = ToolCallSettled(
        tool_call_id=call.tool_call_id, attempt=1, question=call.question, outcome="happened", by="bob"
    )
    await office.settle("not_happened")
    (verdict,) = await office.log.commit([Settle(RUN, other, '"paid"')])
    assert isinstance(verdict, Exception) and "settled as not happened by ann" in str(verdict)
    assert await office.events(ToolResult) == []


async def test_while_it_is_asked_nothing_is_dispatched_but_the_answer_of_a_probe_or_of_the_attempt_counts() -> None:
    office = await parked()
    row, call = await office.row(), await office.call()
    retry = ToolCallRetried(tool_call_id=call.tool_call_id, attempt=2, reason="r")
    assert await refused(office.log, Retry(RUN, row.epoch, 1, retry)) == "gated"
    late = ToolResult(tool_call_id=call.tool_call_id, attempt=1, content='"paid after all"')
    assert await refused(office.log, Answer(RUN, late.model_copy(update={"attempt": 2}))) == "superseded"
    await accepted(office.log, Result(RUN, late))
    assert await office.drive() == "completed"
    assert office.seen()[0]["content"] == "paid after all"
    await office.check()


async def test_a_call_with_edited_arguments_that_did_not_happen_is_dispatched_again_with_those() -> None:
    office = await parked(ALWAYS)
    await office.settle("not_happened")
    office.tools.killed.clear()
    assert await office.drive() == "completed"
    assert [work.arguments for work in office.tools.works] == ['{"x":7}'] * 2
    assert office.seen()[0]["content"] == "paid 7" and '{"x":7}' in office.seen()[0]["note"]


async def test_the_second_interruption_is_a_new_question_and_the_first_answer_does_not_count_for_it() -> None:
    office = await parked()
    first = (await office.call()).question
    await office.settle("not_happened")
    assert await office.drive() == "awaiting_approval"
    call = await office.call()
    assert call.question != first
    stale = ToolCallSettled(tool_call_id=call.tool_call_id, attempt=1, question=first, outcome="happened", by="bob")
    assert await refused(office.log, Settle(RUN, stale, '"paid"')) == "superseded"
    await office.settle("happened", '"paid 0"')
    assert await office.drive() == "completed"
    await office.check()


async def test_a_call_that_is_settled_beside_a_running_one_is_released_at_once() -> None:
    office = Office((asks("pay", "look"), says("done")), paying(NEVER, "non_idempotent"), LOOK)
    office.tools.killed, office.tools.holding["look"] = {"pay"}, asyncio.Event()
    driving = await office.start()
    await until(lambda: (RUN, "t0c0") in office.log._calls)
    await until(lambda: office.log._calls[RUN, "t0c0"].unsettled)
    assert (await office.row()).status == "awaiting_tool"
    office.tools.killed.clear()
    await office.settle("not_happened")
    await office.journal.sweep()
    await until(lambda: office.log._calls[RUN, "t0c0"].result_seq is not None)
    assert not driving.done()
    office.tools.holding["look"].set()
    assert (await held(driving)).status == "completed"
    assert [result["content"] for result in office.seen()] == ["paid 0", "seen 1"]
    await office.check()


async def test_a_parked_run_is_cancelled_by_whoever_cancels_it_and_nobody_knows_what_its_call_did() -> None:
    office = await parked()
    await accepted(office.log, Cancel(RUN, CancelRequested(by="me")))
    assert (await office.row()).status == "cancelled"
    (result,) = await office.events(ToolResult)
    assert "outcome unknown" in result.content
    await office.check()
