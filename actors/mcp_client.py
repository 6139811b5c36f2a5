"""Speaking to MCP servers with the official SDK: what tools one has, and one call of a tool.

A program is started for each conversation and never shared.

What went wrong before the call was sent is an error, and nothing has happened. From then on only an answer tells.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    ListToolsResult,
    PaginatedRequestParams,
)
from pydantic import ValidationError

from ..store.errors import UsageError
from .digits import carried
from .mcp_results import ToolFailed, value_of
from .mcp_transports import WORDS_MAX, Link, NotReady, connected
from .servers import Listing, MCPServer
from .tools import EffectUnknown, ToolContext

_T = TypeVar("_T")
TOOLS_MAX: Final = 1_000


def list_tools(server: MCPServer) -> Listing:
    """The tools of a server; blocks, in an event loop too. Raises UsageError."""

    async def ask(session: ClientSession) -> Listing:
        tools: Listing = []
        cursor: str | None = None
        while True:
            page: ListToolsResult = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            for tool in page.tools:
                hints = tool.annotations.model_dump(by_alias=True, exclude_none=True) if tool.annotations else {}
                about = {"name": tool.name, "description": tool.description or "", "schema": tool.input_schema}
                tools.append({**about, "hints": hints})
            cursor = page.next_cursor
            if not cursor:
                return tools
            if not page.tools or len(tools) > TOOLS_MAX:
                raise NotReady(f"it has over {TOOLS_MAX} tools")

    async def asked() -> Listing:
        try:
            async with asyncio.timeout(server.options.timeout_s):
                return await _conversation(server, ask, alone=True)
        except (NotReady, EffectUnknown, MCPError, ValidationError, TimeoutError) as error:
            what = str(error) or f"no answer within {server.options.timeout_s:g} s"
            raise UsageError(f"MCP server {server.name!r} does not tell its tools: {what}") from error

    listing: Listing = _run(asked())
    return listing


async def call_tool(server: MCPServer, name: str, context: ToolContext, arguments: dict[str, Any]) -> Any:
    """One call of a tool; its value as it is recorded.

    Raises NotReady, ToolFailed for an answer that says so, and EffectUnknown where none came.
    """

    async def ask(session: ClientSession) -> CallToolResult:
        meta: Any = {"perdure/idempotencyKey": context.idempotency_key}
        params = CallToolRequestParams(name=name, arguments=carried(arguments), _meta=meta)
        return await session.send_request(CallToolRequest(params=params), CallToolResult)

    try:
        answer = await _conversation(server, ask)
    except MCPError as error:
        raise ToolFailed(f"{error.message} (code {error.code})") from error
    except ValidationError as error:
        raise ToolFailed(f"the server's answer is no result of a tool: {error.errors()[0]['msg']}") from error
    return value_of(answer)


async def _conversation(server: MCPServer, ask: Callable[[ClientSession], Awaitable[_T]], alone: bool = False) -> _T:
    """Connect, greet and ask. `alone`: no attempt ends what was started, so it is ended here."""
    link, ready, lost = Link(), False, True
    said: list[_T] = []
    failed: Exception | None = None
    info = Implementation(name="perdure", version="1")
    try:
        async with connected(server, link, alone), ClientSession(link.read, link.write, client_info=info) as session:
            # what fails in here is kept, since a task group would wrap it
            try:
                with anyio.fail_after(server.start_timeout_s):
                    await _greet(session)
                ready = True
                said.append(await ask(session))
            except (MCPError, ValidationError, TimeoutError, RuntimeError, NotReady) as error:
                failed, lost = error, _is_lost(error, link)
    except (Exception, ExceptionGroup) as error:  # noqa: BLE001 - whatever a transport raises, the server is lost
        failed = failed or error
    if said:
        return said[0]
    if not ready:
        late = isinstance(failed, TimeoutError)
        why = f"not ready within {server.start_timeout_s:g} s" if late else f"not ready: {_text(failed)}"
        raise NotReady(f"MCP server {server.name!r} is {why}{link.last_words}; nothing was asked of it") from failed
    if failed and not lost:
        raise failed
    raise EffectUnknown(
        f"MCP server {server.name!r} was lost before it answered: {_text(failed)}{link.last_words}"
    ) from failed


async def _greet(session: ClientSession) -> None:
    try:
        await session.initialize()
    except MCPError as error:
        if error.code not in (METHOD_NOT_FOUND, UNSUPPORTED_PROTOCOL_VERSION):
            raise
        await session.discover()


def _is_lost(error: Exception, link: Link) -> bool:
    """Whether an error means that there was no answer: of the SDK's own errors, some look like a server's."""
    if not isinstance(error, MCPError):
        return not isinstance(error, (ValidationError, NotReady))
    if link.is_http:
        return link.closed or error.code in (CONNECTION_CLOSED, PARSE_ERROR)
    return link.closed and error.code == CONNECTION_CLOSED


def _text(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).strip().splitlines()
    return lines[0][:WORDS_MAX] if lines else type(error).__name__


def _run(work: Any) -> Any:
    """Run a coroutine to its end, in a thread of its own where this one has a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    box: list[Any] = []

    def run() -> None:
        try:
            box.extend((True, asyncio.run(work)))
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            box.extend((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if not box[0]:
        raise box[1]
    return box[1]
