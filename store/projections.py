"""What an event does to the rows of its run, pure: the projections that the log keeps beside the events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from .errors import IllegalTransition
from .events import (
    AssistantMessage,
    CancelRequested,
    Event,
    RunCancelled,
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunRequeued,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolEvidence,
    ToolResult,
    Usage,
    canonical,
)
from .log import (
    CallRow,
    RunRow,
)
from .states import status_after

CHARGES_KEPT = 20
"""How many times of charged claims a run's row keeps."""
DECISIONS_KEPT = 8


class OpenCall(Protocol):
    """What the closing of a call looks at; CallRow has it, and so has the machine's Call."""

    @property
    def tool_call_id(self) -> str: ...
    @property
    def effect(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def started(self) -> bool: ...


def closing_text(call: OpenCall) -> str:
    """What is true of an open call that is closed without a result of its own."""
    if call.effect == "non_idempotent" and not call.started:
        return "cancelled: never started"
    if call.effect == "non_idempotent":
        return f"cancelled: outcome unknown, attempt {call.attempt} had started and may have taken effect"
    if call.effect == "idempotent_write":
        return "cancelled: may have run, its idempotency key is in the log"
    return "cancelled: not needed any more, may have been read"


def closing_results(calls: Iterable[OpenCall]) -> tuple[ToolResult, ...]:
    """One result for each open call of a run that is cancelled."""
    return tuple(
        ToolResult(
            tool_call_id=call.tool_call_id,
            attempt=call.attempt,
            content=canonical(closing_text(call)),
            is_error=True,
            source="cancel",
        )
        for call in calls
    )


def fold_row(row: RunRow, event: Event, seq: int, now: float, open_calls: int) -> RunRow:
    """The run's projection after an event. Raises IllegalTransition."""
    changes: dict[str, Any] = {}
    fold_changes(row, changes, event, seq, now, open_calls)
    return replace(row, **changes)


def fold_changes(row: RunRow, changes: dict[str, Any], event: Event, seq: int, now: float, open_calls: int) -> None:
    """Fold an event into `changes`, the fields that differ from `row` by now: one new row for many events."""
    if not isinstance(event, RunCreated):
        changes["status"] = status_after(changes.get("status", row.status), event, open_calls)
    changes["seq"], changes["updated_at"] = seq, now
    if isinstance(event, CancelRequested | RunRequeued | RunFailed):
        changes["decisions"] = (*changes.get("decisions", row.decisions), event.event_id)[-DECISIONS_KEPT:]
    match event:
        case RunClaimed():
            changes |= {"epoch": event.epoch, "claim_id": event.event_id}
            if event.charged:
                changes["charges"] = (*changes.get("charges", row.charges), now)[-CHARGES_KEPT:]
        case AssistantMessage():
            changes["turns"] = changes.get("turns", row.turns) + 1
            changes["usage"] = add_usage(changes.get("usage", row.usage), event.usage)
        case CancelRequested():
            changes["cancel"] = True
        case RunCompleted():
            changes["end_seq"] = seq
        case RunFailed():
            changes |= {"end_seq": seq, "error": event.code}
        case RunCancelled():
            changes |= {"end_seq": seq, "error": event.reason}
        case RunRequeued():
            changes |= {"end_seq": None, "error": None, "cancel": False, "charges": ()}


def fold_call(calls: Mapping[str, CallRow], run_id: str, event: Event, seq: int, now: float) -> CallRow | None:
    """The call's projection after an event; None for an event that is about no call."""
    match event:
        case ToolCallRequested():
            if event.tool_call_id in calls:
                raise IllegalTransition("requested", event.type, f"call id {event.tool_call_id} is not unique")
            return CallRow(run_id, event.tool_call_id, event.turn_index, event.name, event.effect)
        case ToolCallStarted():
            return replace(
                calls[event.tool_call_id],
                started_attempt=event.attempt,
                nonce=event.nonce,
                started_at=now,
                hold_s=event.hold_s,
                node=event.node,
                boot_id=event.boot_id,
                pid=event.pid,
                pid_started=event.pid_started,
                lock=event.lock,
            )
        case ToolCallRetried():
            return replace(calls[event.tool_call_id], attempt=event.attempt, unsettled=False)
        case ToolCallUnsettled():
            return replace(calls[event.tool_call_id], unsettled=True)
        case ToolResult():
            call = calls.get(event.tool_call_id)
            if call is None or call.result_seq is not None:
                raise IllegalTransition("closed", event.type, f"call {event.tool_call_id} is not open")
            return replace(call, result_seq=seq, result_id=event.event_id)
        case ToolEvidence():
            call = calls[event.tool_call_id]
            call = replace(call, evidence_ids=f"{call.evidence_ids} {event.event_id}".strip())
            return call if event.is_error else replace(call, evidence_seq=seq)
    return None


def add_usage(a: Usage, b: Usage) -> Usage:
    """The sum of two usages."""
    return Usage(
        input_tokens=a.input_tokens + b.input_tokens,
        output_tokens=a.output_tokens + b.output_tokens,
        cache_creation_input_tokens=a.cache_creation_input_tokens + b.cache_creation_input_tokens,
        cache_read_input_tokens=a.cache_read_input_tokens + b.cache_read_input_tokens,
    )
