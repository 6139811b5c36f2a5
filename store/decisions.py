"""What people and deadlines decide about calls: the guards of each decision and the events that it stands for. Pure.

A decision answers one question, and a question is answered once: who comes second is told how it was decided.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from .budgets import Budget, reserved
from .events import (
    ApprovalDecided,
    ApprovalExpired,
    BudgetReserved,
    CancelRequested,
    Event,
    ProcessesChecked,
    ResultSource,
    RunCancelled,
    RunTimedOut,
    ToolCallSettled,
    ToolResult,
    canonical,
)
from .log import Refused, Settle
from .projections import closing_results
from .rows import CallRow, RunRow
from .states import TERMINAL, Status

DEADLINE: Final = "deadline"
"""Who decides when nobody did in time."""


def check_room(row: RunRow, budget: Budget | None, wanted: BudgetReserved) -> None:
    """Raise Refused unless a run's budget, in which the reservation is entered already, allows it."""
    if budget is None:
        raise Refused("illegal", f"run {row.run_id} shares no budget")
    if budget.cap.allows(budget.taken) and (budget.cap.cost is None or wanted.cost is not None):
        return
    without = replace(budget, held=budget.held - reserved(wanted))
    raise Refused("budget", f"run {row.run_id}: budget {budget.name!r} has no room for its call", budget=without)


def decide(row: RunRow, call: CallRow, event: ApprovalDecided, now: float) -> tuple[Event, ...]:
    """The events of an answer to an approval question; none if it is in the log already. Raises Refused."""
    if event.event_id in call.decided.split():
        return ()
    _check_question(row, call, event)
    if call.gate == "expired" or (call.due_at is not None and call.due_at <= now):
        raise Refused("expired", f"{_about(call)}: the time to decide has passed")
    if call.gate != "asked":
        raise Refused("superseded", f"{_about(call)}: the question is not whether it may run")
    if event.digest != call.digest:
        raise Refused("superseded", f"{_about(call)}: the decision is about other arguments than were asked about")
    return _decision(call, event)


def settle(row: RunRow, call: CallRow, command: Settle) -> tuple[Event, ...]:
    """The events of an answer to "did this happen?"; none if it is in the log already. Raises Refused."""
    event = command.event
    if event.event_id in call.decided.split():
        return ()
    _check_question(row, call, event)
    if not call.unsettled or event.attempt != call.attempt:
        raise Refused("superseded", f"{_about(call)}: the question is not whether attempt {event.attempt} happened")
    match event.outcome:
        case "happened":
            _check_json(call, command.content)
            return event, ToolResult(
                tool_call_id=call.tool_call_id, attempt=call.attempt, content=command.content, source="person"
            )
        case "abandon":
            text = f"abandoned by {event.by}: it is unknown whether attempt {call.attempt} took effect"
            return event, _error(call, _with_reason(text, event.reason), "person")
        case "not_happened":
            return (event,)


def expire(row: RunRow, calls: Sequence[CallRow], now: float) -> list[Event]:
    """What becomes of a run whose time has passed, else of its open questions whose time has: their tool's default, or
    they expire."""
    if row.status in TERMINAL or row.cancel:
        return []
    if row.deadline_at is not None and row.deadline_at <= now:
        return _past_deadline(row, calls)
    events: list[Event] = []
    for call in calls:
        if call.due_at is None or call.due_at > now:
            continue
        if call.default is None:
            events.append(ApprovalExpired(tool_call_id=call.tool_call_id, question=call.question))
            continue
        decided = ApprovalDecided(
            tool_call_id=call.tool_call_id,
            question=call.question,
            digest=call.digest,
            decision=call.default,
            by=DEADLINE,
            reason=f"nobody decided in time; the tool's default is to {call.default}",
        )
        events += _decision(call, decided)
    return events


def _past_deadline(row: RunRow, calls: Sequence[CallRow]) -> list[Event]:
    """Where a person is waited for, the run has timed out, and its questions can be asked anew; else it is cancelled,
    by its owner if it has one."""
    if row.status is Status.AWAITING_APPROVAL:
        return [RunTimedOut(reason=DEADLINE)]
    return cancelled(row, CancelRequested(by=DEADLINE, reason=DEADLINE), calls)


def cancelled(row: RunRow, event: CancelRequested, calls: Sequence[CallRow]) -> list[Event]:
    """The events of a cancel: the end of the run too where no owner is there, or due, to see to it."""
    if row.status not in (Status.QUEUED, Status.AWAITING_APPROVAL):
        return [event]
    by = "before it started" if row.status is Status.QUEUED else f"by {event.by}"
    return [event, *closing_results(calls), RunCancelled(reason=event.reason or f"cancelled {by}")]


def closed(row: RunRow, calls: Sequence[CallRow]) -> list[Event]:
    """The end of a run that is being cancelled, by another hand than its owner's."""
    return [*closing_results(calls), RunCancelled(reason=row.error or "cancelled on request")]


def checked(row: RunRow, event: ProcessesChecked) -> list[Event]:
    """The record of a look for what a cancelled run has left."""
    if row.status is not Status.CANCELLED:
        raise Refused("not_ended", f"run {row.run_id} is {row.status}, not cancelled")
    return [] if row.due_at is None else [event]


def outcome_of_waiting(row: RunRow, calls: Sequence[CallRow]) -> list[Event]:
    """What ends a run at once when all its open calls wait for a person: a cancel, or a question that has expired.

    Nothing runs then and no owner is due, so whoever appended what led there has to append the end too.
    """
    if row.cancel:
        return closed(row, calls)
    for call in calls:
        if call.gate == "expired":
            reason = f"nobody decided in time about call {call.tool_call_id} ({call.name})"
            return [RunTimedOut(reason=reason, tool_call_id=call.tool_call_id)]
    return []


def waited_for(calls: Sequence[CallRow]) -> str:
    """What a person has to say about the open calls of a waiting run, for people."""
    return ", ".join(
        f"whether call {call.tool_call_id} ({call.name}) {'took effect' if call.unsettled else 'may run'}"
        for call in calls
    )


# -- guards -----------------------------------------------------------------------------------------------


def _check_question(row: RunRow, call: CallRow, event: ApprovalDecided | ToolCallSettled) -> None:
    """Raise Refused unless the question is the call's newest, has no answer, and the call can still be decided on."""
    if event.question == call.question and call.decision_text:
        raise Refused("decided", f"{_about(call)} was {call.decision_text}")
    if row.status is Status.TIMED_OUT:
        raise Refused("expired", f"run {row.run_id} has timed out: resume it and it asks anew")
    if row.status is Status.CANCELLED or (row.cancel and row.status not in TERMINAL):
        raise Refused("cancelled", f"run {row.run_id} is cancelled or about to be")
    if row.status in TERMINAL:
        raise Refused("ended", f"run {row.run_id} has ended as {row.status}")
    if call.result_seq is not None:
        raise Refused("closed", f"{_about(call)} has its result already")
    if event.question != call.question:
        raise Refused("superseded", f"{_about(call)}: this is an older question, it is not open any more")


def _check_json(call: CallRow, content: str) -> None:
    try:
        json.loads(content)
    except ValueError as error:
        raise Refused("illegal", f"{_about(call)}: the result of a call that happened has to be JSON") from error


def _about(call: CallRow) -> str:
    return f"call {call.tool_call_id} of run {call.run_id}"


# -- events -----------------------------------------------------------------------------------------------


def _decision(call: CallRow, event: ApprovalDecided) -> tuple[Event, ...]:
    """A decision, and the result of a call that it closes."""
    if event.decision == "approve":
        return (event,)
    by = "" if event.by == DEADLINE else f" by a person ({event.by})"
    return event, _error(call, _with_reason(f"not run: rejected{by}", event.reason), "rejection")


def _error(call: CallRow, text: str, source: ResultSource) -> ToolResult:
    return ToolResult(
        tool_call_id=call.tool_call_id, attempt=call.attempt, content=canonical(text), is_error=True, source=source
    )


def _with_reason(text: str, reason: str) -> str:
    return f"{text}: {reason}" if reason else text
