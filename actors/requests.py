"""What actors ask of each other. Plain values; events travel as their JSON text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from pydantic import JsonValue

from ..store.events import AgentRef, Event, ProcessesChecked, Stored, ToolCallRequested
from ..store.log import Create
from ..store.states import Status
from .tools import ToolOptions

NAMESPACE: Final = "perdure-"


def store_of(namespace: str) -> str:
    """The name of the store whose actors are in this namespace."""
    return namespace.removeprefix(NAMESPACE)


@dataclass(frozen=True)
class Settings:
    """How one supervisor and its actors work. Times in seconds."""

    store: str
    """URL of the store."""
    name: str
    """Short digest of the store's URL: names the Ray namespace and the folder of lock files."""
    actors: int = 4
    """Bound of the pool of run actors."""
    concurrency: int = 4
    """Bound of the live runs."""
    respawns_max: int = 5
    """A run that is respawned more often than this within `respawn_period_s` ends as crash_loop."""
    respawn_period_s: float = 60.0
    ping_s: float = 3.0
    hung_s: float = 15.0
    """An actor that has not answered for this long counts as dead."""
    lease_s: float = 10.0

    @property
    def namespace(self) -> str:
        return NAMESPACE + self.name


class Misfit(NamedTuple):
    """Why an open call cannot be dispatched with its agent's code as it is now."""

    kind: str
    problem: str


@dataclass(frozen=True)
class Execute:
    """From a run's owner to the journal: append these events, then see to it that all released calls get results.

    `known` are the open calls that the log has already, with the arguments that they are to run with. With neither, it
    is a plain owner's append.
    """

    run_id: str
    epoch: int
    expected_seq: int
    events: tuple[Event, ...] = ()
    known: tuple[ToolCallRequested, ...] = ()
    agent: AgentRef | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    options: dict[str, ToolOptions] = field(default_factory=dict)
    apart: bool = False
    """Whether this version of the agent's code has worker processes of its own."""
    misfits: dict[str, Misfit] = field(default_factory=dict)
    """Open calls, by id, that the agent's code has no place for any more."""


@dataclass(frozen=True)
class Executed:
    """All events after `expected_seq`, once nothing more is to be waited for."""

    events: tuple[Stored, ...]
    checked: ProcessesChecked | None = None
    """Of a run that is cancelled: which processes of it are left."""


@dataclass(frozen=True)
class Start:
    """From the supervisor to a run actor: drive this run as the owner of this epoch until it ends or waits."""

    run_id: str
    epoch: int
    events: tuple[Stored, ...] = ()
    """The whole log if it is short, else empty: the actor reads it from the journal."""
    apart: bool = False
    """Whether this version of the agent's code has worker processes of its own."""
    agent: AgentRef | None = None
    """The version of the agent's code to drive it with; None: the one that the log knows."""


@dataclass(frozen=True)
class Ended:
    """A run actor is done with an epoch of a run: it ended, it waits for a person, or somebody else owns it."""

    run_id: str
    epoch: int
    status: Status
    outcome: Literal["ended", "waits", "lost"]
    end: Event | None = None
    """The terminal event of a run that ended."""


@dataclass(frozen=True)
class Launch:
    """From a client: create these runs; the answer is a verdict each."""

    creates: tuple[Create, ...]


@dataclass(frozen=True)
class Await:
    """From a client: answer with the run's Ended once it has ended or waits for a person."""

    run_id: str


@dataclass(frozen=True)
class Nudge:
    """From a client to the supervisor, or from a run actor to the journal: the store has news of these runs."""

    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Warm:
    """From a client: have this many actors started for an agent ahead of need."""

    agent: AgentRef
    count: int
