"""An MCP server over streamable HTTP, made with the official SDK; prints its port. Its tool `act` notes each call in a
ledger and does what it is told."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("http", log_level="CRITICAL")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def act(do: str, dir: str = "") -> str:
    """Do something."""
    if dir:
        os.mknod(f"{dir}/{do}s")
    if do == "die":
        os._exit(7)
    if do == "hang":
        await asyncio.sleep(600)
    if do == "fail":
        raise ToolError("there is no order 17")
    return f"did {do}"


if __name__ == "__main__":
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = server.streamable_http_app(json_response="json" in sys.argv, stateless_http="stateless" in sys.argv)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])
