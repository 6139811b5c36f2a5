"""Gated calls, from the model's answer to the conversation that it is shown: who runs when, and with what."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from perdure.actors.requests import Execute, Executed
from perdure.actors.tools import Approval, Tool, ToolOptions
from perdure.store.events import (
    ApprovalDecided,
    ApprovalRequested,
    CancelRequested,
    RunClaimed,
    RunRequeued,
    RunTimedOut,
    ToolCallRetried,
    ToolResult,
)
from perdure.store.log import Cancel, Requeue

from .fakes import AGENT, RUN, accepted, held, refused, settle_down, until
from .gate_kit import ALWAYS, LOOK, ONE, Office, paying
from .shapes import asks, says

# -- each call for itself ---------------------------------------------------------------------------------


async def test_free_calls_of_a_turn_run_at_once_and_the_model_sees_all_results_together_in_order() -> None:
    office = Office((asks("pay", "look", "pay", "look"), says("done")), paying(), LOOK)
    assert await office.drive() == "awaiting_approval"
    (verdict,) = await office.log.commit([Requeue(RUN, RunRequeued(by="me"))])
    assert str(verdict).endswith("whether call t0c0 (pay) may run, whether call t0c2 (pay) may run")
    assert office.tools.dispatched() == [("t0c1", 1), ("t0c3", 1)]
    assert len(office.tape.asked) == 1, "the turn goes on when all calls have results"
    await office.decide(number=2)
    assert await office.drive() == "awaiting_approval", "the other decision is still due"
    assert office.tools.dispatched()[2:] == [("t0c2", 1)]
    await office.decide("reject", reason="too dear")
    assert await office.drive() == "completed"
    assert len(office.tools.works) == 3
    seen = office.seen()
    assert [result["tool_call_id"] for result in seen] == ["t0c0", "t0c1", "t0c2", "t0c3"]
    assert [result["is_error"] for result in seen] == [True, False, False, False]
    assert "too dear" in seen[0]["content"] and seen[2]["content"] == "paid 2"
    await office.check()


async def test_a_decision_beside_a_running_call_releases_its_call_at_once() -> None:
    office = Office((asks("look", "pay"), says("done")), LOOK, paying())
    office.tools.holding["look"] = asyncio.Event()
    driving = await office.start()
    await until(lambda: office.tools.dispatched() == [("t0c0", 1)])
    await office.decide(number=1, arguments='{"x":7}')
    await settle_down()
    assert len(office.tools.works) == 1, "nobody has looked yet"
    await office.journal.sweep()
    await until(lambda: office.tools.dispatched() == [("t0c0", 1), ("t0c1", 1)])
    await until(lambda: len(office.log._events[RUN]) == (office.log._runs[RUN].seq))
    assert not driving.done()
    office.tools.holding["look"].set()
    assert (await held(driving)).status == "completed"
    assert [result["content"] for result in office.seen()] == ["seen 0", "paid 7"]
    assert len(await office.events(RunClaimed)) == 1
    await office.check()


async def test_a_sweep_without_news_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office((asks("look"), says("done")), LOOK)
    office.tools.holding["look"] = asyncio.Event()
    driving = await office.start()
    await until(lambda: len(office.tools.works) == 1)
    await settle_down()
    asked = 0

    async def counted(execute: Any) -> Any:
        nonlocal asked
        asked += 1
        return await execute_(execute)

    execute_ = office.journal.execute
    monkeypatch.setattr(office.journal, "execute", counted)
    for _ in range(3):
        await office.journal.sweep()
        await settle_down()
    assert asked == 0
    office.tools.holding["look"].set()
    assert (await held(driving)).status == "completed"


async def test_a_rejection_beside_a_running_call_is_seen_by_the_model_when_that_is_done() -> None:
    office = Office((asks("look", "pay"), says("done")), LOOK, paying())
    office.tools.holding["look"] = asyncio.Event()
    driving = await office.start()
    await until(lambda: len(office.tools.works) == 1)
    await office.decide("reject", 1, reason="too dear")
    office.tools.holding["look"].set()
    assert (await held(driving)).status == "completed"
    assert "too dear" in office.seen()[1]["content"]


async def test_a_cancel_beside_a_running_call_closes_the_gated_one_as_never_started() -> None:
    office = Office((asks("look", "pay"), says("done")), LOOK, paying())
    office.tools.holding["look"] = asyncio.Event()
    driving = await office.start()
    await until(lambda: len(office.tools.works) == 1)
    await accepted(office.log, Cancel(RUN, CancelRequested(by="me")))
    await office.journal.sweep()
    assert (await held(driving)).status == "cancelled"
    assert "never started" in (await office.events(ToolResult))[1].content
    await office.check()


# -- what is decided --------------------------------------------------------------------------------------


async def test_edited_arguments_are_what_runs_and_the_model_is_told() -> None:
    office = Office(ONE, paying())
    await office.drive()
    await office.decide(arguments='{"x":7}')
    assert await office.drive() == "completed"
    (work,) = office.tools.works
    assert work.arguments == '{"x":7}'
    (seen,) = office.seen()
    assert seen["content"] == "paid 7" and seen["note"] == 'a person changed the arguments to {"x":7}'
    asked = office.tape.asked[-1][1][1]["tool_calls"][0]
    assert json.loads(asked["arguments"]) == {"x": 0}, "what the model said stays as it is"


async def test_an_approved_call_runs_once_though_its_owner_dies_between_decision_and_dispatch() -> None:
    office = Office(ONE, paying(effect="non_idempotent"))
    await office.drive()
    await office.decide()
    dead = await office.start()
    dead.cancel()
    assert office.tools.works == []
    assert await office.drive() == "completed"
    assert office.tools.dispatched() == [("t0c0", 1)]
    retries = await office.events(ToolCallRetried)
    assert [retry.reason.split(" at ")[0] for retry in retries] == ["approved by ann"]


async def test_an_approved_call_runs_once_though_its_journal_dies_when_its_attempt_is_open() -> None:
    office = Office(ONE, paying(effect="non_idempotent"))
    await office.drive()
    await office.decide()
    driving = await office.start()
    await until(lambda: office.log._calls[RUN, "t0c0"].attempt == 1)
    driving.cancel()
    stale = office.tools
    office.new_journal()
    assert await office.drive() == "completed"
    begun = [work for tools in (stale, office.tools) for work in tools.works]
    results = await office.events(ToolResult)
    assert len(results) == 1 and results[0].attempt == max(work.attempt for work in begun)
    assert len({work.idempotency_key for work in begun}) == 1


async def test_a_request_that_is_repeated_after_a_decision_starts_nothing_with_what_it_knew_before() -> None:
    office = Office(ONE, paying())
    await office.drive()
    epoch, events = (await office.row()).epoch, tuple(stored.event for stored in await office.log.read(RUN, 2))
    await office.decide(arguments='{"x":7}')
    office.new_journal()
    repeated = Execute(RUN, epoch, 2, events, (), AGENT, {}, {"pay": paying().options})
    done: Executed = await held(office.journal.execute(repeated))
    assert done.events[-1].event.type == "approval_decided", "its owner has to decide again"
    assert office.tools.works == []


async def test_only_the_newest_question_can_be_answered() -> None:
    office = Office(ONE, paying())
    await office.drive()
    stale = await office.decision()
    await accepted(office.log, Cancel(RUN, CancelRequested(by="me")))
    assert (await office.row()).status == "cancelled", "nobody drives it: who cancels it ends it"
    assert await refused(office.log, stale) in ("cancelled", "closed")


async def test_of_two_deciders_the_second_is_told_how_it_was_decided() -> None:
    office = Office(ONE, paying())
    await office.drive()
    other = await office.decision("reject", by="bob")
    await office.decide()
    (verdict,) = await office.log.commit([other])
    assert isinstance(verdict, Exception) and "approved by ann" in str(verdict)
    assert await office.drive() == "completed"
    assert await refused(office.log, other) == "decided"
    assert len(await office.events(ApprovalDecided)) == 1


# -- deadlines --------------------------------------------------------------------------------------------


async def test_a_question_that_nobody_answers_times_the_run_out_and_a_resume_asks_anew() -> None:
    office = Office(ONE, paying(Approval("always", timeout_s=60.0)))
    await office.drive()
    late = await office.decision()
    office.clock.now += 59
    assert (await office.expire()).already
    office.clock.now += 1
    assert await refused(office.log, late) == "expired", "though nobody has noted it yet"
    await office.expire()
    assert (await office.row()).status == "timed_out"
    assert (await office.events(RunTimedOut))[0].tool_call_id == "t0c0"
    assert await refused(office.log, late) == "expired"
    await office.resume()
    assert await office.drive() == "awaiting_approval"
    first, second = await office.events(ApprovalRequested)
    assert first.event_id != second.event_id and first.digest == second.digest and "asked again" in second.reason
    assert (await office.call()).due_at == office.clock.now + 60
    assert await refused(office.log, late) == "superseded"
    await office.decide()
    assert await office.drive() == "completed"
    assert office.tools.dispatched() == [("t0c0", 1)]
    await office.check()


async def test_a_question_that_expires_beside_a_running_call_times_the_run_out_when_that_is_done() -> None:
    office = Office((asks("look", "pay"), says("done")), LOOK, paying(Approval("always", timeout_s=60.0)))
    office.tools.holding["look"] = asyncio.Event()
    driving = await office.start()
    await until(lambda: len(office.tools.works) == 1)
    office.clock.now += 60
    await office.expire()
    assert (await office.row()).status == "awaiting_tool"
    await office.journal.sweep()
    await settle_down()
    assert not driving.done()
    office.tools.holding["look"].set()
    assert (await held(driving)).status == "timed_out"
    assert (await office.events(ToolResult))[0].content == '"seen 0"', "what was done is kept"
    await office.resume()
    assert await office.drive() == "awaiting_approval"
    assert len(office.tools.works) == 1
    await office.check()


@pytest.mark.parametrize("default", ["approve", "reject"])
async def test_a_default_decides_when_nobody_did(default: Any) -> None:
    office = Office(ONE, paying(Approval("always", timeout_s=60.0, default=default)))
    await office.drive()
    office.clock.now += 61
    await office.expire()
    assert await office.drive() == "completed"
    (seen,) = office.seen()
    assert seen["is_error"] == (default == "reject")
    assert ("paid 0" if default == "approve" else "nobody decided in time") in seen["content"]
    assert (await office.events(ApprovalDecided))[0].by == "deadline"
    assert len(office.tools.works) == (default == "approve")


async def test_a_resumed_run_does_not_ask_about_a_call_that_fits_no_tool_any_more() -> None:
    def pay_with_care(x: int, why: str) -> str:
        return f"paid {x}: {why}"

    office = Office((asks("pay", "pay"), says("done")), paying(Approval("always", timeout_s=60.0)))
    await office.drive()
    office.clock.now += 60
    await office.expire()
    await office.resume()
    stricter = Tool(pay_with_care, ToolOptions("idempotent_write"), "pay", ALWAYS)
    office.agent = office.agent.model_copy(update={"tools": (stricter,)})
    assert await office.drive() == "completed"
    assert [(result["is_error"], "why" in str(result["content"])) for result in office.seen()] == [(True, True)] * 2
    assert office.tools.works == []
    await office.check()
