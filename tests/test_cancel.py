"""The owner that meets a cancel: at a model call, between two steps, with calls that run; and when it is resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from perdure.actors.agent import Agent
from perdure.actors.model import ModelReply, ModelRequest
from perdure.actors.requests import Execute, Executed, Start
from perdure.actors.run import Owner
from perdure.actors.tools import Tool, ToolOptions
from perdure.client.cancel import call_ends
from perdure.store.errors import UsageError
from perdure.store.events import AssistantMessage, CancelRequested, ToolCallRequested, ToolResult
from perdure.store.log import Append, Cancel, Claim, Result

from .fakes import LEASE, RUN, Tape, accepted, held, refused, until
from .gate_kit import LOOK, NEVER, Office, paying
from .shapes import asks, says

BOTH = Tool(lambda x: x, ToolOptions("idempotent_write"), "put")


class SlowTape(Tape):
    """A model that answers a turn when it is let, and notes when nobody waits for it any more."""

    def __init__(self, turns: Sequence[ModelReply]) -> None:
        super().__init__(turns)
        self.answers = asyncio.Event()
        self.closed = 0

    async def __call__(self, request: ModelRequest) -> ModelReply:
        reply = await super().__call__(request)
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.closed += 1
            raise
        return reply


class Desk(Office):
    """One run, that somebody cancels by a connection of his own."""

    def __init__(self, turns: Sequence[ModelReply], *tools: Tool, slow: bool = False) -> None:
        super().__init__(turns, *tools)
        self.slow = SlowTape(turns)
        if slow:
            self.tape = self.slow
            self.agent = Agent(name="a", model=self.slow, tools=tools)
            self.new_journal()
        self.after: Callable[[Any, Any], Awaitable[None]] | None = None
        """Called with each question and answer of the journal, before the owner gets the answer."""

    async def ask(self, payload: Any) -> Any:
        answer = await super().ask(payload)
        if self.after:
            await self.after(payload, answer)
        return answer

    async def cancel(self, **fields: Any) -> None:
        await accepted(self.log, Cancel(RUN, CancelRequested(by="ann", **fields)))

    async def kinds(self) -> list[str]:
        return [stored.event.type for stored in await self.log.read(RUN)]

    async def asked_for(self, kind: str) -> None:
        """Wait until the log has an event of this kind."""
        async with asyncio.timeout(20):
            while kind not in await self.kinds():  # noqa: ASYNC110 - the log tells nobody
                await asyncio.sleep(0.001)


# -- the owner, while the model is asked --------------------------------------------------------------------


async def test_a_model_call_is_given_up_as_soon_as_the_owner_is_told_to_look() -> None:
    desk = Desk([says("done")], slow=True)
    driving = await desk.start()
    await desk.asked_for("turn_started")
    await desk.cancel(reason="too dear")
    desk.owner.look()
    ended = await held(driving)
    assert (ended.status, ended.outcome, ended.end.reason) == ("cancelled", "ended", "too dear")
    assert desk.slow.closed == 1, "nobody waits for the model any more"
    cut = ["assistant_delta", "assistant_interrupted"]
    began = ["run_created", "run_claimed", "turn_started", "cancel_requested"]
    assert await desk.kinds() == [*began, *cut, "run_cancelled"]
    await desk.check()


async def test_an_owner_that_is_told_to_look_in_vain_goes_on_with_the_same_model_call() -> None:
    desk = Desk([says("done")], slow=True)
    driving = await desk.start()
    await desk.asked_for("turn_started")
    for _ in range(3):
        desk.owner.look()
        await asyncio.sleep(0)
    desk.slow.answers.set()
    assert (await held(driving)).status == "completed"
    assert (len(desk.slow.asked), desk.slow.closed) == (1, 0)


async def test_the_delay_of_a_scripted_answer_is_part_of_the_model_call() -> None:
    desk = Desk([ModelReply(text="done", delay_ms=3_600_000)])
    driving = await desk.start()
    await desk.asked_for("turn_started")
    await desk.cancel()
    desk.owner.look()
    assert (await held(driving)).status == "cancelled"


async def test_a_respawned_owner_whose_turn_had_started_is_told_too() -> None:
    desk = Desk([says("done")], slow=True)
    first = await desk.start()
    await desk.asked_for("turn_started")
    first.cancel()
    driving = await desk.start()
    await until(lambda: len(desk.slow.asked) == 2)
    await desk.cancel()
    desk.owner.look()
    assert (await held(driving)).status == "cancelled"
    assert AssistantMessage not in [type(stored.event) for stored in await desk.log.read(RUN)]


# -- a cancel on another connection, between two steps ------------------------------------------------------


async def test_a_cancel_before_the_last_result_of_a_turn_lets_no_other_model_call_begin() -> None:
    desk = Desk([asks("look"), says("done")], LOOK)
    desk.tools.holding["look"] = asyncio.Event()
    driving = await desk.start()
    await until(lambda: bool(desk.tools.works))
    await desk.cancel()
    desk.tools.holding["look"].set()
    assert (await held(driving)).status == "cancelled"
    assert len(desk.tape.asked) == 1
    await desk.check()


async def test_a_cancel_right_before_a_model_call_ends_it_at_the_append_that_starts_the_turn() -> None:
    desk = Desk([asks("look"), asks("look")], LOOK, slow=True)
    desk.slow.answers.set()

    async def cancel_after_the_first_turn(question: Any, answer: Any) -> None:
        if isinstance(answer, Executed) and any(isinstance(stored.event, ToolResult) for stored in answer.events):
            desk.slow.answers.clear()
            await desk.cancel()

    desk.after = cancel_after_the_first_turn
    assert await desk.drive() == "cancelled", "nobody has told the owner to look"
    assert [turn for turn, _ in desk.slow.asked] == [0, 1] and desk.slow.closed == 1
    assert (await desk.row()).turns == 1
    assert len(desk.tools.works) == 1, "no tool begins after it"


async def test_a_cancel_between_the_models_answer_and_its_first_tool_lets_no_tool_begin() -> None:
    desk = Desk([asks("look", "pay")], LOOK, paying())
    tape = desk.tape

    async def cancels(request: ModelRequest) -> ModelReply:
        reply = await tape(request)
        await desk.cancel()
        return reply

    desk.agent = Agent(name="a", model=cancels, tools=desk.agent.tools)
    desk.new_journal()
    assert await desk.drive() == "cancelled"
    assert not desk.tools.works and not await desk.events(ToolCallRequested)
    await desk.check()


async def test_a_call_that_asks_leave_after_the_cancel_does_not_begin() -> None:
    desk = Desk([asks("look", "put")], LOOK, BOTH)
    begin, begun = desk.journal.begin, list[str | None]()

    async def cancel_first(*ask: Any) -> str | None:
        if not begun:
            await desk.cancel()
        begun.append(await begin(*ask))
        return begun[-1]

    desk.journal.begin = cancel_first  # type: ignore[assignment,method-assign]
    assert await desk.drive() == "cancelled"
    assert begun and all(why and "is being cancelled" in why for why in begun)
    assert len(desk.tape.asked) == 1


# -- what runs is over before the run is --------------------------------------------------------------------


async def test_an_owner_joins_again_when_the_log_moved_while_it_joined_and_once_when_it_did_not() -> None:
    desk = Desk([asks("put", "put")], BOTH)
    asked: list[Execute] = []
    real = desk.ask

    async def journal(payload: Any) -> Any:
        if not isinstance(payload, Execute):
            return await real(payload)
        asked.append(payload)
        if len(asked) == 2:  # the first that comes after the cancel: one call comes to an end of its own meanwhile
            done = ToolResult(tool_call_id="t0c0", attempt=1, content='"finished"')
            await accepted(desk.log, Result(RUN, done))
        (verdict,) = await desk.log.commit([Append(RUN, payload.epoch, payload.expected_seq, payload.events)])
        if isinstance(verdict, Exception):
            raise verdict
        if len(asked) == 1:
            await desk.cancel()
        return Executed(tuple(await desk.log.read(RUN, payload.expected_seq)))

    desk.ask = journal  # type: ignore[method-assign]
    assert await desk.drive() == "cancelled"
    _, met, joined, end = asked
    assert not met.events and not joined.events and joined.expected_seq > met.expected_seq
    assert [event.type for event in end.events] == ["tool_result", "run_cancelled"]
    assert [request.tool_call_id for request in joined.known] == ["t0c1"], "with all that the journal needs to stop it"
    ends = call_ends(await desk.log.read(RUN))
    assert [(one.tool_call_id, one.fate) for one in ends] == [("t0c0", "finished"), ("t0c1", "unknown")]
    await desk.check()


async def test_a_cancelled_run_whose_agent_is_gone_is_cancelled_all_the_same() -> None:
    desk = Desk([asks("put")], BOTH)
    desk.tools.holding["put"] = asyncio.Event()
    first = await desk.start()
    await until(lambda: bool(desk.tools.works))
    first.cancel()
    await desk.cancel()
    desk.new_journal()

    def gone(ref: str, digest: str) -> Any:
        raise UsageError("no such file")

    row = await desk.row()
    await accepted(desk.log, Claim(RUN, "claim again", LEASE, row.epoch))
    start = Start(RUN, row.epoch + 1, tuple(await desk.log.read(RUN)))
    ended = await held(Owner(start, desk.ask, gone).drive())
    assert (ended.status, ended.outcome) == ("cancelled", "ended")
    await desk.check()


# -- a cancelled run that is resumed ------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("put",), ("look", "put", "pay")])
async def test_a_cancelled_run_that_is_resumed_sends_a_valid_history(names: tuple[str, ...]) -> None:
    """The model checks what it is sent. Without calls the cancel meets the second model call, else a call that runs."""
    turns = [asks("look"), *([asks(*names)] if names else []), says("done")]
    desk = Desk(turns, LOOK, BOTH, paying(NEVER, "non_idempotent"))
    model = desk.tape

    async def cancels_once(request: ModelRequest) -> ModelReply:
        reply = await model(request)
        if request.turn_index == 1 and not await desk.events(CancelRequested) and not names:
            await desk.cancel()
        return reply

    desk.agent = Agent(name="a", model=cancels_once, tools=desk.agent.tools)
    desk.new_journal()
    if names:
        gate = desk.tools.holding[names[-1]] = asyncio.Event()
        driving = await desk.start()
        await until(lambda: names[-1] in [work.name for work in desk.tools.works])
        await desk.cancel()
        gate.set()
        await desk.journal.sweep()
        assert (await held(driving)).status == "cancelled"
    else:
        assert await desk.drive() == "cancelled"
    open_at_the_cancel = call_ends(await desk.log.read(RUN))
    assert len(open_at_the_cancel) <= len(names)
    await desk.resume()
    assert await desk.drive() == "completed"
    results = [event.tool_call_id for event in await desk.events(ToolResult)]
    assert len(results) == len(set(results)) == 1 + len(names), "each call has one result"
    await desk.check()


@pytest.mark.parametrize("resumed", [False, True])
async def test_two_questions_are_closed_by_a_cancel_and_cannot_be_answered_afterwards(resumed: bool) -> None:
    desk = Desk([asks("pay", "pay"), says("done")], paying())
    assert await desk.drive() == "awaiting_approval"
    late = await desk.decision()
    await desk.cancel()
    assert [one.fate for one in call_ends(await desk.log.read(RUN))] == ["never started"] * 2
    if resumed:
        await desk.resume()
        assert await desk.drive() == "completed"
        assert [result["content"] for result in desk.seen()] == ["cancelled: never started"] * 2
    assert await refused(desk.log, late) in ("cancelled", "ended", "closed")
    assert not desk.tools.works
    await desk.check()
