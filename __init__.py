"""Durable LLM agent runs on Ray: event-sourced, supervised, effects exactly accounted for.

The public names, each loaded on first use: a command that only reads needs no agent, an agent's file no SQLAlchemy.
Ray itself is imported only when a cluster is started or joined.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actors.agent import Agent
    from .actors.guards import Limits
    from .actors.model import ModelReply, ModelRequest, ToolUse
    from .actors.servers import MCPServer
    from .actors.tools import ApprovalAsk, Settled, Tool, ToolContext, tool
    from .actors.values import Image
    from .client.runtime import Outcome, Run, Runtime, run
    from .store.errors import PerdureError, UsageError
    from .store.events import Usage

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "ApprovalAsk",
    "Image",
    "Limits",
    "MCPServer",
    "ModelReply",
    "ModelRequest",
    "Outcome",
    "PerdureError",
    "Run",
    "Runtime",
    "Settled",
    "Tool",
    "ToolContext",
    "ToolUse",
    "Usage",
    "UsageError",
    "run",
    "tool",
]
_HOMES = {
    "actors.agent": ("Agent",),
    "actors.guards": ("Limits",),
    "actors.model": ("ModelReply", "ModelRequest", "ToolUse"),
    "actors.servers": ("MCPServer",),
    "actors.tools": ("ApprovalAsk", "Settled", "Tool", "ToolContext", "tool"),
    "actors.values": ("Image",),
    "client.runtime": ("Outcome", "Run", "Runtime", "run"),
    "store.errors": ("PerdureError", "UsageError"),
    "store.events": ("Usage",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f".{home}", __name__), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
