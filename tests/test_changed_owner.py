"""Owner and journal of a run whose code changes: calls that wait, that run, and that were interrupted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure.actors.attempt import Outcome, Work
from perdure.actors.requests import Execute
from perdure.actors.tools import Settled, Tool, ToolOptions
from perdure.store.events import (
    ApprovalRequested,
    CancelRequested,
    CodeChanged,
    Effect,
    RunFailed,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolResult,
)
from perdure.store.log import Accepted, Append, Cancel, Mark

from .changed_kit import NEW, Shop, pay, pay_in, tool_of, with_note
from .fakes import AGENT, RUN, accepted, held, settle_down, until
from .machine_kit import CALL
from .shapes import asks, says


async def test_code_that_is_the_same_is_not_noted() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"))
    assert await shop.drive() == "awaiting_approval"
    await shop.decide()
    assert await shop.drive() == "completed"
    assert await shop.events(CodeChanged) == []
    assert (await shop.row()).digest == "d"
    await shop.check()


async def test_an_owner_without_a_version_works_with_the_one_that_the_log_knows() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"))
    await shop.drive()
    shop.deploy(tool_of("idempotent_write", approval="always"))
    await shop.decide()
    await shop.drive()
    row = await shop.row()
    assert (row.status, row.digest, (await shop.change()).was) == ("completed", "e", "d")


@pytest.mark.parametrize("new", [(), (Tool(pay, ToolOptions("idempotent_write"), "pay_out"),)], ids=["gone", "renamed"])
async def test_an_approved_call_whose_tool_is_gone_gets_an_error_result_and_the_run_goes_on(new: Any) -> None:
    shop = Shop(tool_of("non_idempotent", approval="always"))
    assert await shop.drive() == "awaiting_approval"
    shop.deploy(*new)
    await shop.decide()
    assert await shop.drive() == "completed"
    assert shop.tools.works == []
    assert "'pay' was removed from the agent" in await shop.message() and "it has not run" in await shop.message()
    assert set((await shop.change()).tools) == {tool.name for tool in new}
    await shop.check()


async def test_an_approval_is_not_used_for_another_form_of_the_tool() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"))
    await shop.drive()
    shop.deploy(tool_of("idempotent_write", with_note, approval="always"))
    first = (await shop.call()).digest
    await shop.decide()
    assert await shop.drive() == "awaiting_approval"
    assert shop.tools.works == []
    again = (await shop.events(ApprovalRequested))[-1]
    assert again.reason == "the tool has changed since it was approved" and again.digest != first
    assert "note" in again.arguments_schema["properties"]
    await shop.decide()
    assert await shop.drive() == "completed"
    assert len(shop.tools.works) == 1 and len(await shop.events(ApprovalRequested)) == 2
    assert len(await shop.events(CodeChanged)) == 1, "a change is noted once"
    await shop.check()


async def test_an_edited_call_is_asked_about_anew_with_its_edited_arguments() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"))
    await shop.drive()
    await shop.decide(arguments='{"x":7}')
    shop.deploy(tool_of("idempotent_write", with_note, approval="always"))
    await shop.drive()
    assert (await shop.events(ApprovalRequested))[-1].arguments == '{"x":7}'
    await shop.decide()
    assert await shop.drive() == "completed"
    assert shop.seen()[0]["content"] == "paid 7"


async def test_an_approval_holds_when_only_the_code_behind_the_tool_has_changed() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"))
    await shop.drive()
    shop.deploy(tool_of("idempotent_write", lambda x: f"paid {x} by the new code", approval="always"))
    (shown,) = shop.agent.offered
    shown.arguments = tool_of("idempotent_write").arguments
    shown.schema = tool_of("idempotent_write").schema
    await shop.decide()
    assert await shop.drive() == "completed"
    assert shop.seen()[0]["content"] == "paid 0 by the new code"


async def test_an_approved_call_that_lacks_a_new_argument_gets_an_error_result() -> None:
    shop = Shop(tool_of("non_idempotent", approval="always"))
    await shop.drive()
    shop.deploy(tool_of("non_idempotent", pay_in, approval="always"))
    await shop.decide()
    assert await shop.drive() == "completed"
    assert "currency: Field required" in await shop.message()
    assert shop.tools.works == []


async def test_an_approved_call_of_a_raised_class_is_marked_when_it_runs() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"))
    await shop.drive()
    shop.deploy(tool_of("non_idempotent", approval="always"))
    await shop.decide()
    assert await shop.drive() == "completed"
    assert [work.effect for work in shop.tools.works] == ["non_idempotent"]
    assert [event.attempt for event in await shop.events(ToolCallStarted)] == [1]
    assert (await shop.change()).raised.keys() == {CALL}
    await shop.check()


async def test_a_run_that_only_waits_keeps_its_question_whatever_its_code_is() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"))
    await shop.drive()
    question = (await shop.call()).question
    shop.deploy()
    await settle_down()
    assert (await shop.call()).question == question
    await shop.decide("reject", reason="no")
    assert await shop.drive() == "completed"
    assert len(await shop.events(ToolResult)) == 1


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        ("read_only", "it may have run, which has changed nothing"),
        ("idempotent_write", "it may have run, with the idempotency key"),
    ],
)
async def test_an_interrupted_call_whose_tool_is_gone_says_that_it_may_have_run(effect: Effect, said: str) -> None:
    shop = Shop(tool_of(effect))
    await shop.interrupted()
    shop.deploy()
    assert await shop.drive() == "completed"
    assert said in await shop.message()
    if effect == "idempotent_write":
        (work,) = [event for event in shop.log._events[RUN] if event.event.type == "tool_call_requested"]
        assert work.event.idempotency_key in await shop.message()  # type: ignore[union-attr]
    await shop.check()


async def test_a_marked_call_whose_tool_is_gone_goes_to_a_person_who_settles_it() -> None:
    shop = Shop(tool_of("non_idempotent"))
    await shop.interrupted()
    shop.deploy()
    assert await shop.drive() == "awaiting_approval"
    (question,) = await shop.events(ToolCallUnsettled)
    assert "'pay' was removed from the agent" in question.why
    await shop.settle("happened", '"paid by hand"')
    assert await shop.drive() == "completed"
    assert shop.seen()[0]["content"] == "paid by hand"
    await shop.check()


async def test_a_call_that_a_person_says_did_not_happen_is_closed_when_its_tool_is_gone() -> None:
    shop = Shop(tool_of("non_idempotent"))
    await shop.interrupted()
    shop.deploy()
    await shop.drive()
    await shop.settle("not_happened")
    assert await shop.drive() == "completed"
    assert "it has not run" in await shop.message()
    assert shop.tools.works == []


async def test_a_mark_that_comes_before_the_error_result_is_not_overlooked() -> None:
    shop = Shop(tool_of("non_idempotent"))
    asked: list[Work] = []

    async def about_to_begin(work: Work, options: ToolOptions) -> Outcome:
        asked.append(work)
        await asyncio.Event().wait()
        raise AssertionError("nobody lets it go on")

    shop.tools.run = about_to_begin  # type: ignore[method-assign]
    driving = await shop.start()
    await until(lambda: bool(asked))
    driving.cancel()
    shop.new_journal()
    shop.deploy()
    mark, submit = shop.tools._mark(asked[0]), shop.journal.submit
    assert mark

    async def marked_before(command: Any) -> Accepted:
        if isinstance(command, Append) and isinstance(command.events[0], ToolResult):
            shop.journal.submit = submit  # type: ignore[method-assign]
            await accepted(shop.log, Mark(RUN, mark))
        return await submit(command)

    shop.journal.submit = marked_before  # type: ignore[method-assign]
    assert await shop.drive() == "awaiting_approval"
    assert await shop.events(ToolResult) == []
    await shop.check()


async def test_an_interrupted_call_that_lacks_a_new_argument_says_so() -> None:
    shop = Shop(tool_of("idempotent_write"))
    await shop.interrupted()
    shop.deploy(tool_of("idempotent_write", pay_in))
    assert await shop.drive() == "completed"
    assert "currency: Field required" in await shop.message() and "it may have run" in await shop.message()


@pytest.mark.parametrize("told", ["happened", "did_not_happen", "unknown", "nothing"])
async def test_a_raised_call_that_may_have_run_is_asked_about_after_its_deadline(told: str) -> None:
    shop = Shop(tool_of("idempotent_write", timeout_s=10.0))
    await shop.interrupted()
    stricter = tool_of("non_idempotent", timeout_s=3.0)
    answers = {"happened": Settled.happened("found"), "did_not_happen": Settled.did_not_happen()}
    if told != "nothing":
        stricter.reconcile(lambda x: answers.get(told, Settled.unknown("no books")))
    shop.deploy(stricter)
    began = shop.clock.now
    status = await shop.drive()
    assert shop.clock.now >= began + 15.0, "the attempt was given ten seconds, and the grace"
    dispatched = [(work.attempt, work.effect) for work in shop.tools.works]
    if told in answers:
        assert status == "completed"
        assert shop.seen()[0]["content"] == ("found" if told == "happened" else "paid 0")
        assert dispatched == ([] if told == "happened" else [(2, "non_idempotent")])
    else:
        assert (status, dispatched) == ("awaiting_approval", [])
    assert (await shop.change()).raised[CALL].effect == "non_idempotent"
    await shop.check()


async def test_a_call_that_runs_goes_on_under_new_code_and_its_result_counts() -> None:
    shop = Shop(tool_of("idempotent_write"))
    driving = await shop.joined(Tool(pay, ToolOptions("idempotent_write"), "other"))
    assert not driving.done()
    shop.tools.holding["pay"].set()
    assert (await held(driving)).status == "completed"
    assert shop.seen()[0] == {"tool_call_id": CALL, "name": "pay", "content": "paid 0", "is_error": False}
    assert len(shop.tools.works) == 1
    await shop.check()


async def test_a_call_whose_task_dies_under_new_code_is_dispatched_again_with_that() -> None:
    shop = Shop(tool_of("idempotent_write"))
    driving = await shop.joined(tool_of("idempotent_write"))
    shop.tools.killed.add("pay")
    first, again = shop.tools.holding["pay"], asyncio.Event()
    shop.tools.holding["pay"] = again
    first.set()
    await until(lambda: len(shop.tools.works) == 2)
    shop.tools.killed.clear()
    again.set()
    assert (await held(driving)).status == "completed"
    assert [work.agent for work in shop.tools.works] == [AGENT, NEW]
    assert len({work.idempotency_key for work in shop.tools.works}) == 1


async def test_a_call_whose_task_dies_when_its_tool_is_gone_is_closed_then() -> None:
    shop = Shop(tool_of("idempotent_write"))
    driving = await shop.joined()
    shop.tools.killed.add("pay")
    shop.tools.holding["pay"].set()
    assert (await held(driving)).status == "completed"
    assert len(shop.tools.works) == 1 and "it may have run" in await shop.message()
    await shop.check()


async def test_a_call_whose_task_dies_when_its_class_is_raised_is_asked_about_and_not_repeated() -> None:
    shop = Shop(tool_of("idempotent_write", attempts_max=1))
    stricter = tool_of("non_idempotent")
    stricter.reconcile(lambda x: Settled.happened("found"))
    driving = await shop.joined(stricter)
    shop.tools.killed.add("pay")
    shop.tools.holding["pay"].set()
    assert (await held(driving)).status == "completed"
    assert len(shop.tools.works) == 1 and shop.seen()[0]["content"] == "found"
    await shop.check()


async def test_recorded_results_are_replayed_without_the_code_that_made_them() -> None:
    shop = Shop(tool_of("idempotent_write"), (asks("pay"), asks("pay"), says("done")))
    await shop.interrupted(works=2)
    shop.deploy()
    assert await shop.drive() == "completed"
    assert shop.tape.asked[-1][1][2]["results"][0]["content"] == '"paid 0"'
    assert "it may have run" in await shop.message(turn=1)


async def test_an_agent_that_is_gone_fails_its_run_with_the_decision_kept() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"))
    await shop.drive()
    await shop.decide()
    shop.deploy(tool_of("idempotent_write", approval="always"))
    shop.unavailable = True
    assert await shop.drive() == "failed"
    (end,) = await shop.events(RunFailed)
    assert (end.code, end.message) == ("agent_unavailable", "the agent is gone")
    assert await shop.events(CodeChanged) == []
    shop.unavailable = False
    await shop.resume()
    assert await shop.drive() == "completed"
    assert len(shop.tools.works) == 1 and len(await shop.events(ApprovalRequested)) == 1
    await shop.check()


async def test_a_run_that_is_cancelled_needs_no_code() -> None:
    shop = Shop(tool_of("idempotent_write"))
    await shop.interrupted()
    await accepted(shop.log, Cancel(RUN, CancelRequested(by="me")))
    shop.unavailable = True
    shop.deploy()
    assert await shop.drive() == "cancelled"
    assert "may have run" in (await shop.events(ToolResult))[0].content


async def test_a_change_that_meets_newer_events_is_noted_once_behind_them() -> None:
    shop = Shop(tool_of("idempotent_write", approval="always"), (asks("pay", "pay"), says("done")))
    await shop.drive()
    await shop.decide(number=0)
    shop.deploy(tool_of("idempotent_write", approval="always"))
    execute = shop.journal.execute
    met: list[Execute] = []

    async def conflicting(ask: Execute) -> Any:
        if not met:
            met.append(ask)
            await shop.decide(number=1)
        return await execute(ask)

    shop.journal.execute = conflicting  # type: ignore[method-assign]
    assert await shop.drive() == "completed"
    assert isinstance(met[0].events[0], CodeChanged)
    assert len(await shop.events(CodeChanged)) == 1
    assert len(shop.tools.works) == 2
    await shop.check()
