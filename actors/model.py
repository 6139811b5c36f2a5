"""Models: what a run asks, what it gets back, and the scripted model that needs no network.

A model of a user is a callable of one ModelRequest, sync or async. What it returns is a ModelReply, a mapping with the
keys of a script line, or a plain text. Or it is an async generator: it yields pieces of its text as they come, and
maybe Usage as far as it is known by then, and last such an answer. The answer's text may be left empty, and the answer
may be left out: the text then is what was yielded. A model must be a function of the request: a crash in mid-call asks
it again. When its run is cancelled a coroutine or generator is cancelled, at the await where it is; a plain function
goes on in its thread to its end, and nobody waits for it.

Inside, a Model is an async callable of the request and a Stream, into which it puts what it receives.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import AsyncGeneratorType, MappingProxyType
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from ..store.errors import PerdureError, UsageError
from ..store.events import Usage

NOT_TAKEN: Final = frozenset({"bad_key", "no_credit", "context_too_long", "unknown_model", "rejected"})
"""Codes of model errors where the provider did not take the request: it has cost nothing."""


class ModelError(PerdureError):
    """The model gave no usable answer. The run fails with `code`."""

    def __init__(self, message: str, code: str = "model_error") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.code)


class Interrupted(ModelError):
    """The answer broke off, and asking again may bring it."""


class ToolUse(BaseModel):
    """A call that the model asks for. `id` is the provider's and need not be unique.

    `raw`, where it is given, are the arguments as the model wrote them, JSON or not, and count in the place of
    `arguments`. `cut` says that the output limit may have cut the call off: it is not executed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    arguments: JsonValue = Field(default_factory=dict)
    id: str = ""
    raw: str | None = None
    cut: bool = False


class ModelReply(BaseModel):
    """One assistant turn; also the form of a script line. All keys are optional.

    `native` is what the model needs back unchanged, its own form of the answer for one, as JSON: the assistant's
    message has it in later requests, with the `tool_calls` of this reply in the same order, under ids of the run.
    Another model may meet it. The answer takes `delay_ms`, and its text comes in pieces meanwhile: for scripts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    text: str = ""
    tool_calls: tuple[ToolUse, ...] = ()
    stop_reason: str = ""
    usage: Usage = Usage()
    delay_ms: float = Field(default=0, ge=0)
    native: JsonValue | None = None

    @field_validator("native")
    @classmethod
    def _comes_back_as_it_is(cls, native: JsonValue) -> JsonValue:
        if native is not None:
            json.dumps(native, allow_nan=False, ensure_ascii=False).encode()
        return native


class ModelRequest(BaseModel):
    """What a model is asked. `messages` pairs every tool call with its result in the next message."""

    model_config = ConfigDict(frozen=True)
    run_id: str
    turn_index: int
    input: JsonValue
    metadata: dict[str, JsonValue]
    instructions: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    """None in the last turn, which has a notice instead."""
    withheld: list[dict[str, Any]] = Field(default_factory=list)
    """The tools that the agent has and this turn has not: earlier calls in `messages` are of them."""
    turns_left: str = ""
    """What to tell the model of the turns that remain."""
    few_turns_left: bool = False
    """Few enough that models of providers are told."""
    notice: str | None = None
    """What the model is told for this turn alone; it is in the last of the messages too."""
    max_output_tokens: int | None = None
    """The longest answer that the run's budget has room for; None: any."""


class Stream:
    """Where a model puts what it receives, as it comes; its reply has all of it once more.

    For use in the event loop. `heard` is called after each piece.
    """

    def __init__(self, heard: Callable[[], None] = lambda: None) -> None:
        self._heard, self._pieces = heard, list[str]()
        self.told: Usage | None = None
        """What the call has taken as far as the model has told."""

    def text(self, delta: str) -> None:
        """The answer's text goes on with this."""
        self._pieces.append(delta)
        self._heard()

    def usage(self, usage: Usage) -> None:
        """The call has taken so much by now, in all: the tokens of the prompt at its start, say."""
        self.told = usage
        self._heard()

    @property
    def received(self) -> str:
        """The text so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]


Model = Callable[[ModelRequest, Stream], Awaitable[ModelReply]]

PIECES: Final = 10
"""In how many pieces a delayed answer comes."""


async def delayed(reply: ModelReply, stream: Stream) -> None:
    """Let a reply take its delay, its text coming in pieces meanwhile."""
    if not reply.delay_ms:
        return
    stream.usage(reply.usage.model_copy(update={"output_tokens": 0}))
    size = -(-len(reply.text) // PIECES) or 1
    for number in range(PIECES):
        await asyncio.sleep(reply.delay_ms / 1000 / PIECES)
        if piece := reply.text[number * size : (number + 1) * size]:
            stream.text(piece)


def scripted(path: Path) -> Model:
    """A model that plays one line of a JSON lines file per turn. Raises UsageError naming the bad line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"script {path} cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"script {path} is empty: it needs one assistant turn a line")
    turns = [_script_line(path, number, line) for number, line in lines]

    async def play(request: ModelRequest, stream: Stream) -> ModelReply:
        if request.turn_index >= len(turns):
            raise ModelError(f"script {path} has {len(turns)} turns, turn {request.turn_index + 1} was asked for")
        return turns[request.turn_index]

    return play


def _script_line(path: Path, number: int, line: str) -> ModelReply:
    try:
        return ModelReply.model_validate(json.loads(line))
    except ValueError as error:
        raise UsageError(f"script {path}, line {number}: {_first_error(error)}") from error


def called(function: Callable[[ModelRequest], Any]) -> Model:
    """A user's callable as a model. A plain function runs in a thread, so that it cannot hold up other runs."""
    target = function if inspect.isroutine(function) else type(function).__call__

    async def ask(request: ModelRequest, stream: Stream) -> ModelReply:
        try:
            if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
                answer = function(request)
            else:
                answer = await asyncio.to_thread(function, request)
            if inspect.isasyncgen(answer):
                answer = await _listen(answer, stream)
            elif inspect.isawaitable(answer):
                answer = await answer
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            raise ModelError(f"the model raised {type(error).__name__}: {error}") from error
        return reply_of(answer)

    return ask


async def _listen(answering: AsyncGeneratorType[Any, Any], stream: Stream) -> Any:
    """What a generator has answered once it is at its end."""
    answer: Any = None
    async with aclosing(answering):
        async for given in answering:
            if answer is not None:
                raise ModelError("the model goes on after its answer")
            if isinstance(given, str):
                stream.text(given)
            elif isinstance(given, Usage):
                stream.usage(given)
            else:
                answer = given
    reply = ModelReply(usage=stream.told or Usage()) if answer is None else reply_of(answer)
    return reply if reply.text else reply.model_copy(update={"text": stream.received})


def reply_of(answer: Any) -> ModelReply:
    """A callable's answer as a ModelReply. Raises ModelError."""
    if isinstance(answer, ModelReply):
        return answer
    if isinstance(answer, str):
        return ModelReply(text=answer)
    try:
        return ModelReply.model_validate(answer)
    except ValidationError as error:
        raise ModelError(f"the model's answer is not an assistant turn: {_first_error(error)}") from error


def make_model(
    model: str | Callable[..., Any],
    folder: Path,
    settings: Mapping[str, Any] = MappingProxyType({}),
    base_url: str | None = None,
) -> Model:
    """The model that a string or callable stands for; `settings` and `base_url` are for a provider's. Raises UsageError
    for an unknown one, as far as its name tells."""
    if not isinstance(model, str):
        return called(model)
    kind, _, rest = model.partition(":")
    if not (kind and rest):
        raise UsageError(f"unknown model {model!r}: use provider:model, script:FILE or a Python callable")
    if kind == "script":
        return scripted(folder / rest)
    from .providers import provided  # here, since it is built on this

    return provided(model, settings, base_url)


def check_model(
    model: str | Callable[..., Any], folder: Path, base_url: str | None = None, from_here: bool = False
) -> None:
    """Raises UsageError for a model that there cannot be, as far as can be told without asking it; `from_here`: with
    the keys of this process."""
    make_model(model, folder)
    if isinstance(model, str) and not model.startswith("script:"):
        from .providers import check  # here, since it is built on this

        check(model, base_url, from_here)


def _first_error(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else first["msg"]
    return str(error)
