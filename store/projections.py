"""What an event does to the rows of its run, pure: the projections that the log keeps beside the events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from pydantic import JsonValue

from .budgets import Budget, entered
from .errors import IllegalTransition
from .events import (
    STRICTNESS,
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    AssistantDelta,
    AssistantInterrupted,
    AssistantMessage,
    BudgetReserved,
    CancelRequested,
    CodeChanged,
    Decision,
    Event,
    Fate,
    NoticeInjected,
    ProcessesChecked,
    Raised,
    RunCancelled,
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunRequeued,
    RunTimedOut,
    Settlement,
    Stored,
    ToolCallProbed,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolEvidence,
    ToolResult,
    TurnStarted,
    Usage,
    canonical,
)
from .rows import CallRow, RunRow
from .states import Status, status_after

CHARGES_KEPT = 20
"""How many times of charged claims a run's row keeps."""
DECISIONS_KEPT = 8
_WORDS: Final[dict[Decision | Settlement, str]] = {
    "approve": "approved",
    "reject": "rejected",
    "happened": "settled as happened",
    "not_happened": "settled as not happened",
    "abandon": "abandoned",
}


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


def closing(call: OpenCall) -> tuple[Fate, str]:
    """What is true of an open call that is closed without a result of its own, and what its model is told."""
    if not call.attempt or (call.effect == "non_idempotent" and not call.started):
        return "never started", "cancelled: never started"
    if call.effect == "non_idempotent":
        return "unknown", f"cancelled: outcome unknown, attempt {call.attempt} had started and may have taken effect"
    if call.effect == "idempotent_write":
        return "unknown", "cancelled: may have run, its idempotency key is in the log"
    return "stopped", "cancelled: not needed any more, may have been read"


def closing_results(calls: Iterable[OpenCall]) -> tuple[ToolResult, ...]:
    """One result for each open call of a run that is cancelled."""
    return tuple(
        ToolResult(
            tool_call_id=call.tool_call_id,
            attempt=call.attempt,
            content=canonical(text),
            is_error=True,
            source="cancel",
            fate=fate,
        )
        for call in calls
        for fate, text in [closing(call)]
    )


def first_row(run_id: str, event: RunCreated, now: float) -> RunRow:
    """The row of a run before its first event."""
    return RunRow(
        run_id=run_id,
        status=Status.QUEUED,
        seq=0,
        epoch=0,
        agent=event.agent.ref,
        digest=event.agent.digest,
        batch=event.batch,
        budget=event.budget,
        sample=event.sample,
        priority=event.priority,
        created_at=now,
        updated_at=now,
    )


class Fold:
    """The rows of one run while events are folded into them, that of its budget too. The run's row is made once,
    however many events come."""

    def __init__(self, row: RunRow, calls: Mapping[str, CallRow], budget: Budget | None = None) -> None:
        self.budget = budget
        self.calls = dict(calls)
        self.touched: dict[str, None] = {}
        """Ids of the calls that have changed, in order of change."""
        self.status = row.status
        self._row, self._seq, self._changes = row, row.seq, dict[str, Any]()
        self._open = self._waiting = 0
        for call in calls.values():
            if call.result_seq is None:
                self._open += 1
                self._waiting += call.waits

    @property
    def row(self) -> RunRow:
        return self._row._replace(status=self.status, seq=self._seq, **self._changes)

    @property
    def open_calls(self) -> tuple[CallRow, ...]:
        return tuple(call for call in self.calls.values() if call.result_seq is None)

    def add(self, event: Event, now: float) -> Stored:
        """Fold the next event; its place in the log. Raises IllegalTransition: then the fold is of no more use."""
        row, changes = self._row, self._changes
        self._seq = seq = self._seq + 1
        if call := fold_call(self.calls, row.run_id, event, seq, now):
            self._put(call)
        else:
            if isinstance(event, RunRequeued):
                for call in [call for call in self.calls.values() if call.waits]:
                    self._put(_to_be_asked_anew(call))
            elif isinstance(event, CodeChanged):
                for call_id, raised in event.raised.items():
                    self._put(_raised(self.calls.get(call_id), raised, event, now))
            _fold_run(row, changes, event, seq, now)
        if not isinstance(event, RunCreated):
            self.status = status_after(self.status, event, self._open, self._waiting)
            if self.status is Status.AWAITING_APPROVAL:
                changes["parked"] = True
        if self.budget:
            self.budget, changes["held"] = entered(self.budget, changes.get("held", row.held), event)
        changes["updated_at"] = now
        return Stored(seq, now, changes.get("epoch", row.epoch), event)

    def _put(self, call: CallRow) -> None:
        before = self.calls.get(call.tool_call_id)
        self._open += (call.result_seq is None) - (before is not None and before.result_seq is None)
        self._waiting += call.waits - (before is not None and before.waits)
        self.calls[call.tool_call_id] = call
        self.touched[call.tool_call_id] = None
        if call.due_at != (before.due_at if before else None):
            due = [call.due_at for call in self.calls.values() if call.due_at is not None]
            self._changes["due_at"] = min(due, default=None)


def _fold_run(row: RunRow, changes: dict[str, Any], event: Event, seq: int, now: float) -> None:
    """Fold what an event says about the run itself into `changes`, the fields that differ from `row` by now."""
    match event:
        case RunCreated():
            changes |= _deadline(timeout_of(event.config.get("limits")), now)
        case RunClaimed():
            changes |= {"epoch": event.epoch, "claim_id": event.event_id, "parked": False}
            if event.charged:
                changes["charges"] = (*changes.get("charges", row.charges), now)[-CHARGES_KEPT:]
        case AssistantMessage():
            changes["turns"] = changes.get("turns", row.turns) + 1
            changes["usage"] = add_usage(changes.get("usage", row.usage), event.usage)
        case AssistantInterrupted():
            changes["usage"] = add_usage(changes.get("usage", row.usage), event.usage)
        case CodeChanged():
            changes["digest"] = event.digest
        case CancelRequested():
            changes |= {"cancel": True, "error": event.reason or None, "due_at": None, "deadline_at": None}
        case RunCompleted():
            changes |= {"end_seq": seq, "error": None, "deadline_at": None}
        case RunFailed():
            changes |= {"end_seq": seq, "error": event.code, "due_at": None, "deadline_at": None}
        case RunCancelled() | RunTimedOut():
            looks = isinstance(event, RunCancelled) and changes.get("turns", row.turns)
            changes |= {"end_seq": seq, "error": event.reason, "due_at": now if looks else None, "deadline_at": None}
        case ProcessesChecked():
            changes["due_at"] = None
        case RunRequeued(limits=limits):
            changes |= {"end_seq": None, "error": None, "cancel": False, "charges": (), "parked": False, "due_at": None}
            timeout_s = timeout_of(limits) if limits and "timeout_s" in limits else row.timeout_s
            changes |= _deadline(timeout_s, now)
    if isinstance(event, (CancelRequested, RunRequeued, RunFailed)):
        changes["decisions"] = (*changes.get("decisions", row.decisions), event.event_id)[-DECISIONS_KEPT:]


def timeout_of(limits: JsonValue) -> float | None:
    """How long a run with these limits may take, None: as long as it likes."""
    timeout_s = limits.get("timeout_s") if isinstance(limits, dict) else None
    return float(timeout_s) if isinstance(timeout_s, int | float) else None


def _deadline(timeout_s: float | None, now: float) -> dict[str, float | None]:
    return {"timeout_s": timeout_s, "deadline_at": None if timeout_s is None else now + timeout_s}


def fold_call(calls: Mapping[str, CallRow], run_id: str, event: Event, seq: int, now: float) -> CallRow | None:
    """The call's projection after an event; None for an event that is about no call. Raises IllegalTransition."""
    match event:
        case ToolCallRequested():
            if event.tool_call_id in calls:
                raise IllegalTransition("requested", event.type, f"call id {event.tool_call_id} is not unique")
            return CallRow(run_id, event.tool_call_id, event.turn_index, event.name, event.effect)
        case ToolCallStarted():
            return calls[event.tool_call_id]._replace(
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
        case ToolResult():
            return _open_call(calls, event)._replace(result_seq=seq, result_id=event.event_id, due_at=None)
        case TurnStarted() | BudgetReserved() | AssistantDelta() | AssistantMessage() | NoticeInjected():
            return None  # as the rest, but at once: they are frequent
        case ToolCallRetried():
            return calls[event.tool_call_id]._replace(attempt=event.attempt, unsettled=False, nonce="")
        case ToolCallProbed():
            return _with_evidence(calls[event.tool_call_id], event)
        case ToolEvidence():
            call = _with_evidence(calls[event.tool_call_id], event)
            return call if event.is_error else call._replace(evidence_seq=seq)
        case ToolCallUnsettled():
            call = calls[event.tool_call_id]
            return call._replace(unsettled=True, question=event.event_id, decision_text="")
        case ApprovalRequested():
            return _asked(_open_call(calls, event), event, now)
        case ApprovalDecided():
            call = _decided(calls[event.tool_call_id], event, now)
            return call._replace(gate="approved" if event.decision == "approve" else call.gate, due_at=None)
        case ApprovalExpired():
            return calls[event.tool_call_id]._replace(gate="expired", due_at=None)
        case ToolCallSettled():
            call = _decided(calls[event.tool_call_id], event, now)._replace(unsettled=False)
            return call._replace(started_attempt=0) if event.outcome == "not_happened" else call
    return None


def _with_evidence(call: CallRow, event: ToolEvidence | ToolCallProbed) -> CallRow:
    return call._replace(evidence_ids=f"{call.evidence_ids} {event.event_id}".strip())


def _open_call(calls: Mapping[str, CallRow], event: ToolResult | ApprovalRequested) -> CallRow:
    call = calls.get(event.tool_call_id)
    if call is None or call.result_seq is not None:
        raise IllegalTransition("closed", event.type, f"call {event.tool_call_id} is not open")
    return call


def _raised(call: CallRow | None, raised: Raised, event: CodeChanged, now: float) -> CallRow:
    """An open call of a stricter class than before. What may run of it by now has begun without a mark, and counts as
    marked from here on: by a task that nobody knows, so that only its deadline proves it over."""
    if call is None or call.result_seq is not None:
        raise IllegalTransition("closed", event.type, "a call that is raised is not open")
    if STRICTNESS.index(raised.effect) <= STRICTNESS.index(call.effect):
        raise IllegalTransition(call.effect, event.type, f"call {call.tool_call_id} is of that class or a stricter one")
    call = call._replace(effect=raised.effect)
    if raised.effect != "non_idempotent" or not call.attempt:
        return call
    return call._replace(started_attempt=call.attempt, started_at=now, hold_s=raised.hold_s)


def _asked(call: CallRow, event: ApprovalRequested, now: float) -> CallRow:
    """A call is put to a person; it has no attempt until it is approved."""
    if call.gate in ("asked", "expired"):
        raise IllegalTransition(call.gate, event.type, f"call {call.tool_call_id} is asked about already")
    return call._replace(
        gate="asked",
        attempt=0,
        question=event.event_id,
        digest=event.digest,
        due_at=None if event.timeout_s is None else now + event.timeout_s,
        default=event.default,
        decision_text="",
    )


def _decided(call: CallRow, event: ApprovalDecided | ToolCallSettled, now: float) -> CallRow:
    """A call with the record of who decided what, and when."""
    what = _WORDS[event.decision if isinstance(event, ApprovalDecided) else event.outcome]
    when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = f"{what} by {event.by} at {when}" + (f": {event.reason}" if event.reason else "")
    return call._replace(decided=f"{call.decided} {event.event_id}".strip(), decision_text=text)


def _to_be_asked_anew(call: CallRow) -> CallRow:
    """A waiting call of a run that is resumed: nobody has answered, and the question stands no more."""
    if call.gate in ("asked", "expired"):
        return call._replace(gate="due", question="", due_at=None)
    return call._replace(unsettled=False)


def add_usage(a: Usage, b: Usage) -> Usage:
    """The sum of two usages."""
    return Usage(
        input_tokens=a.input_tokens + b.input_tokens,
        output_tokens=a.output_tokens + b.output_tokens,
        cache_creation_input_tokens=a.cache_creation_input_tokens + b.cache_creation_input_tokens,
        cache_read_input_tokens=a.cache_read_input_tokens + b.cache_read_input_tokens,
    )
