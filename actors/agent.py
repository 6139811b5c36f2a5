"""What a user writes: an Agent with its model, tools and limits. Imports no Ray.

An agent is code: a run stores only a reference to it and a snapshot of its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from ..store.errors import UsageError
from .guards import Limits, changed
from .prices import PriceList, price_list
from .servers import Listing, MCPServer
from .tools import Tool

SCRIPT = "script:"
"""What the name of a scripted model begins with."""


class Agent(BaseModel):
    """An LLM agent.

    `model` is a model string (`provider:model` as pydantic-ai knows them, or `script:FILE`, relative to the agent's
    file) or any callable that takes a ModelRequest and returns the assistant's turn. A callable must be a function of
    its request alone: after a crash it is asked again. For a provider's model, `model_settings` are those of
    pydantic-ai, and `base_url` is where its API is, if not where the provider's client looks for it by itself. Of an
    MCPServer among the `tools`, all its tools are. `price_as`, as provider:model, is what a model is priced as, if
    not as itself; where genai-prices does not know that, runs are not priced and cannot have a `max_cost`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    model: str | Callable[..., Any]
    instructions: str = ""
    tools: tuple[Tool | MCPServer, ...] = ()
    limits: Limits = Limits()
    price_as: str | None = None
    model_settings: dict[str, Any] = Field(default_factory=dict)
    base_url: str | None = None

    @field_validator("tools")
    @classmethod
    def _names_are_unique(cls, tools: tuple[Tool | MCPServer, ...]) -> tuple[Tool | MCPServer, ...]:
        for kind, what in ((Tool, "tools"), (MCPServer, "MCP servers")):
            if twice := _repeated([tool.name for tool in tools if isinstance(tool, kind)]):
                raise ValueError(f"two {what} are named {', '.join(twice)}")
        return tools

    def __hash__(self) -> int:
        return hash((self.name, self.tools))  # what the settings are made of need not have one

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model can call; those of servers once they are `listed`."""
        return tuple(tool for tool in self.tools if isinstance(tool, Tool))

    @property
    def servers(self) -> tuple[MCPServer, ...]:
        return tuple(tool for tool in self.tools if isinstance(tool, MCPServer))

    def tool(self, name: str) -> Tool | None:
        """The tool of that name."""
        return next((tool for tool in self.offered if tool.name == name), None)

    def listed(self, listings: Mapping[str, Listing]) -> Agent:
        """This agent with the tools of its servers in place of the servers. One without a listing has none. Raises
        UsageError for two tools of one name."""
        tools: list[Tool] = []
        for each in self.tools:
            tools += [each] if isinstance(each, Tool) else each.tools(listings.get(each.name, []))
        if twice := _repeated([tool.name for tool in tools]):
            raise UsageError(f"agent {self.name}: two tools are named {', '.join(twice)}")
        return self.model_copy(update={"tools": tuple(tools)})

    def snapshot(
        self, model: str | None = None, limits: Mapping[str, object] | None = None, priced: bool = False
    ) -> dict[str, JsonValue]:
        """The settings that a run keeps from its launch on. `model` and `limits` override the agent's. The
        prices of the model have to be known if `priced`.

        Asks the agent's MCP servers what tools they have, which blocks. Raises UsageError for a server that does not
        say, for a limit that makes no sense, and for a `max_cost` of a model whose prices are not known.
        """
        bounds = changed(self.limits, limits or {})
        prices = self._prices(model, priced or bounds.max_cost is not None)
        listings = {server.name: server.listed() for server in self.servers}
        return {
            "name": self.name,
            "model": self.chosen(model),
            "limits": bounds.model_dump(mode="json"),
            "prices": prices.model_dump(mode="json") if prices else None,
            "tools": self.listed(listings).tool_facts(),
            **({"servers": cast(JsonValue, listings)} if listings else {}),
        }

    def chosen(self, model: str | None) -> str | None:
        """The name of the model that a run asks, None for a callable. `model` overrides the agent's."""
        return model or (self.model if isinstance(self.model, str) else None)

    def _prices(self, model: str | None, needed: bool) -> PriceList | None:
        """The prices of a run's model as they are now."""
        names = [name for name in (model, self.price_as, self.chosen(None)) if name]
        known = next((name for name in names if not name.startswith(SCRIPT)), None)
        if known is None and not needed:
            return None
        try:
            return price_list(known or (names[0] if names else f"agent {self.name}'s own"), datetime.now(UTC))
        except UsageError:
            if not needed:
                return None
            raise

    def tool_facts(self) -> dict[str, JsonValue]:
        """What a run remembers of the tools, by name, so that it can tell what has changed."""
        return {tool.name: tool.facts for tool in self.offered}


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
