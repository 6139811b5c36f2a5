"""What an event log is: commands, verdicts and the protocol that every log implements.

A command is a request to append under a guard. There are three kinds (who may append, and what is compared):
the owner's (`Append`, `Retry`: epoch and position), facts (`Mark`, `Leave`, `Result`, `Probed`, `Unsettle`: the
call's own row; `Check`) and decisions (`Create`, `Claim`, `Answer`, `Decide`, `Settle`, `Expire`, `Cancel`, `Requeue`,
`Abandon`: what they decide on). All guards are compared inside the transaction that appends. Every command may be
sent again when its answer was lost; facts and decisions then answer "already there", permissions (`Mark`, `Leave`,
`Claim`) are checked anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Protocol

from .budgets import Budget
from .errors import PerdureError
from .events import (
    ApprovalDecided,
    CancelRequested,
    Event,
    ProcessesChecked,
    RunCreated,
    RunFailed,
    RunRequeued,
    Stored,
    ToolCallProbed,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolResult,
)
from .rows import CallRow, Lease, RunRow
from .states import Status

# -- commands ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    run_id: str
    event: RunCreated


@dataclass(frozen=True, slots=True)
class Claim:
    """Take a run over: granted when the run is live, its epoch is `seen_epoch` and `lease` is the supervisor's."""

    run_id: str
    event_id: str
    lease: str
    seen_epoch: int
    reason: Literal["start", "respawn", "hung", "node_lost", "recovery", "decision"] = "start"
    charged: bool = False


@dataclass(frozen=True, slots=True)
class Append:
    """The owner's append behind `expected_seq`. Without events it only asks whether the caller still is the owner.

    What stands behind `expected_seq` already may be a prefix of `events` (an append whose answer was lost, or
    the start of a turn that was sent ahead): then the rest is appended.
    """

    run_id: str
    epoch: int
    expected_seq: int
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """Permission for a non_idempotent attempt to begin, by compare-and-set."""

    run_id: str
    event: ToolCallStarted


@dataclass(frozen=True, slots=True)
class Leave:
    """Permission for an attempt of another class to begin. Appends nothing."""

    run_id: str
    tool_call_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Open attempt `event.attempt`, one above the present one, before its task exists.

    `seen_started` is the call's started_attempt as the decision saw it: a mark that was written since forbids it.
    """

    run_id: str
    epoch: int
    seen_started: int
    event: ToolCallRetried


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt reports. It becomes the call's result or evidence; the verdict says which."""

    run_id: str
    event: ToolResult


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe said, or that it could not. Always accepted: it decides nothing."""

    run_id: str
    event: ToolCallProbed


@dataclass(frozen=True, slots=True)
class Unsettle:
    run_id: str
    event: ToolCallUnsettled


@dataclass(frozen=True, slots=True)
class Answer:
    """A probe's word that `event.attempt`, still the current one, happened."""

    run_id: str
    event: ToolResult


@dataclass(frozen=True, slots=True)
class Decide:
    """A person's answer to an approval question: granted while that question is open, not expired, and about exactly
    this digest. A rejection closes the call in the same transaction."""

    run_id: str
    event: ApprovalDecided


@dataclass(frozen=True, slots=True)
class Settle:
    """A person's answer to "did this happen?", about the attempt that was asked about. `content` is the result of a
    call that happened, as JSON text."""

    run_id: str
    event: ToolCallSettled
    content: str = ""


@dataclass(frozen=True, slots=True)
class Expire:
    """The supervisor's timer: what is due by the store's clock expires, or gets its default decision."""

    run_id: str
    lease: str


@dataclass(frozen=True, slots=True)
class Cancel:
    run_id: str
    event: CancelRequested


@dataclass(frozen=True, slots=True)
class Requeue:
    run_id: str
    event: RunRequeued


@dataclass(frozen=True, slots=True)
class Check:
    """Processes of a cancelled run were looked for; once after each cancel."""

    run_id: str
    event: ProcessesChecked


@dataclass(frozen=True, slots=True)
class Abandon:
    """The supervisor ends a run that it may not start again: as failed, or cancelled if that is requested."""

    run_id: str
    lease: str
    seen_epoch: int
    event: RunFailed


Command = (
    Create
    | Claim
    | Append
    | Mark
    | Leave
    | Retry
    | Result
    | Probed
    | Unsettle
    | Answer
    | Decide
    | Settle
    | Expire
    | Cancel
    | Requeue
    | Check
    | Abandon
)

Reason = Literal[
    "not_found",
    "exists",
    "conflict",
    "stale_epoch",
    "stale_lease",
    "ended",
    "not_ended",
    "cancelled",
    "closed",
    "superseded",
    "taken",
    "gated",
    "budget",
    "decided",
    "expired",
    "illegal",
]


class Refused(PerdureError):
    """A command whose guard did not hold; nothing was appended. `newer` are the events that a conflict missed, `budget`
    is that which has no room for a reservation, without it."""

    def __init__(
        self, reason: Reason, message: str, newer: tuple[Stored, ...] = (), budget: Budget | None = None
    ) -> None:
        super().__init__(message)
        self.reason, self.newer, self.budget = reason, newer, budget

    def __reduce__(self) -> tuple[type[Refused], tuple[Reason, str, tuple[Stored, ...], Budget | None]]:
        return type(self), (self.reason, self.message, self.newer, self.budget)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A command whose guard held. `events` are those that it stands for, `already` if they were there before."""

    row: RunRow
    events: tuple[Stored, ...] = ()
    already: bool = False
    calls: tuple[CallRow, ...] = ()
    """The run's open calls afterwards."""


Verdict = Accepted | Refused


class EventLog(Protocol):
    """The one truth about all runs. Implementations: MemoryLog, SqlLog."""

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        """Apply the commands in order in one durable transaction, each with a verdict of its own.

        Raises StoreUnavailable when nothing, or nothing certain, was written.
        """
        ...

    async def read(self, run_id: str, after: int = 0, limit: int | None = None) -> list[Stored]:
        """The run's events with seq > after, in order. Empty for an unknown run."""
        ...

    async def read_after(self, places: Mapping[str, int]) -> dict[str, list[Stored]]:
        """Of each of many runs the events with a seq behind the one given for it, in order; no entry where there are
        none."""
        ...

    async def run(self, run_id: str) -> RunRow | None: ...

    async def runs(
        self,
        *,
        statuses: Sequence[Status] | None = None,
        batch: str | None = None,
        ids: Sequence[str] | None = None,
        prefix: str | None = None,
        due_before: float | None = None,
        oldest_first: bool = False,
        limit: int | None = None,
    ) -> list[RunRow]:
        """Runs that match all filters; by priority and age if `oldest_first`, else the newest first.

        `due_before` means runs of which an open question expires by then, or whose deadline passes; and cancelled
        ones whose processes were not looked for yet.
        """
        ...

    async def counts(self, batch: str | None = None) -> dict[Status, int]:
        """How many runs are in each status."""
        ...

    async def calls(self, run_id: str) -> list[CallRow]:
        """All calls of a run, in order of request."""
        ...

    async def open_calls(self, ids: Sequence[str]) -> dict[str, list[CallRow]]:
        """The calls without a result of each of many runs, in order of request; no entry where there are none."""
        ...

    async def lease(self, name: str) -> Lease | None: ...

    async def take_lease(self, lease: Lease, instead_of: str | None) -> bool:
        """Compare-and-set: write `lease` if the present holder's nonce is `instead_of` (None: nobody holds it)."""
        ...

    async def drop_lease(self, name: str, nonce: str) -> None:
        """Give a lease back; nothing happens when `nonce` does not hold it."""
        ...

    async def budgets(self, name: str | None = None) -> list[Budget]:
        """The shared budgets, or that of a name, by name."""
        ...

    async def cap_budget(self, name: str, caps: Mapping[str, int | Decimal | None]) -> Budget:
        """Make a budget, or change its caps: `tokens`, `cost`; None lifts one. It has no bound to begin with."""
        ...

    async def keep(self, digest: str, part: int, data: bytes) -> None:
        """Keep one part of a blob, counted from 0; durable when this returns. A part that is there already is left as
        it is. Raises StoreUnavailable."""
        ...

    async def kept(self, digest: str, part: int) -> bytes | None:
        """One part of a blob; None behind the last one, and of a blob that is not here."""
        ...

    async def close(self) -> None: ...
