"""Models: scripts with all their mistakes, and callables with all their answers."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.model import ModelError, ModelReply, ModelRequest, Stream, ToolUse, make_model, reply_of
from perdure.store.errors import UsageError
from perdure.store.events import Usage


def request(turn_index: int = 0) -> ModelRequest:
    return ModelRequest(
        run_id="r", turn_index=turn_index, input="x", metadata={}, instructions="", messages=[], tools=[]
    )


def script(folder: Path, text: str | bytes) -> Any:
    data = text.encode() if isinstance(text, str) else text
    (folder / "turns.jsonl").write_bytes(data)
    return make_model("script:turns.jsonl", folder)


async def test_a_script_plays_one_line_a_turn(tmp_path: Path) -> None:
    lines = (
        '{"tool_calls": [{"name": "look", "arguments": {"x": 1}, "id": "call_0"}], "usage": {"input_tokens": 7}}\n'
        "\n"
        '{"text": "done", "stop_reason": "end"}\n'
    )
    play = script(tmp_path, lines)
    first = await play(request(0), Stream())
    assert first.tool_calls == (ToolUse(name="look", arguments={"x": 1}, id="call_0"),)
    assert first.usage == Usage(input_tokens=7)
    assert await play(request(1), Stream()) == ModelReply(text="done", stop_reason="end")
    assert await play(request(0), Stream()) == first, "a turn that is asked for again is the same"


async def test_a_script_that_is_used_up_says_how_long_it_is(tmp_path: Path) -> None:
    play = script(tmp_path, '{"text": "one"}')
    with pytest.raises(ModelError, match="has 1 turns, turn 2 was asked for"):
        await play(request(1), Stream())


async def test_a_script_may_begin_with_a_byte_order_mark_and_end_its_lines_as_windows_does(tmp_path: Path) -> None:
    play = script(tmp_path, b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    assert (await play(request(0), Stream())).text == "one"
    assert (await play(request(1), Stream())).text == "two"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"text": "one"}\n{"text": ', "line 2: "),
        ('{"text": "one"}\n\n{"txt": "two"}', "line 3: txt"),
        ('{"tool_calls": [{"nam": "look"}]}', r"line 1: tool_calls\.0\.name"),
        ('{"usage": {"input_tokens": "7"}}', r"line 1: usage\.input_tokens"),
        ('{"delay_ms": -1}', "line 1: delay_ms"),
        ('["text"]', "line 1: "),
        ("", "is empty"),
        ("\n \n", "is empty"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_bad_script_is_refused_with_the_line_that_is_bad(tmp_path: Path, text: str | bytes, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        script(tmp_path, text)
    assert "turns.jsonl" in str(error.value)


def test_a_missing_script_and_an_unknown_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        make_model("script:nothing.jsonl", tmp_path)
    for name in ("script:", "gpt", ""):
        with pytest.raises(UsageError, match="unknown model"):
            make_model(name, tmp_path)


def plain(request: ModelRequest) -> str:
    return f"turn {request.turn_index} in {threading.current_thread() is threading.main_thread()}"


async def asynchronous(request: ModelRequest) -> str:
    return f"turn {request.turn_index} in {threading.current_thread() is threading.main_thread()}"


class Callable:
    async def __call__(self, request: ModelRequest) -> str:
        return await asynchronous(request)


@pytest.mark.parametrize(
    ("model", "in_main"),
    [
        (plain, False),
        (asynchronous, True),
        (Callable(), True),
        (functools.partial(asynchronous), True),
        (lambda request: asynchronous(request), True),
    ],
    ids=["plain", "async", "object", "partial", "lambda"],
)
async def test_a_callable_of_any_kind_is_a_model_and_a_plain_one_holds_up_nobody(model: Any, in_main: bool) -> None:
    reply = await make_model(model, Path("."))(request(3), Stream())
    assert reply == ModelReply(text=f"turn 3 in {in_main}")


async def answers(request: ModelRequest) -> AsyncGenerator[Any, None]:
    yield "one "
    yield Usage(input_tokens=7)
    yield "two"


async def answers_last(request: ModelRequest) -> AsyncGenerator[Any, None]:
    async for given in answers(request):
        yield given
    yield {"tool_calls": [{"name": "look"}], "usage": {"input_tokens": 7, "output_tokens": 3}}


async def goes_on(request: ModelRequest) -> AsyncGenerator[Any, None]:
    yield ModelReply(text="done")
    yield "or not"


@pytest.mark.parametrize("model", [answers, functools.partial(answers), lambda request: answers(request)])
async def test_a_generator_answers_with_what_it_yields(model: Any) -> None:
    stream = Stream()
    reply = await make_model(model, Path("."))(request(), stream)
    assert reply == ModelReply(text="one two", usage=Usage(input_tokens=7))
    assert (stream.received, stream.told) == ("one two", Usage(input_tokens=7))


async def test_a_generator_ends_with_its_whole_answer_and_nothing_comes_after_that() -> None:
    reply = await make_model(answers_last, Path("."))(request(), Stream())
    assert (reply.text, [use.name for use in reply.tool_calls], reply.usage.output_tokens) == ("one two", ["look"], 3)
    with pytest.raises(ModelError, match="goes on after its answer"):
        await make_model(goes_on, Path("."))(request(), Stream())


def test_an_answer_is_a_reply_a_mapping_or_a_text() -> None:
    assert reply_of("x") == reply_of({"text": "x"}) == reply_of(ModelReply(text="x"))
    for bad in (None, 7, {"txt": "x"}, ["x"]):
        with pytest.raises(ModelError, match="not an assistant turn"):
            reply_of(bad)
