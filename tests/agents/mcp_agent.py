"""An agent with MCP servers of every behaviour. Input: turns, each a list of calls, and then a final text."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from perdure import Agent, Limits, MCPServer, ModelRequest

FAKE = str(Path(__file__).with_name("fake_mcp.py"))
LOCK = os.environ.get("FAKE_MCP_LOCK", str(Path(tempfile.gettempdir(), f"fake-mcp-{os.getuid()}.lock")))

URL = os.environ.get("FAKE_MCP_URL", "http://127.0.0.1:9/mcp")

KEYS = {"SHOP_API_KEY": os.environ.get("SHOP_API_KEY", "")}


def fake(name: str, mode: str, *more: str, **options: Any) -> MCPServer:
    times = {"timeout_s": 2.0, "start_timeout_s": 0.7} | options
    return MCPServer(name, command=[sys.executable, "-S", FAKE, mode, *more], **times)


def model(request: ModelRequest) -> dict[str, Any]:
    turns: list[Any] = request.input  # type: ignore[assignment]
    return {"tool_calls": turns[request.turn_index]} if request.turn_index < len(turns) else {"text": "all done"}


servers = [
    fake("plain", "plain", timeout_s=30.0, start_timeout_s=10.0, attempts_max=2, num_cpus=0.1, env=KEYS),
    fake("brief", "plain", start_timeout_s=1.5),
    fake("banner", "banner", timeout_s=30.0, start_timeout_s=10.0),
    fake("mute", "mute"),
    fake("crash", "crash"),
    fake("deaf", "deaf", LOCK, start_timeout_s=1.5),
    MCPServer("absent", command=["/nowhere/at/all"]),
    MCPServer("remote", url=os.environ.get("FAKE_MCP_URL", "http://127.0.0.1:9/mcp"), timeout_s=3, start_timeout_s=2.5),
]
odd = Agent(name="odd", model=model, tools=tuple(servers))
agent = Agent(name="mcp", model=model, tools=tuple(servers[:2]), limits=Limits(max_turns=20))
