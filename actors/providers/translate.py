"""Between the runtime's conversations and pydantic-ai's messages. Pure, and byte for byte the same for the same log.

An answer is kept twice: as text and calls, which the run works with, and as `native`, pydantic-ai's own form of it as
JSON, with what the provider wants to see again unchanged, such as the signatures of its thinking.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, cast

from pydantic import JsonValue
from pydantic_ai.messages import (
    FilePart,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    ModelResponsePart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.messages import ModelRequest as WireRequest
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from ...store.events import Usage, canonical
from ..digits import carried
from ..exact import parse
from ..model import ModelReply, ModelRequest, ToolUse
from ..results import valid_text
from .content import Album

NAME: Final = re.compile(r"[^a-zA-Z0-9_-]")
NAME_LENGTH: Final = 64
DROPPED: Final = frozenset({"usage", "timestamp", "provider_url", "provider_response_id", "metadata"})
"""What of an answer goes nowhere: it is recorded elsewhere, or says nothing to a provider."""


# -- what is asked ----------------------------------------------------------------------------------------


def parameters(request: ModelRequest) -> ModelRequestParameters:
    """The tools of a request. Those that are withheld are described all the same: earlier calls are of them."""
    tools = request.tools or request.withheld
    return ModelRequestParameters(
        function_tools=[
            ToolDefinition(name=tool["name"], description=tool["description"], parameters_json_schema=tool["schema"])
            for tool in tools
        ]
    )


def settings(request: ModelRequest, chosen: Mapping[str, Any]) -> ModelSettings:
    """How to answer: as the agent's settings say, within the budget that is left. Nothing below tries again."""
    said: dict[str, Any] = {**chosen, "max_retries": 0}
    if request.max_output_tokens is not None:
        said["max_tokens"] = min(said.get("max_tokens", request.max_output_tokens), request.max_output_tokens)
    if request.withheld and not request.tools:
        said["tool_choice"] = "none"
    return cast(ModelSettings, said)


def conversation(request: ModelRequest, carry: bool = False) -> list[ModelMessage]:
    """The messages of a request. What the user and the tools say between two answers is one message. `carry`: the
    client takes arguments as objects, and sends what it takes through `digits.deliver`."""
    said: list[ModelMessage] = []
    ids, album = _Ids(_Carried if carry else _Written), Album(request.messages)
    for message in request.messages:
        if message["role"] == "assistant":
            said.append(_answer(message, ids))
            continue
        if message["role"] == "tool":
            parts: list[Any] = [_result(result, ids, album) for result in message["results"]]
        else:
            parts = [UserPromptPart(album.user_content(message["content"]))]
        last = said[-1] if said else None
        if isinstance(last, WireRequest):
            said[-1] = WireRequest(parts=[*last.parts, *parts])
        else:
            said.append(WireRequest(parts=parts))
    last = said[-1]
    if request.few_turns_left and request.notice is None and isinstance(last, WireRequest):
        last = said[-1] = WireRequest(parts=[*last.parts, UserPromptPart(request.turns_left)])
    if request.instructions.strip() and isinstance(last, WireRequest):
        said[-1] = WireRequest(parts=last.parts, instructions=valid_text(request.instructions))
    return said


class _Ids:
    """What calls are called to the provider: as it called them, where that is unique in the run so far, else as the run
    calls them. A later turn changes nothing of an earlier one."""

    def __init__(self, written: type[_Written]) -> None:
        self.written = written
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def give(self, call_id: str, theirs: str) -> str:
        name = theirs if theirs and theirs not in self._taken else call_id
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        self._names[call_id] = name
        return name

    def of(self, call_id: str) -> str:
        return self._names[call_id]


def _answer(message: Mapping[str, Any], ids: _Ids) -> ModelResponse:
    calls: Sequence[Mapping[str, Any]] = message["tool_calls"]
    response = _kept(message.get("native"))
    theirs = [part for part in response.parts if isinstance(part, ToolCallPart)] if response else []
    if response is None or len(theirs) != len(calls):
        text = [TextPart(message["text"])] if message["text"].strip() else []
        return ModelResponse(parts=[*text, *(_call(call, ids) for call in calls)])
    parts: list[ModelResponsePart] = []
    following = iter(calls)
    for part in response.parts:
        if isinstance(part, TextPart) and not part.content.strip():
            continue  # providers say it, and refuse to hear it
        parts.append(_as_sent(part, next(following), ids) if isinstance(part, ToolCallPart) else part)
    response.parts = parts
    return response


def _call(call: Mapping[str, Any], ids: _Ids) -> ToolCallPart:
    return _as_sent(ToolCallPart(call["name"], call["arguments"], ""), call, ids)


class _Written(ToolCallPart[Any]):
    """A call whose arguments go back as they were written. pydantic-ai would round their decimals."""

    def args_as_json_str(self) -> str:
        return self.args if isinstance(self.args, str) else super().args_as_json_str()


class _Carried(_Written):
    """The same, for a client that wants them as an object."""

    def args_as_dict(self, *, raise_if_invalid: bool = False) -> dict[str, Any]:
        if isinstance(self.args, str):
            with contextlib.suppress(RecursionError):
                return cast(dict[str, Any], carried(parse(self.args)))
        return super().args_as_dict(raise_if_invalid=raise_if_invalid)


def _as_sent(part: ToolCallPart, call: Mapping[str, Any], ids: _Ids) -> ToolCallPart:
    """A call as the provider made it, where every provider takes it back like that; else as the run took it."""
    part.tool_name = tool_name(part.tool_name)
    part.tool_call_id = ids.give(call["id"], part.tool_call_id)
    if not _is_object(part.args):
        part.args = call["arguments"]
    if not _is_object(part.args):
        return part  # then pydantic-ai wraps them in an object
    return ids.written(**{field.name: getattr(part, field.name) for field in fields(part)})


def _is_object(args: object) -> bool:
    if not isinstance(args, str):
        return isinstance(args, dict)
    try:
        return isinstance(parse(args), dict)
    except ValueError:
        return False


def tool_name(name: str) -> str:
    """A tool's name that every provider takes: a model may have made it up."""
    return NAME.sub("_", name)[:NAME_LENGTH] or "unnamed"


def _result(result: Mapping[str, Any], ids: _Ids, album: Album) -> ToolReturnPart:
    content: Any = album.result_content(result["content"])
    if "note" in result:
        note = f"({result['note']})"
        content = f"{content}\n{note}" if isinstance(content, str) else [*content, note]
    outcome: Any = "failed" if result["is_error"] else "success"
    return ToolReturnPart(tool_name(result["name"]), content, ids.of(result["tool_call_id"]), outcome=outcome)


def _kept(native: JsonValue) -> ModelResponse | None:
    """An answer in its provider's own form; None where this version of pydantic-ai does not know that form."""
    if not isinstance(native, dict) or native.get("kind") != "response":
        return None
    try:
        message = ModelMessagesTypeAdapter.validate_python([native])[0]
    except ValueError:
        return None
    return message if isinstance(message, ModelResponse) else None


# -- what is answered -------------------------------------------------------------------------------------


def reply(response: ModelResponse, limit: int | None) -> ModelReply:
    """An answer as the run takes it. `limit` is how long it was allowed to be, in tokens, None where nobody said."""
    usage = tokens(response.usage)
    stop = stop_reason(response)
    cut = stop == "max_tokens" or (limit is not None and usage.output_tokens >= limit)
    calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
    uses = [
        ToolUse(
            name=valid_text(part.tool_name),
            raw=part.args if isinstance(part.args, str) else canonical(part.args or {}),
            id=valid_text(part.tool_call_id),
            cut=cut and part is calls[-1],
        )
        for part in calls
    ]
    texts = [part.content for part in response.parts if isinstance(part, TextPart)]
    if stop == "refusal":  # what OpenAI's models say of it is no part of their text
        texts.append(str((response.provider_details or {}).get("refusal") or ""))
    files = [_file(part) for part in response.parts if isinstance(part, FilePart)]
    return ModelReply(
        text=valid_text("".join([*texts, *files])),
        tool_calls=tuple(uses) if stop not in ("refusal", "content_filter") else (),
        stop_reason=stop,
        usage=usage,
        native=native(response),
    )


def _file(part: FilePart) -> str:
    return f"[{part.content.media_type}, {len(part.content.data)} bytes]"


def stop_reason(response: ModelResponse) -> str:
    """Why an answer ends, in the runtime's words where it has one."""
    details = response.provider_details or {}
    match response.finish_reason:
        case "stop":
            return "end_turn"
        case "tool_call":
            return "tool_use"
        case "length":
            return "max_tokens"
        case "content_filter":
            refused = "refusal" in details or details.get("finish_reason") == "refusal"
            return "refusal" if refused else "content_filter"
    return str(details.get("finish_reason") or response.finish_reason or "end_turn")


def is_whole(response: ModelResponse, tells: bool) -> bool:
    """Whether the answer is at its end. `tells` says that its provider always tells why it ends: pydantic-ai takes a
    stream of chat completions that just ends for one that has stopped."""
    told = response.finish_reason not in (None, "stop") or "finish_reason" in (response.provider_details or {})
    return (told or not tells) and response.state == "complete"


def tokens(usage: RequestUsage) -> Usage:
    """The four kinds of tokens. pydantic-ai counts cached ones as input too."""
    cached = usage.cache_write_tokens + usage.cache_read_tokens
    return Usage(
        input_tokens=max(0, usage.input_tokens - cached),
        output_tokens=usage.output_tokens,
        cache_creation_input_tokens=usage.cache_write_tokens,
        cache_read_input_tokens=usage.cache_read_tokens,
    )


def native(response: ModelResponse) -> JsonValue:
    """An answer in its provider's own form, as JSON."""
    dumped: dict[str, Any] = ModelMessagesTypeAdapter.dump_python([response], mode="json")[0]
    kept = {key: value for key, value in dumped.items() if key not in DROPPED and value is not None}
    kept["parts"] = [{key: value for key, value in part.items() if value is not None} for part in kept["parts"]]
    try:
        json.dumps(kept, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        kept = _clean(kept)
    return kept


def _clean(value: Any) -> Any:
    """With what has no place in JSON text written as something that has."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, dict):
        return {valid_text(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return value
