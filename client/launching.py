"""What it takes to launch a run: the request, the agent's code, and the command that creates it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from uuid import uuid4

from pydantic import JsonValue

from ..actors.loading import LoadedAgent, load_agent
from ..actors.model import check_model
from ..store.errors import UsageError
from ..store.events import RunCreated
from ..store.log import Create

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Request:
    """One run to launch. Without an id it gets a random one."""

    input: JsonValue
    run_id: str = field(default_factory=lambda: uuid4().hex)
    batch: str | None = None
    sample: str | None = None
    priority: int = 0
    correlation_id: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    budget: str | None = None
    """The name of the budget that it shares with others; there has to be one."""


def check_agent(agent: str, model: str | None = None) -> LoadedAgent:
    """Load an agent and make its model, so that what is wrong with them is told before anything starts."""
    loaded = load_agent(agent)
    check_model(model or loaded.agent.model, loaded.folder, loaded.agent.base_url)
    return loaded


def check_keys(loaded: LoadedAgent, model: str | None = None) -> None:
    """Raises UsageError where this process's environment, in which the model will be asked, lacks its key."""
    check_model(model or loaded.agent.model, loaded.folder, loaded.agent.base_url, from_here=True)


def create(loaded: LoadedAgent, request: Request, config: dict[str, JsonValue] | None = None) -> Create:
    """The command that creates a run, with the agent's own settings or a snapshot of them that was changed. Raises
    UsageError for a run id that could not name a file, and for a cost limit without known prices."""
    if not RUN_ID.fullmatch(request.run_id):
        raise UsageError(f"run id {request.run_id!r}: use 1 to 64 letters, digits, - and _")
    event = RunCreated(
        agent=loaded.ref,
        input=request.input,
        config=loaded.agent.snapshot() if config is None else config,
        batch=request.batch,
        budget=request.budget,
        sample=request.sample,
        correlation_id=request.correlation_id,
        priority=request.priority,
        metadata=request.metadata,
    )
    return Create(request.run_id, event)
