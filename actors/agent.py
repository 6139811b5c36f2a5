"""What a user writes: an Agent with its model, tools and limits. Imports no Ray.

An agent is code: a run stores only a reference to it and a snapshot of its settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from .tools import Tool


class Limits(BaseModel):
    """Bounds of one run, stored with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=50, ge=1)
    """Model calls whose answers a run may use."""


class Agent(BaseModel):
    """An LLM agent.

    `model` is a model string (`script:FILE`, relative to the agent's file) or any callable that takes a
    ModelRequest and returns the assistant's turn. A callable must be a function of its request alone: after a
    crash it is asked again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    model: str | Callable[..., Any]
    instructions: str = ""
    tools: tuple[Tool, ...] = ()
    limits: Limits = Limits()

    @field_validator("tools")
    @classmethod
    def _names_are_unique(cls, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        names = [tool.name for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two tools are named {', '.join(twice)}")
        return tools

    def tool(self, name: str) -> Tool | None:
        """The tool of that name."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def snapshot(self, model: str | None = None) -> dict[str, JsonValue]:
        """The settings that a run keeps from its launch on. `model` overrides the agent's."""
        chosen = model or (self.model if isinstance(self.model, str) else None)
        return {"name": self.name, "model": chosen, "limits": self.limits.model_dump(), "tools": self.tool_facts()}

    def tool_facts(self) -> dict[str, JsonValue]:
        """What a run remembers of the tools, by name, so that it can tell what has changed."""
        return {tool.name: tool.facts for tool in self.tools}
