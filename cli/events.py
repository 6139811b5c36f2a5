"""Events for readers: one short line for people, one JSON object for programs."""

from __future__ import annotations

import time
from typing import Any

from ..actors.prices import in_dollars
from ..store.events import (
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    AssistantDelta,
    AssistantInterrupted,
    AssistantMessage,
    BudgetReleased,
    BudgetReserved,
    CancelRequested,
    CodeChanged,
    Event,
    NoticeInjected,
    ProcessesChecked,
    RunCancelled,
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunRequeued,
    RunTimedOut,
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
)
from .text import line

_LEFT_OUT = {"event_id", "v", "type"}


def event_line(stored: Stored) -> str:
    """An event for a terminal."""
    at = time.strftime("%H:%M:%S", time.localtime(stored.at)) + f"{stored.at % 1:.3f}"[1:]
    return f"{stored.seq:>4}  {at}  {stored.event.type:<21}  {line(describe(stored.event))}".rstrip()


def event_json(run_id: str, stored: Stored) -> dict[str, Any]:
    """An event for a program: its place first, then its own fields."""
    place = {"run_id": run_id, "seq": stored.seq, "at": stored.at, "epoch": stored.epoch}
    return place | stored.event.model_dump(mode="json")


def describe(event: Event) -> str:
    """What an event says, in few words."""
    match event:
        case RunCreated():
            return f"{event.agent.ref}: {line(event.input)}"
        case RunClaimed():
            return f"epoch {event.epoch}, {event.reason}" + (", charged" if event.charged else "")
        case CodeChanged():
            raised = "".join(f", {call_id} is {one.effect} now" for call_id, one in event.raised.items())
            return f"{event.was} -> {event.digest}{raised}"
        case NoticeInjected():
            return event.text
        case BudgetReserved():
            cost = "" if event.cost is None else f" and {in_dollars(event.cost)}"
            return f"{event.prompt_tokens} + {event.output_tokens} tokens{cost}"
        case BudgetReleased():
            return f"turn {event.turn_index}"
        case TurnStarted():
            return f"turn {event.turn_index}"
        case AssistantDelta():
            return event.text or f"(turn {event.turn_index} has taken {_taken(event.usage)} tokens so far)"
        case AssistantInterrupted():
            taken = f"turn {event.turn_index}, after {_taken(event.usage)} tokens"
            return taken + (", estimated" if event.estimated else "")
        case AssistantMessage():
            return event.text or f"({event.stop_reason})"
        case ToolCallRequested():
            return f"{event.name}({event.arguments}) as {event.tool_call_id}, {event.effect}"
        case ToolCallStarted():
            return f"{event.tool_call_id} attempt {event.attempt} on {event.node[:8]}, process {event.pid}"
        case ToolCallRetried():
            return f"{event.tool_call_id} attempt {event.attempt}: {event.reason}"
        case ToolCallProbed():
            answer = event.answer.replace("_", " ")
            return f"{event.tool_call_id} attempt {event.attempt}: {answer}" + (f", {event.why}" if event.why else "")
        case ToolCallUnsettled():
            return f"{event.tool_call_id} attempt {event.attempt}: {event.why}"
        case ApprovalRequested() | ApprovalDecided() | ApprovalExpired() | ToolCallSettled():
            return f"{event.tool_call_id} {_of_people(event)}"
        case ToolResult():
            source = "" if event.source == "tool" else f" by {event.source}"
            return f"{event.tool_call_id}{source}{' error' if event.is_error else ''}: {event.content}"
        case ToolEvidence():
            return f"{event.tool_call_id} attempt {event.attempt}, {event.why}: {event.content}"
        case RunRequeued(limits=limits) if limits:
            return f"by {event.by}, {', '.join(f'{name} is {line(value)} now' for name, value in limits.items())}"
        case CancelRequested() | RunRequeued():
            return f"by {event.by}"
        case ProcessesChecked():
            left = [pid for machine in event.machines for pid in machine.left]
            return f"{len(left)} left, {event.asked} asked" + (f": {left}" if left else "")
        case RunCompleted():
            return line(event.output)
        case RunFailed():
            return f"{event.code}: {event.message}"
        case RunCancelled() | RunTimedOut():
            return event.reason
    return line(event.model_dump(mode="json", exclude=_LEFT_OUT))


def _taken(usage: Usage | None) -> int:
    return sum(usage.model_dump().values()) if usage else 0


def _of_people(event: ApprovalRequested | ApprovalDecided | ApprovalExpired | ToolCallSettled) -> str:
    match event:
        case ApprovalRequested():
            return f"{event.name}({event.arguments}), {event.effect}" + (f": {event.reason}" if event.reason else "")
        case ApprovalExpired():
            return "nobody decided in time"
        case ApprovalDecided():
            said = f"{event.decision} by {event.by}"
            edited = "" if event.arguments is None else f", with {event.arguments}"
        case ToolCallSettled():
            said, edited = f"attempt {event.attempt} {event.outcome} by {event.by}", ""
    return f"{said}{edited}" + (f": {event.reason}" if event.reason else "")
