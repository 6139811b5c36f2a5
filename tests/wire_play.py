"""What the loopback server says, as the frames of Anthropic's Messages API and of OpenAI's chat completions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Thinking:
    text: str
    signature: str


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` goes over the wire as it stands."""

    name: str
    arguments: str = "{}"
    id: str = "call_1"


Block = Text | Thinking | Call


@dataclass(frozen=True)
class Says:
    """An answer. `tokens` are uncached input, cache writes, cache reads and output. `stop` is in Anthropic's words."""

    blocks: Sequence[Block] = ()
    stop: str = ""
    tokens: tuple[int, int, int, int] = (10, 0, 0, 5)
    cut_after: int | None = None
    """After how many frames the connection is cut."""
    ends_after: int | None = None
    """After how many frames the stream ends as if it were over."""
    error: dict[str, Any] | None = None
    """What comes last in a stream that ends so."""
    wait_after: int | None = None
    """After how many frames the server waits for `Wire.go`, or for its client to leave."""
    refusal: str = ""
    frames: Sequence[dict[str, Any]] | None = None
    """These, in the place of what follows from the rest."""

    @property
    def reason(self) -> str:
        return self.stop or ("tool_use" if any(isinstance(block, Call) for block in self.blocks) else "end_turn")


@dataclass(frozen=True)
class Fault:
    """Another answer than a stream. With `status` 200 it is an error body where a stream was asked for."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)


def pieces(text: str) -> list[str]:
    size = max(7, len(text) // 50)
    return [text[at : at + size] for at in range(0, len(text), size)]


def ended(says: Says, frames: Iterator[str]) -> Iterator[str]:
    """The frames, as far as they come."""
    yield from itertools.islice(frames, says.ends_after)
    if says.error is not None:
        yield f"event: error\ndata: {json.dumps(says.error)}\n\n"


# -- Anthropic --------------------------------------------------------------------------------------------


def anthropic_frames(says: Says) -> Iterator[str]:
    for event in says.frames if says.frames is not None else _anthropic_events(says):
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _anthropic_events(says: Says) -> Iterator[dict[str, Any]]:
    fresh, written, read, output = says.tokens
    usage = {
        "input_tokens": fresh,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": 1,
    }
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-sonnet-5-5", "content": []}
    yield {"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None, "usage": usage}}
    yield {"type": "ping"}
    for index, block in enumerate(says.blocks):
        start, deltas = _anthropic_block(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": says.reason, "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": output}}
    yield {"type": "message_stop"}


def _anthropic_block(block: Block) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if isinstance(block, Text):
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block.text)]
    if isinstance(block, Thinking):
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block.text)]
        signed = {"type": "signature_delta", "signature": block.signature}
        return {"type": "thinking", "thinking": "", "signature": ""}, [*deltas, signed]
    start = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    return start, [{"type": "input_json_delta", "partial_json": piece} for piece in ["", *pieces(block.arguments)]]


# -- OpenAI -----------------------------------------------------------------------------------------------

FINISH = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length", "refusal": "stop"}


def openai_frames(says: Says, body: dict[str, Any]) -> Iterator[str]:
    for chunk in says.frames if says.frames is not None else _openai_chunks(says, body):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """A chunk of a chat completion."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o", "choices": [choice]}


def usage_chunk(tokens: tuple[int, int, int, int]) -> dict[str, Any]:
    fresh, written, read, output = tokens
    usage = {
        "prompt_tokens": fresh + written + read,
        "completion_tokens": output,
        "total_tokens": fresh + written + read + output,
        "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
    }
    return chunk({}) | {"choices": [], "usage": usage}


def fragment(index: int, arguments: str, name: str | None = None, id: str | None = None) -> dict[str, Any]:
    """A piece of a tool call."""
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    call: dict[str, Any] = {"index": index, "function": function}
    return {"tool_calls": [call | ({} if id is None else {"id": id, "type": "function"})]}


def _openai_chunks(says: Says, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield chunk({"role": "assistant", "content": None})
    number = 0
    for block in says.blocks:
        if isinstance(block, Text):
            yield from (chunk({"content": piece}) for piece in pieces(block.text))
        elif isinstance(block, Thinking):
            yield from (chunk({"reasoning_content": piece}) for piece in pieces(block.text))
        else:
            yield chunk(fragment(number, "", block.name, block.id))
            yield from (chunk(fragment(number, piece)) for piece in pieces(block.arguments))
            number += 1
    if says.refusal:
        yield from (chunk({"refusal": piece}) for piece in pieces(says.refusal))
    yield chunk({}, FINISH.get(says.reason, says.reason))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield usage_chunk(says.tokens)
