"""The state table of a run: law for the log and for the machine alike.

`TRANSITIONS` lists the legal moves. `status_after` gives the status that one event leads to; the store calls it
before it writes and the machine calls it when it folds, so the two cannot disagree. Whatever `status_after` says
is checked against the table: an event that would break it raises `IllegalTransition`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from .errors import IllegalTransition
from .events import Event


class Status(StrEnum):
    """Where a run stands."""

    QUEUED = "queued"
    RUNNING = "running"
    AWAITING_TOOL = "awaiting_tool"
    AWAITING_APPROVAL = "awaiting_approval"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TRANSITIONS: Final[dict[Status, frozenset[Status]]] = {
    Status.QUEUED: frozenset({Status.RUNNING, Status.CANCELLED}),
    Status.RUNNING: frozenset(
        {Status.AWAITING_TOOL, Status.AWAITING_APPROVAL, Status.COMPLETED, Status.FAILED, Status.CANCELLED}
    ),
    Status.AWAITING_TOOL: frozenset({Status.RUNNING, Status.AWAITING_APPROVAL, Status.FAILED, Status.CANCELLED}),
    Status.AWAITING_APPROVAL: frozenset({Status.AWAITING_TOOL, Status.RUNNING, Status.CANCELLED, Status.TIMED_OUT}),
    Status.COMPLETED: frozenset(),
    Status.FAILED: frozenset({Status.QUEUED}),
    Status.CANCELLED: frozenset({Status.QUEUED}),
    Status.TIMED_OUT: frozenset({Status.QUEUED}),
}

TERMINAL: Final = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.TIMED_OUT})
LIVE: Final = frozenset({Status.QUEUED, Status.RUNNING, Status.AWAITING_TOOL})
"""States that need an actor, now or as soon as a slot is free."""

_ANY_TIME: Final = frozenset({"tool_evidence", "tool_call_probed"})
_OF_CALLS: Final = frozenset(
    {
        "tool_call_requested",
        "tool_call_retried",
        "tool_call_unsettled",
        "tool_call_settled",
        "approval_requested",
        "approval_decided",
        "approval_expired",
        "tool_result",
    }
)
"""Events after which the open calls say where the run stands."""
_OF_OWNERS: Final = frozenset({Status.RUNNING, Status.AWAITING_TOOL})
_IN_A_TURN: Final = frozenset(
    {
        "notice_injected",
        "turn_started",
        "budget_reserved",
        "budget_released",
        "assistant_delta",
        "assistant_interrupted",
        "assistant_message",
    }
)
OWNERS_EVENTS: Final = _IN_A_TURN | {
    "code_changed",
    "tool_call_requested",
    "approval_requested",
    "tool_result",
    "run_completed",
    "run_failed",
    "run_cancelled",
    "processes_checked",
}
"""What the owner of a run may append."""
_ENDS: Final = {
    "run_completed": Status.COMPLETED,
    "run_failed": Status.FAILED,
    "run_cancelled": Status.CANCELLED,
    "run_timed_out": Status.TIMED_OUT,
}


def _move(status: Status, to: Status, event: Event) -> Status:
    if to is status or to in TRANSITIONS[status]:
        return to
    raise IllegalTransition(status, event.type)


def status_after(status: Status, event: Event, open_calls: int, waiting_calls: int) -> Status:
    """The status after `event`.

    `open_calls` counts the calls without a result once the event has been applied: a request adds one, a result
    takes one away. `waiting_calls` are those of them that wait for a person. Raises IllegalTransition.
    """
    kind = event.type
    if kind in _ANY_TIME or (kind == "processes_checked" and status is Status.CANCELLED):
        return status
    if (kind == "run_requeued") != (status in TERMINAL) or kind == "run_created":
        raise IllegalTransition(status, kind)
    if kind == "run_requeued":
        return _move(status, Status.QUEUED, event)
    if kind in _ENDS:
        if kind == "run_completed" and open_calls:
            raise IllegalTransition(status, kind, f"{open_calls} calls are open")
        return _move(status, _ENDS[kind], event)
    if kind == "run_claimed":
        running = _move(status, Status.RUNNING, event) if status is Status.QUEUED else status
        return _move(running, _with_calls(open_calls, waiting_calls), event) if open_calls else running
    if kind == "cancel_requested":
        return status
    if kind in _OF_CALLS:
        if status is Status.QUEUED and kind == "tool_result":
            return status  # a requeued run that is cancelled before it is claimed closes its calls
        return _move(status, _with_calls(open_calls, waiting_calls), event)
    if kind == "tool_call_started" and status is Status.AWAITING_TOOL:
        return status
    if kind in _IN_A_TURN and status is Status.RUNNING:
        return status
    if kind == "code_changed" and status in _OF_OWNERS:
        return status
    raise IllegalTransition(status, kind)


def _with_calls(open_calls: int, waiting_calls: int) -> Status:
    """Where a run stands by its calls: it waits for a person only when all that is open does."""
    if not open_calls:
        return Status.RUNNING
    return Status.AWAITING_APPROVAL if open_calls == waiting_calls else Status.AWAITING_TOOL
