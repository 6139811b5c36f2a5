"""Refusals and empty answers: what becomes of the run, what the model is told, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.actors.guards import Limits
from perdure.actors.model import ModelReply, ToolUse
from perdure.store.events import AssistantMessage, NoticeInjected, RunCompleted, RunFailed, Usage

from .fakes import created, new_run
from .gate_kit import LOOK, Office
from .shapes import asks, says

EMPTY = ModelReply(usage=Usage(output_tokens=2))
HALF = ModelReply(text="I would ", stop_reason="refusal", usage=Usage(output_tokens=3))
FILTERED = ModelReply(text="", stop_reason="content_filter")


class Run(Office):
    """One run, whose limits are as they are given."""

    def __init__(self, *turns: ModelReply, **limits: Any) -> None:
        super().__init__(turns, LOOK)
        self.limits = limits

    async def end(self) -> Any:
        config = {"limits": Limits(**self.limits).model_dump(mode="json")}
        await new_run(self.log, created(config=config))
        await self.drive()
        await self.check()
        (end,) = (await self.events(RunFailed) + await self.events(RunCompleted))[-1:]
        return end


@pytest.mark.parametrize(("reply", "code"), [(HALF, "refusal"), (FILTERED, "content_filter")])
async def test_a_refusal_ends_the_run_under_its_own_name_and_keeps_what_was_said(reply: ModelReply, code: str) -> None:
    case = Run(asks("look"), reply)
    end = await case.end()
    assert (end.code, len(case.tape.asked)) == (code, 2), "a refusal is not asked again"
    assert reply.text in end.message
    message = (await case.events(AssistantMessage))[-1]
    assert (message.text, message.stop_reason, message.usage) == (reply.text, code, reply.usage)


async def test_a_resumed_run_asks_anew_without_the_refused_words() -> None:
    case = Run(asks("look"), HALF, HALF, says("Done."))
    assert (await case.end()).code == "refusal"
    for _ in range(2):
        await case.resume()
        await case.drive()
    assert (await case.events(RunCompleted))[0].output == "Done."
    assert case.tape.asked[1][1] == case.tape.asked[2][1] == case.tape.asked[3][1]


async def test_calls_of_a_refused_answer_do_not_keep_the_run_going() -> None:
    case = Run(ModelReply(tool_calls=(ToolUse(name="look", arguments={"x": 1}),), stop_reason="refusal"))
    assert (await case.end()).code == "refusal"


async def test_an_empty_answer_is_asked_for_again_a_bounded_number_of_times() -> None:
    case = Run(EMPTY, EMPTY, EMPTY)
    end = await case.end()
    assert (end.code, len(case.tape.asked)) == ("empty_answer", 3)
    notices = [notice.text for notice in await case.events(NoticeInjected)]
    assert [text[:30] for text in notices] == ["Your answer was empty (1 of 3)", "Your answer was empty (2 of 3)"]
    assert [message["content"] for message in case.tape.asked[2][1]] == ["hello", *notices]
    assert (await case.row()).usage.output_tokens == 6, "empty answers are paid for"


async def test_an_answer_with_something_to_it_starts_the_count_anew() -> None:
    case = Run(EMPTY, EMPTY, asks("look"), EMPTY, EMPTY, says("Done."))
    assert (await case.end()).output == "Done."


async def test_whitespace_is_no_answer_and_no_message() -> None:
    case = Run(says(" \n"), says("Done."))
    assert (await case.end()).output == "Done."
    assert all(message["role"] == "user" for message in case.tape.asked[1][1])


async def test_where_it_is_allowed_an_empty_answer_ends_the_run_well() -> None:
    case = Run(EMPTY, max_empty=None)
    end = await case.end()
    assert isinstance(end, RunCompleted) and end.output == "" and len(case.tape.asked) == 1
