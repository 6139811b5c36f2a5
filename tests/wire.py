"""A loopback server that speaks as Anthropic's Messages API and OpenAI's chat completions do, to their own SDKs.

It plays one answer after the other, refuses with 400 what the real services refuse, and plays faults. Every request is
kept, to the byte, with the time at which its client went away.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from .wire_rules import refused_by

KEY = "sk-wire-0123456789abcdefghijklmnop"


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


@dataclass
class Asked:
    """A request that was served."""

    path: str
    headers: dict[str, str]
    raw: bytes
    at: float
    body: dict[str, Any]
    refused: str = ""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Its client has left before the answer was at its end."""


Play = Says | Fault | Callable[[dict[str, Any]], Says | Fault]


class Wire:
    """The server. `plays` is used up one by one, with what is refused by the rules not counted."""

    def __init__(self, *plays: Play, bytes_max: int = 1_000_000, key: str = KEY) -> None:
        self.plays = list(plays)
        self.asked: list[Asked] = []
        self.go = asyncio.Event()
        self.reached = asyncio.Event()
        """An answer came to its `wait_after`."""
        self._bytes_max, self._key = bytes_max, key
        self._signed: dict[str, str] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go.set()
        self._server.close()
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    @property
    def anthropic(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def served(self) -> list[Asked]:
        """The requests that were not refused by the rules."""
        return [asked for asked in self.asked if not asked.refused]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._connected(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (asked := await self._read(reader)) and await self._serve(asked, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Asked | None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        at = asyncio.get_running_loop().time()
        return Asked(first.split()[1], headers, raw, at, json.loads(raw))

    async def _serve(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.asked.append(asked)
        anthropic = "/messages" in asked.path
        sent_key = asked.headers.get("x-api-key") or asked.headers.get("authorization", "").removeprefix("Bearer ")
        if sent_key != self._key:
            asked.refused = "bad key"
            said = f"Incorrect API key provided: {sent_key}"
            kind = "authentication_error" if anthropic else "invalid_request_error"
            await self._plain(writer, Fault(401, {"error": {"type": kind, "code": "invalid_api_key", "message": said}}))
            return True
        if refusal := refused_by(asked.body, len(asked.raw), self._bytes_max, self._signed, anthropic):
            asked.refused = refusal
            body = {"type": "error", "error": {"type": "invalid_request_error", "message": refusal}}
            await self._plain(writer, Fault(400, body))
            return True
        assert self.plays, "the server was asked more often than it has answers"
        play = self.plays.pop(0)
        if callable(play):
            play = play(asked.body)
        if isinstance(play, Fault):
            await self._plain(writer, play)
            return True
        for block in play.blocks:
            if isinstance(block, Thinking):
                self._signed[block.signature] = block.text
        frames = anthropic_frames(play) if anthropic else openai_frames(play, asked.body)
        return await self._stream(asked, play, frames, reader, writer)

    async def _plain(self, writer: asyncio.StreamWriter, fault: Fault) -> None:
        body = fault.body.encode() if isinstance(fault.body, str) else json.dumps(fault.body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **fault.headers}
        writer.write(_head(fault.status, headers) + body)
        await writer.drain()

    async def _stream(
        self,
        asked: Asked,
        play: Says,
        frames: Iterator[str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        writer.write(_head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"}))
        for number, frame in enumerate(frames):
            if number == play.cut_after:
                writer.transport.abort()
                return False
            if number == play.ends_after:
                break
            if number == play.wait_after and not await self._waited(asked, reader):
                return False
            data = frame.encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _waited(self, asked: Asked, reader: asyncio.StreamReader) -> bool:
        """Whether the answer is to go on, or else its client has gone."""
        self.reached.set()
        going, leaving = asyncio.create_task(self.go.wait()), asyncio.create_task(reader.read(1))
        await asyncio.wait({going, leaving}, return_when=asyncio.FIRST_COMPLETED)
        gone = leaving.done()
        going.cancel()
        leaving.cancel()
        if gone:
            asked.gone.set()
        return not gone


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def pieces(text: str) -> list[str]:
    size = max(7, len(text) // 50)
    return [text[at : at + size] for at in range(0, len(text), size)]


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
