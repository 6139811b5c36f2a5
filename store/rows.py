"""The projections of a log: one row a run, one a tool call, and the leases of who works on the store.

The rows are tuples: every append makes some anew, with a few values changed, and no other kind of value does that as
quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .budgets import Amount
from .events import Decision, Usage
from .states import Status

Gate = Literal["", "due", "asked", "approved", "expired"]
"""How a call stands with its approval: it needs none; it is to be asked for (anew); it is asked for; it is given; its
time has passed."""
Clock = Callable[[], float]
"""Seconds since the epoch on the store's clock."""


class RunRow(NamedTuple):
    """The projection of a run, updated in the transaction of every append. `seq` is the newest event's."""

    run_id: str
    status: Status
    seq: int
    epoch: int
    agent: str
    digest: str
    batch: str | None
    sample: str | None
    priority: int
    created_at: float
    updated_at: float
    turns: int = 0
    usage: Usage = Usage()
    cancel: bool = False
    claim_id: str = ""
    charges: tuple[float, ...] = ()
    """Times of the claims that count towards the restart limit."""
    decisions: tuple[str, ...] = ()
    """Event ids of the newest cancels, requeues and failures: one that is sent again is recognised."""
    error: str | None = None
    """Error code of a failed run; why a run was cancelled, is being cancelled, or timed out."""
    end_seq: int | None = None
    """seq of the terminal event."""
    due_at: float | None = None
    """When the first open question of the run expires, on the store's clock; of a cancelled run that had a turn, since
    when its processes are to be looked for."""
    parked: bool = False
    """It came to wait for a person since it was last claimed or resumed: the next claim is no respawn."""
    timeout_s: float | None = None
    deadline_at: float | None = None
    """When it has taken `timeout_s` since its creation or newest resume; None once it ended or is being cancelled."""
    budget: str | None = None
    """The budget that it shares with others."""
    held: Amount | None = None
    """What is reserved there for its model call."""


class CallRow(NamedTuple):
    """The projection of a tool call. It is open while `result_seq` is None."""

    run_id: str
    tool_call_id: str
    turn_index: int
    name: str
    effect: str
    attempt: int = 1
    """The attempt that may run, 0 for a call that a person has to approve before there is one."""
    started_attempt: int = 0
    """The newest attempt that holds a start mark, 0 for none."""
    nonce: str = ""
    """The task that owns the mark, or did until a person withdrew it; empty from the next attempt on."""
    started_at: float = 0.0
    hold_s: float = 0.0
    node: str = ""
    boot_id: str = ""
    pid: int = 0
    pid_started: float = 0.0
    lock: str = ""
    unsettled: bool = False
    gate: Gate = ""
    question: str = ""
    """Id of the newest question about the call, answered or not: of its approval, or whether it took effect."""
    digest: str = ""
    """What the approval is bound to."""
    due_at: float | None = None
    """When the open approval question expires."""
    default: Decision | None = None
    """What is decided then."""
    decided: str = ""
    """Event ids of the decisions about the call, with spaces between."""
    decision_text: str = ""
    """How, by whom and when `question` was decided; empty while it is not."""
    result_seq: int | None = None
    result_id: str = ""
    evidence_ids: str = ""
    """Event ids of the evidence and of what probes said, with spaces between."""
    evidence_seq: int | None = None
    """seq of the newest evidence that reports a success."""

    @property
    def started(self) -> bool:
        """Whether the current attempt may have acted."""
        return 0 < self.attempt == self.started_attempt

    @property
    def withdrawn(self) -> bool:
        """Whether the current attempt had begun, and a person has said that it did not happen."""
        return bool(self.nonce) and not self.started_attempt

    @property
    def waits(self) -> bool:
        """Whether it is open and a person's move."""
        return self.result_seq is None and (self.unsettled or self.gate in ("asked", "expired"))

    @property
    def barred(self) -> bool:
        """Whether no attempt may begin or be opened before a person has decided."""
        return self.unsettled or self.gate in ("due", "asked", "expired")


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a store, and the process that has it."""

    name: str
    nonce: str
    node: str
    boot_id: str
    pid: int
    pid_started: float
    expires_at: float
