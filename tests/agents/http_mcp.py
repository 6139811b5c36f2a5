"""An MCP server over streamable HTTP, made with the official SDK; prints its port. Its tool `act` notes each call in a
ledger and does what it is told; `raw` says what came."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("http", log_level="CRITICAL")
BODIES: list[bytes] = []


def heard(app: Any) -> Any:
    """The application, with all that comes kept."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        async def listen() -> Any:
            message = await receive()
            BODIES.append(message.get("body", b""))
            return message

        await app(scope, listen, send)

    return asgi


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def act(do: str, dir: str = "", price: float = 0) -> str:
    """Do something."""
    if dir:
        os.mknod(f"{dir}/{do}s")
    if do == "die":
        os._exit(7)
    if do == "hang":
        await asyncio.sleep(600)
    if do == "fail":
        raise ToolError("there is no order 17")
    return b"".join(BODIES).decode() if do == "raw" else f"did {do}"


if __name__ == "__main__":
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # who comes early waits
    print(listening.getsockname()[1], flush=True)
    app = server.streamable_http_app(json_response="json" in sys.argv, stateless_http="stateless" in sys.argv)
    uvicorn.Server(uvicorn.Config(heard(app), log_level="error")).run([listening])
