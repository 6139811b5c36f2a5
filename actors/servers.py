"""MCP servers as users declare them, and their tools as tools like any other.

    Agent(tools=(refund, MCPServer("files", command=["npx", "-y", "@modelcontextprotocol/server-filesystem", "/srv"])))

What tools a server has is asked when a run is launched, and kept with the run: a respawn, a resume and a changed server
offer the model the same ones. The protocol is spoken in `mcp_client`, in the process of an attempt. Imports no SDK.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import JsonValue

from ..store.errors import UsageError
from ..store.events import Decision, Effect, canonical
from .exact import parse
from .schemas import broken, violation
from .tools import EFFECTS, Approval, Handler, Misfitting, Policy, Tool, ToolContext, ToolOptions

if TYPE_CHECKING:
    from types import ModuleType

    from .agent import Agent

Listing = list[dict[str, Any]]
"""A server's tools as JSON: name, description, schema and hints."""
LIST_FRESH_S: Final = 60.0
"""How long this process believes what a server has said of its tools."""
NAME_MAX: Final = 64
"""Characters of a tool's name that every provider takes."""
_SERVER_NAME = re.compile(r"[A-Za-z0-9-]+(_[A-Za-z0-9-]+)*")
_PLAIN = re.compile(rf"[A-Za-z0-9_-]{{1,{NAME_MAX}}}")


class MCPServer:
    """An MCP server: a program that speaks over its standard streams, or the URL of one that speaks streamable HTTP.

    A program is started for each call, in the process of the attempt, and is ended with it. It gets `env`, and of this
    process's environment only the like of HOME and PATH. `cwd` and paths in `command` should be absolute. `headers` go
    with every request to a `url`.

    A tool's class comes from the server's annotations: readOnlyHint makes it read_only, idempotentHint
    idempotent_write, anything else non_idempotent. `effects`, by the server's name of the tool, overrides that. `only`
    leaves other tools out. The times, in seconds, are those of `@tool`; within `start_timeout_s` a server has to be
    ready. `approval` and what belongs to it are as in `@tool`, for every call of the server.
    """

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str] = (),
        url: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        headers: Mapping[str, str] | None = None,
        effects: Mapping[str, Effect] | None = None,
        only: Collection[str] | None = None,
        timeout_s: float = 60.0,
        start_timeout_s: float = 20.0,
        settles_after_s: float | None = None,
        attempts_max: int = 3,
        num_cpus: float = 1.0,
        approval: Literal["never", "always"] | Policy = "never",
        approval_timeout_s: float | None = None,
        approval_default: Decision | None = None,
    ) -> None:
        if not _SERVER_NAME.fullmatch(name) or len(name) > NAME_MAX // 2:
            raise UsageError(f"MCP server {name!r}: use 1 to {NAME_MAX // 2} letters, digits, - and single _ inside")
        if bool(command) == bool(url) or isinstance(command, str):
            raise UsageError(f"MCP server {name!r} needs a command, as a list of texts, or a url")
        if not 0 < start_timeout_s < timeout_s:
            raise UsageError(f"MCP server {name!r} needs 0 < start_timeout_s < timeout_s")
        if wrong := sorted(set((effects or {}).values()) - set(EFFECTS)):
            raise UsageError(f"MCP server {name!r}: unknown effect class {wrong[0]!r}: {', '.join(EFFECTS)}")
        self.name, self.command, self.url, self.cwd = name, tuple(command), url, cwd
        self.env, self.headers = dict(env or {}), dict(headers or {})
        self.effects, self.only = dict(effects or {}), None if only is None else frozenset(only)
        self.start_timeout_s = start_timeout_s
        self.options = ToolOptions("non_idempotent", timeout_s, settles_after_s, attempts_max, num_cpus)
        self.approval = Approval(approval, approval_timeout_s, approval_default)

    def tools(self, listing: Listing) -> list[Tool]:
        """The tools of a listing that was kept. Raises UsageError, which names the server and the tool."""
        return [self._tool(about) for about in listing if self.only is None or about["name"] in self.only]

    def _tool(self, about: dict[str, Any]) -> Tool:
        name, hints = about["name"], about["hints"]
        said: Effect = (
            "read_only"
            if hints.get("readOnlyHint") is True
            else "idempotent_write"
            if hints.get("idempotentHint") is True
            else "non_idempotent"
        )
        return RemoteTool(self, name, self.effects.get(name, said), about["description"], about["schema"])

    def listed(self) -> Listing:
        """What tools the server has, asked of it, or of what it said within the last minute; blocks. Raises
        UsageError where it does not say, or has tools that no provider could be told of."""
        key = canonical([self.name, self.command, self.url, self.cwd, self.env, self.headers])
        at, listing = _known.get(key, (-LIST_FRESH_S, []))
        if time.monotonic() - at > LIST_FRESH_S:
            listing = _client(self.name).list_tools(self)
            _known[key] = time.monotonic(), listing
        self._check(listing)
        return [about for about in listing if self.only is None or about["name"] in self.only]

    def _check(self, listing: Listing) -> None:
        names = [about["name"] for about in listing]
        if unknown := sorted({*self.effects, *(self.only or ())} - set(names)):
            has = ", ".join(sorted(names)) or "none"
            raise UsageError(f"MCP server {self.name!r} has no tool {unknown[0]!r}; it has {has}")
        taken: dict[str, str] = {}
        for about in listing:
            name = about["name"]
            if self.only is not None and name not in self.only:
                continue
            if (other := taken.setdefault(mapped(self.name, name), name)) != name or names.count(name) > 1:
                raise UsageError(f"MCP server {self.name!r}: its tools {other!r} and {name!r} have one name")
            if problem := broken(about["schema"]):
                raise UsageError(f"MCP server {self.name!r}: the schema of its tool {name!r} is broken: {problem}")

    def __repr__(self) -> str:
        return f"<MCP server {self.name}>"


_known: dict[str, tuple[float, Listing]] = {}


class RemoteTool(Tool):
    """A tool of an MCP server."""

    def __init__(
        self, server: MCPServer, there: str, effect: Effect, description: str = "", schema: Any = None
    ) -> None:
        self.server, self.there = server, there
        self.options = ToolOptions(**{**vars(server.options), "effect": effect, "remote": (server.name, there)})
        self.approval, self.probe, self.takes_context = server.approval, None, True
        self.name, self.description = mapped(server.name, there), description
        self.schema = schema or {"type": "object"}
        self.handler = functools.partial(_call, server, there)

    def parse(self, arguments: str) -> dict[str, Any]:
        try:
            value = parse(arguments)
        except ValueError as error:
            raise Misfitting(f"the arguments: {error}") from error
        if not isinstance(value, dict):
            raise Misfitting("the arguments are no object")
        if problem := violation(self.schema, value):
            raise Misfitting(problem)
        return value

    def bind(self, handler: Handler, context: ToolContext, arguments: str) -> Callable[[], Any]:
        _client(self.server.name)  # seconds of imports, which are none of the call's time
        return functools.partial(handler, context, self.parse(arguments))


def _call(server: MCPServer, there: str, context: ToolContext, arguments: dict[str, Any]) -> Any:
    return _client(server.name).call_tool(server, there, context, arguments)


def _client(name: str) -> ModuleType:
    try:
        from . import mcp_client
    except ModuleNotFoundError as error:
        raise UsageError(
            f"MCP server {name!r} needs the SDK ({error.name} is missing): pip install 'perdure[mcp]'"
        ) from error
    return mcp_client


def mapped(server: str, tool: str) -> str:
    """The name of a server's tool for the model: the same for ever, and of no other tool. A server's name ends before
    the first double underscore."""
    plain = f"{server}__{tool}"
    if _PLAIN.fullmatch(plain):
        return plain
    digest = hashlib.sha256(tool.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', plain)[: NAME_MAX - 9]}_{digest}"


def with_servers(agent: Agent, config: Mapping[str, JsonValue]) -> Agent:
    """An agent with the tools that its servers had when a run was launched, by the run's `config`."""
    if not agent.servers:
        return agent
    return _with_listings(agent, canonical(config.get("servers") or {}))


@functools.lru_cache(maxsize=64)
def _with_listings(agent: Agent, listings: str) -> Agent:
    return agent.listed(json.loads(listings))
