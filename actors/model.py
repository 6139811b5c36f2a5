"""Models: what a run asks, what it gets back, and the scripted model that needs no network.

A model is a callable of one ModelRequest, sync or async. What it returns is a ModelReply, a mapping with the
keys of a script line, or a plain text. It must be a function of the request: a crash in mid-call asks it again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from ..store.errors import PerdureError, UsageError
from ..store.events import Usage


class ModelError(PerdureError):
    """The model gave no usable answer."""


class ToolUse(BaseModel):
    """A call that the model asks for. `id` is the provider's and need not be unique."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    arguments: JsonValue = Field(default_factory=dict)
    id: str = ""


class ModelReply(BaseModel):
    """One assistant turn; also the form of a script line. All keys are optional."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    text: str = ""
    tool_calls: tuple[ToolUse, ...] = ()
    stop_reason: str = ""
    usage: Usage = Usage()
    delay_ms: float = Field(default=0, ge=0)


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
    turns_left: str = ""
    """What to tell the model of the turns that remain."""
    notice: str | None = None
    """What the model is told for this turn alone; it is in the last of the messages too."""
    max_output_tokens: int | None = None
    """The longest answer that the run's budget has room for; None: any."""


Model = Callable[[ModelRequest], Awaitable[ModelReply]]


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

    async def play(request: ModelRequest) -> ModelReply:
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

    async def ask(request: ModelRequest) -> ModelReply:
        try:
            if inspect.iscoroutinefunction(target):
                answer = await function(request)
            else:
                answer = await asyncio.to_thread(function, request)
                if inspect.isawaitable(answer):
                    answer = await answer
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            raise ModelError(f"the model raised {type(error).__name__}: {error}") from error
        return reply_of(answer)

    return ask


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


def make_model(model: str | Callable[..., Any], folder: Path) -> Model:
    """The model that a string or callable stands for. Raises UsageError for an unknown one."""
    if not isinstance(model, str):
        return called(model)
    kind, _, rest = model.partition(":")
    if kind == "script" and rest:
        return scripted(folder / rest)
    raise UsageError(f"unknown model {model!r}: use script:FILE or a Python callable")


def _first_error(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else first["msg"]
    return str(error)
