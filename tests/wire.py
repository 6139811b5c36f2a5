"""A loopback server that speaks as Anthropic's Messages API and OpenAI's two APIs do, to their own SDKs.

It plays one answer after the other, refuses with 400 what the real services refuse, and plays faults. Every request is
kept, to the byte, with the time at which its client went away.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from .wire_play import (
    Block,
    Call,
    Fault,
    Says,
    Text,
    Thinking,
    anthropic_frames,
    chunk,
    ended,
    fragment,
    openai_frames,
    usage_chunk,
)
from .wire_responses import responses_frames
from .wire_rules import refused_by

__all__ = ["Block", "Call", "Fault", "Says", "Text", "Thinking", "Wire", "chunk", "fragment", "usage_chunk"]

KEY = "sk-wire-0123456789abcdefghijklmnop"


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
        if refusal := refused_by(asked.path, asked.body, len(asked.raw), self._bytes_max, self._signed):
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
        if "/responses" in asked.path:
            frames = responses_frames(play)
        else:
            frames = anthropic_frames(play) if anthropic else openai_frames(play, asked.body)
        return await self._stream(asked, play, ended(play, frames), reader, writer)

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
