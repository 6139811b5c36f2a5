"""Connections to MCP servers: a program over its standard streams, or a URL.

What a program has started is below the attempt's own process, bears its mark, and is over with it, whatever the server
does. The transport over standard streams is our own: the SDK's takes longer to end a server than an attempt has, and
logs each line that is no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import subprocess
import tempfile
from asyncio.streams import FlowControlMixin
from collections.abc import AsyncIterator
from typing import IO, Any, Final

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage, jsonrpc_message_adapter
from pydantic import ValidationError

from ..store.errors import PerdureError
from .children import MARK, Named, alive, below, die_with, end_all
from .digits import deliver, delivered
from .kernel import process_started
from .servers import MCPServer
from .values import NoJsonForm, json_form

log = logging.getLogger(__name__)
_Message = SessionMessage | Exception
LINE_MAX: Final = 64 << 20
"""Bytes of one message."""
WORDS_MAX: Final = 1_000
"""Characters of a server's last words in an error."""
DYING_S: Final = 0.2
"""How long a program that has closed its standard output may take to end, for its code to be told."""
GOODBYE_S: Final = 1.0
"""How long a server may take to hear that a session over HTTP is over."""


class NotReady(PerdureError):
    """A server was not ready in time, or not at all; nothing was asked of it."""


class Link:
    """A connection: its two streams, and what is known of the other side."""

    def __init__(self) -> None:
        self.to_session, self.read = anyio.create_memory_object_stream[_Message](0)
        self.write, self.from_session = anyio.create_memory_object_stream[SessionMessage](0)
        self.is_http = False
        self.closed = False
        """The server has closed its standard output, or answered with something that is no message."""
        self.last_words = ""
        """How a program has ended, and the end of what it wrote to standard error."""


@contextlib.asynccontextmanager
async def connected(server: MCPServer, link: Link, alone: bool) -> AsyncIterator[None]:
    connection = _over_http(server, link) if server.url else _over_pipes(server, link, alone)
    async with connection:
        yield


@contextlib.asynccontextmanager
async def _over_pipes(server: MCPServer, link: Link, alone: bool) -> AsyncIterator[None]:
    """A program of our own. At the end its standard input is closed, which tells it to go."""
    with tempfile.TemporaryFile() as errors:
        env = {**get_default_environment(), **server.env}
        if mark := os.environ.get(MARK):
            env[MARK] = mark
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - which returns at once
                server.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=server.cwd,
                env=env,
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
        except (OSError, ValueError) as error:
            raise NotReady(f"{server.command[0]} cannot be started: {error}") from error
        try:
            async with anyio.create_task_group() as group:
                reader, writer = await _pipes(process)
                group.start_soon(_read, server.name, reader, link)
                group.start_soon(_write, writer, link.from_session)
                try:
                    yield
                finally:
                    group.cancel_scope.cancel()
                    writer.close()
        finally:
            link.last_words = _last_words(process, errors, DYING_S if link.closed else 0.0)
            if alone:
                await asyncio.to_thread(_end_tree, process.pid)


def _last_words(process: subprocess.Popen[bytes], errors: IO[bytes], wait_s: float) -> str:
    """`wait_s` is for one that is about to end."""
    code = process.poll()
    if code is None and wait_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(wait_s)
    size = os.fstat(errors.fileno()).st_size
    words = os.pread(errors.fileno(), 4 * WORDS_MAX, max(0, size - 4 * WORDS_MAX))
    text = words.decode(errors="backslashreplace").strip()[-WORDS_MAX:]
    return ("" if code is None else f"; it ended with code {code}") + (f"; it said: {text}" if text else "")


async def _pipes(process: subprocess.Popen[bytes]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    transport, protocol = await loop.connect_write_pipe(FlowControlMixin, process.stdin)
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


async def _read(name: str, reader: asyncio.StreamReader, link: Link) -> None:
    """Messages from lines; a line that is none is skipped, of which the first is told."""
    strays = 0
    async with link.to_session:
        with contextlib.suppress(ValueError, ConnectionError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while line := await reader.readline():  # ValueError: one that is too long
                if message := _message(line):
                    await link.to_session.send(SessionMessage(message))
                    continue
                if line.strip() and not strays:
                    log.warning("MCP server %s prints what is no message, which is skipped: %.200r", name, line)
                strays += 1
        link.closed = True


def _message(line: bytes) -> JSONRPCMessage | None:
    """The message that a line is. JavaScript writes lone surrogates, which pydantic does not read."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError:
        if b"\\ud" not in line and b"\\uD" not in line:
            return None
    try:
        return jsonrpc_message_adapter.validate_python(json_form(json.loads(line)), by_name=False)
    except (ValueError, NoJsonForm, RecursionError):
        return None


async def _write(writer: asyncio.StreamWriter, messages: MemoryObjectReceiveStream[SessionMessage]) -> None:
    with contextlib.suppress(ConnectionError):
        async for each in messages:
            line = each.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
            writer.write(delivered(line) + b"\n")
            await writer.drain()


def _end_tree(pid: int) -> None:
    """End a program that no attempt has started, with what is below it."""
    known: set[Named] = set()

    def found() -> list[Named]:
        if started := process_started(pid):
            known.update([(pid, started), *below(pid)])
        return alive(known)

    end_all(found)


@contextlib.asynccontextmanager
async def _over_http(server: MCPServer, link: Link) -> AsyncIterator[None]:
    """A server that runs elsewhere. A session that it gave is given back, if that does not take long."""
    session: dict[str, str] = {}

    async def seen(response: httpx2.Response) -> None:
        if "mcp-session-id" in response.headers:
            session["mcp-session-id"] = response.headers["mcp-session-id"]
        said_json = response.headers.get("content-type", "").startswith("application/json")
        link.closed = link.closed or (response.status_code >= 500 and not said_json)

    timeout = httpx2.Timeout(server.start_timeout_s, read=None)
    hooks: Any = {"request": [deliver], "response": [seen]}
    async with httpx2.AsyncClient(headers=server.headers, timeout=timeout, event_hooks=hooks) as client:
        async with streamable_http_client(server.url, http_client=client, terminate_on_close=False) as (read, write):
            link.is_http = True
            link.read, link.write = read, write  # type: ignore[assignment]  # streams of the same form
            yield
        if session:
            with contextlib.suppress(httpx2.HTTPError):
                await client.delete(server.url, headers=session, timeout=GOODBYE_S)
