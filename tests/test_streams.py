"""Answers that come in pieces: what of them is durable, what a crash, a cancel or an error leaves, what it costs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure.actors import reception
from perdure.actors.agent import Agent
from perdure.actors.machine import messages
from perdure.actors.model import ModelReply, ModelRequest, Stream, delayed
from perdure.actors.partial import Partial
from perdure.actors.reception import Reception
from perdure.actors.tools import Tool
from perdure.store.events import (
    AssistantDelta,
    AssistantInterrupted,
    AssistantMessage,
    CancelRequested,
    RunFailed,
    Usage,
)
from perdure.store.log import Cancel

from .fakes import RUN, accepted, check_messages, held, until
from .gate_kit import LOOK, Office
from .shapes import asks

TOLD = Usage(input_tokens=40)
ANSWER = ModelReply(text="one two three", usage=Usage(input_tokens=40, output_tokens=5))


class Streaming(Office):
    """One run, whose model answers in pieces that a test sends it."""

    def __init__(self, *tools: Tool) -> None:
        super().__init__([], *tools)
        self.agent = Agent(name="a", model=self._model, tools=tools)
        self.new_journal()
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.requests: list[ModelRequest] = []
        self.closed = 0

    async def _model(self, request: ModelRequest) -> AsyncGenerator[Any, None]:
        check_messages(request.messages)
        self.requests.append(copy.deepcopy(request))
        try:
            while not isinstance(given := await self.sent.get(), ModelReply):
                if isinstance(given, Exception):
                    raise given
                yield given
            yield given
        finally:
            self.closed += 1

    async def has_said(self, text: str) -> None:
        """Wait until this is what the log has of an answer that is not complete."""
        async with asyncio.timeout(20):
            while (await self.partial()).text != text:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def partial(self) -> Partial:
        return (await self.state()).partial or Partial("", None, complete=False)

    async def turn_started(self) -> None:
        async with asyncio.timeout(20):
            while "turn_started" not in await self.kinds():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def kinds(self) -> list[str]:
        return [stored.event.type for stored in await self.log.read(RUN)]

    async def cancel(self) -> None:
        await accepted(self.log, Cancel(RUN, CancelRequested(by="ann")))
        self.owner.look()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece does not wait for more."""
    monkeypatch.setattr(reception, "PIECE_S", 0)


@pytest.mark.usefixtures("at_once")
async def test_what_a_slow_model_has_said_so_far_is_durable_and_is_no_turn() -> None:
    case = Streaming()
    driving = await case.start()
    for given in (TOLD, "one ", "two "):
        case.sent.put_nowait(given)
        await until(case.sent.empty)
    await case.has_said("one two ")
    state = await case.state()
    partial = state.partial
    assert partial and (partial.told, partial.complete, state.turn_count, state.usage) == (TOLD, False, 0, Usage())
    case.sent.put_nowait(ANSWER)
    assert (await held(driving)).status == "completed"
    state = await case.state()
    assert (state.partial, state.usage) == (None, ANSWER.usage), "an answer counts once"
    assert "assistant_interrupted" not in await case.kinds()
    await case.check()


@pytest.mark.usefixtures("at_once")
async def test_a_word_that_may_become_a_key_waits_for_its_end() -> None:
    case = Streaming()
    driving = await case.start()
    case.sent.put_nowait("It is ")
    await case.has_said("It is ")
    case.sent.put_nowait("sk-proj-abcdefghij")
    async with asyncio.timeout(20):
        while "sk" not in case.owner._reception.stream.received or Reception.waiting:  # type: ignore[union-attr] # noqa: ASYNC110
            await asyncio.sleep(0.001)
    case.sent.put_nowait("klmnop1234567890 is it")
    await case.has_said(f"It is {'*' * 34} is ")
    case.sent.put_nowait(ANSWER)
    assert (await held(driving)).status == "completed"
    assert "abcdefghij" not in repr(await case.log.read(RUN))


async def test_a_call_that_is_quicker_than_half_a_second_appends_no_piece() -> None:
    case = Streaming()
    driving = await case.start()
    case.sent.put_nowait("one ")
    await case.turn_started()
    case.sent.put_nowait("two ")
    case.owner.look()
    await until(case.sent.empty)
    case.sent.put_nowait(ANSWER)
    assert (await held(driving)).status == "completed"
    assert await case.kinds() == ["run_created", "run_claimed", "turn_started", "assistant_message", "run_completed"]
    assert Reception.waiting == 0


@pytest.mark.usefixtures("at_once")
async def test_a_turn_whose_process_died_in_mid_stream_is_asked_anew_with_the_same_request() -> None:
    case = Streaming(LOOK)
    first = await case.start()
    case.sent.put_nowait(asks("look"))
    await until(lambda: len(case.requests) == 2)
    case.sent.put_nowait("one ")
    await case.has_said("one ")
    first.cancel()
    assert (await case.state()).partial, "what has come is there, and is no turn"
    driving = await case.start()
    await until(lambda: len(case.requests) == 3)
    assert case.requests[2] == case.requests[1], "the partial text is not in the request"
    case.sent.put_nowait("un ")
    await case.has_said("un ")
    assert "".join(delta.text for delta in await case.events(AssistantDelta)) == "one un ", "what came first is kept"
    case.sent.put_nowait(ANSWER)
    assert (await held(driving)).status == "completed"
    (lost,) = await case.events(AssistantInterrupted)
    assert lost.estimated and lost.usage.output_tokens == 1 and lost.usage.input_tokens > 0
    state = await case.state()
    answered = [message.usage for message in await case.events(AssistantMessage)]
    assert state.usage.output_tokens == 1 + sum(usage.output_tokens for usage in answered)
    await case.check()


@pytest.mark.usefixtures("at_once")
async def test_a_cancel_closes_the_stream_and_keeps_the_text_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Streaming()
    driving = await case.start()
    for given in (TOLD, "one "):
        case.sent.put_nowait(given)
    await case.has_said("one ")
    monkeypatch.setattr(reception, "PIECE_S", 3_600)
    case.sent.put_nowait("two and so on")
    await until(case.sent.empty)
    await case.cancel()
    assert (await held(driving)).status == "cancelled"
    assert case.closed == 1
    assert (await case.kinds())[-4:] == [
        "cancel_requested",
        "assistant_delta",
        "assistant_interrupted",
        "run_cancelled",
    ]
    state = await case.state()
    assert (await case.partial()).text == "one two and so on", "nothing that was received is lost"
    assert state.usage == Usage(input_tokens=40, output_tokens=5), "the tokens of the answer are estimated"
    (cut,) = await case.events(AssistantInterrupted)
    assert cut.estimated
    await case.check()
    await case.resume()
    driving = await case.start()
    case.sent.put_nowait(ANSWER)
    assert (await held(driving)).status == "completed"
    assert case.requests[1] == case.requests[0]
    assert (await case.state()).usage == Usage(input_tokens=80, output_tokens=10)
    await case.check()


async def test_a_cancel_before_anything_has_come_counts_the_prompt() -> None:
    case = Streaming()
    driving = await case.start()
    await case.turn_started()
    await case.cancel()
    assert (await held(driving)).status == "cancelled"
    (cut,) = await case.events(AssistantInterrupted)
    assert cut.estimated and cut.usage.input_tokens > 0 and cut.usage.output_tokens == 0


@pytest.mark.usefixtures("at_once")
async def test_an_answer_that_was_complete_when_the_cancel_came_counts_as_what_it_is() -> None:
    case = Streaming()
    driving = await case.start()
    case.sent.put_nowait("one ")
    await case.has_said("one ")
    await accepted(case.log, Cancel(RUN, CancelRequested(by="ann")))  # nobody is told
    case.sent.put_nowait(ANSWER)
    assert (await held(driving)).status == "cancelled"
    (cut,) = await case.events(AssistantInterrupted)
    assert (cut.usage, cut.estimated) == (ANSWER.usage, False)
    assert (await case.events(AssistantMessage)) == []


@pytest.mark.usefixtures("at_once")
async def test_a_model_that_fails_in_mid_stream_leaves_its_text_and_its_cost() -> None:
    case = Streaming()
    driving = await case.start()
    for given in (TOLD, "one two", ValueError("the connection broke")):
        case.sent.put_nowait(given)
    assert (await held(driving)).status == "failed"
    (failed,) = await case.events(RunFailed)
    assert "the connection broke" in failed.message
    state = await case.state()
    assert ((await case.partial()).text, state.usage) == ("one two", Usage(input_tokens=40, output_tokens=2))
    await case.check()


async def test_what_a_model_needs_back_comes_back_in_every_later_request() -> None:
    native = {"b": [1, 1.5, None, "é\u2028"], "a": {"signature": "c2ln", "empty": {}}}
    case = Streaming(LOOK)
    driving = await case.start()
    case.sent.put_nowait(asks("look").model_copy(update={"native": native}))
    case.sent.put_nowait(ANSWER)
    assert (await held(driving)).status == "completed"
    (message,) = [said for said in case.requests[1].messages if said["role"] == "assistant"]
    assert message["native"] == native and [*message["native"]] == ["b", "a"], "in the order in which it was"
    assert "native" not in messages(await case.state())[-1], "a reply without it has none"


@pytest.mark.parametrize("native", [float("nan"), {"a": "\ud800"}], ids=["NaN", "no Unicode"])
def test_what_could_not_come_back_as_it_is_is_refused(native: Any) -> None:
    with pytest.raises(ValueError, match="native"):
        ModelReply(native=native)


async def test_a_delayed_answer_comes_in_pieces() -> None:
    heard: list[str] = []
    stream = Stream(lambda: heard.append(stream.received))
    await delayed(ModelReply(text="a" * 25, delay_ms=1, usage=ANSWER.usage), stream)
    assert stream.received == "a" * 25 and len(heard) == 10
    assert stream.told == TOLD


async def test_pieces_come_less_often_where_a_process_receives_many_answers() -> None:
    waits: list[float] = []
    loop = asyncio.get_running_loop()
    calls = [Reception(0, lambda: None) for _ in range(100)]
    for call in calls:
        call.stream.text("x")
        assert call._timer
        waits.append(call._timer.when() - loop.time())
    assert waits[0] <= reception.PIECE_S
    assert 100 / reception.APPENDS_PER_S - 0.5 < waits[-1] <= 100 / reception.APPENDS_PER_S
    for call in calls:
        call.end()
    assert Reception.waiting == 0
