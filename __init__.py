"""Durable LLM agent runs on Ray: event-sourced, supervised, effects exactly accounted for.

The public names. `Runtime` and what belongs to it are loaded on first use, since they bring SQLAlchemy; Ray itself
is imported only when a cluster is started or joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .actors.agent import Agent, Limits
from .actors.model import ModelReply, ModelRequest, ToolUse
from .actors.tools import Settled, Tool, ToolContext, tool
from .store.errors import PerdureError, UsageError
from .store.events import Usage

if TYPE_CHECKING:
    from .client.runtime import Outcome, Run, Runtime

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "Limits",
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
    "tool",
]


def __getattr__(name: str) -> Any:
    if name in ("Outcome", "Run", "Runtime"):
        from .client import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
