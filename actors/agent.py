"""What a user writes: an Agent with its model, tools and limits. Imports no Ray.

An agent is code: a run stores only a reference to it and a snapshot of its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, field_validator

from ..store.errors import UsageError
from .guards import Limits, changed
from .prices import PriceList, price_list
from .tools import Tool

SCRIPT = "script:"
"""What the name of a scripted model begins with."""


class Agent(BaseModel):
    """An LLM agent.

    `model` is a model string (`script:FILE`, relative to the agent's file) or any callable that takes a
    ModelRequest and returns the assistant's turn. A callable must be a function of its request alone: after a
    crash it is asked again. `price_as`, as provider:model, is what such a model is priced as; without it, or where
    genai-prices does not know it, runs are not priced and cannot have a `max_cost`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    model: str | Callable[..., Any]
    instructions: str = ""
    tools: tuple[Tool, ...] = ()
    limits: Limits = Limits()
    price_as: str | None = None

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

    def snapshot(self, model: str | None = None, limits: Mapping[str, object] | None = None) -> dict[str, JsonValue]:
        """The settings that a run keeps from its launch on. `model` and `limits` override the agent's.

        Raises UsageError for a limit that makes no sense, and for a `max_cost` of a model whose prices are not known.
        """
        bounds = changed(self.limits, limits or {})
        prices = self._prices(model, bounds)
        return {
            "name": self.name,
            "model": self.chosen(model),
            "limits": bounds.model_dump(mode="json"),
            "prices": prices.model_dump(mode="json") if prices else None,
            "tools": self.tool_facts(),
        }

    def chosen(self, model: str | None) -> str | None:
        """The name of the model that a run asks, None for a callable. `model` overrides the agent's."""
        return model or (self.model if isinstance(self.model, str) else None)

    def _prices(self, model: str | None, limits: Limits) -> PriceList | None:
        """The prices of a run's model as they are now."""
        names = [name for name in (model, self.price_as, self.chosen(None)) if name]
        known = next((name for name in names if not name.startswith(SCRIPT)), None)
        if known is None and limits.max_cost is None:
            return None
        try:
            return price_list(known or (names[0] if names else f"agent {self.name}'s own"), datetime.now(UTC))
        except UsageError:
            if limits.max_cost is None:
                return None
            raise

    def tool_facts(self) -> dict[str, JsonValue]:
        """What a run remembers of the tools, by name, so that it can tell what has changed."""
        return {tool.name: tool.facts for tool in self.tools}
