"""The machine of a run: two pure functions hold all logic.

`evolve(state, event)` folds what happened; `next_step(state)` says what to do next. Nothing else changes a state,
and nothing else decides. There is no code for recovery: a start, a resume and a respawn after a crash all fold
the log and ask `next_step`. What is legal stands in `TRANSITIONS`, which the log obeys too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, cast

from ..store.errors import CorruptLog, IllegalTransition
from ..store.events import (
    AssistantMessage,
    CancelRequested,
    Event,
    RunCancelled,
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunRequeued,
    Stored,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolResult,
    TurnStarted,
    Usage,
)
from ..store.projections import add_usage, closing_results
from ..store.states import TERMINAL, TRANSITIONS, Status, status_after

__all__ = ["TRANSITIONS", "Call", "State", "evolve", "fold", "messages", "next_step"]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a turn. It is open until it has its result."""

    request: ToolCallRequested
    attempt: int = 1
    started_attempt: int = 0
    unsettled: str | None = None
    result: ToolResult | None = None

    @property
    def tool_call_id(self) -> str:
        return self.request.tool_call_id

    @property
    def effect(self) -> str:
        return self.request.effect

    @property
    def started(self) -> bool:
        """Whether the current attempt holds a start mark."""
        return self.started_attempt == self.attempt


@dataclass(frozen=True, slots=True)
class Turn:
    """A model's answer and the calls that it asked for, in order."""

    message: AssistantMessage
    calls: tuple[Call, ...] = ()

    @property
    def open_calls(self) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.result is None)


@dataclass(frozen=True, slots=True)
class State:
    """A run, folded from its log up to event `seq`. `turn` is the newest answered turn, `past` those before."""

    created: RunCreated
    status: Status = Status.QUEUED
    seq: int = 1
    epoch: int = 0
    past: tuple[Turn, ...] = ()
    turn: Turn | None = None
    turn_started: bool = False
    """A model call is under way (or was, when its process died)."""
    usage: Usage = field(default_factory=Usage)
    cancel: CancelRequested | None = None
    end: RunCompleted | RunFailed | RunCancelled | None = None
    """The terminal event, once there is one."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        return (*self.past, self.turn) if self.turn else self.past

    @property
    def turn_count(self) -> int:
        return len(self.past) + (self.turn is not None)

    @property
    def open_calls(self) -> tuple[Call, ...]:
        return self.turn.open_calls if self.turn else ()

    @property
    def max_turns(self) -> int:
        limits = cast(dict[str, int], self.created.config.get("limits") or {})
        return limits.get("max_turns", 50)


# -- what happened ----------------------------------------------------------------------------------------


def evolve(state: State, event: Event) -> State:
    """The state after one more event. Raises IllegalTransition, naming state and event."""
    before, turn = state.turn, _evolve_turn(state, event)
    open_calls = len(turn.open_calls) if turn else 0
    status = status_after(state.status, event, open_calls)
    state = replace(state, seq=state.seq + 1, status=status, turn=turn)
    match event:
        case RunClaimed():
            return replace(state, epoch=event.epoch)
        case TurnStarted():
            if event.turn_index != state.turn_count or state.turn_started:
                raise IllegalTransition(status, event.type, f"turn {event.turn_index} is not due")
            return replace(state, turn_started=True)
        case AssistantMessage():
            past = (*state.past, before) if before else state.past
            return replace(state, past=past, turn_started=False, usage=add_usage(state.usage, event.usage))
        case CancelRequested():
            return replace(state, cancel=event)
        case RunCompleted() | RunFailed() | RunCancelled():
            return replace(state, end=event)
        case RunRequeued():
            return replace(state, cancel=None, end=None)
    return state


def _evolve_turn(state: State, event: Event) -> Turn | None:
    """The newest turn after an event."""
    match event:
        case AssistantMessage():
            if not state.turn_started or event.turn_index != state.turn_count:
                raise IllegalTransition(state.status, event.type, f"turn {event.turn_index} was not started")
            return Turn(event)
        case ToolCallRequested():
            if state.turn is None or event.turn_index != state.turn_count - 1:
                raise IllegalTransition(state.status, event.type, f"turn {event.turn_index} is not the newest")
            return replace(state.turn, calls=(*state.turn.calls, Call(event)))
        case ToolCallStarted():
            return _with_call(state, event.tool_call_id, event, started_attempt=event.attempt)
        case ToolCallRetried():
            return _with_call(state, event.tool_call_id, event, attempt=event.attempt, unsettled=None)
        case ToolCallUnsettled():
            return _with_call(state, event.tool_call_id, event, unsettled=event.why)
        case ToolResult():
            return _with_call(state, event.tool_call_id, event, result=event)
        case RunRequeued() if state.turn:
            return replace(state.turn, calls=tuple(replace(call, unsettled=None) for call in state.turn.calls))
    return state.turn


def _with_call(state: State, tool_call_id: str, event: Event, **changes: Any) -> Turn:
    if state.turn is None or tool_call_id not in {call.tool_call_id for call in state.turn.open_calls}:
        raise IllegalTransition(state.status, event.type, f"call {tool_call_id} is not open")
    calls = tuple(replace(call, **changes) if call.tool_call_id == tool_call_id else call for call in state.turn.calls)
    return replace(state.turn, calls=calls)


def fold(events: Iterable[Stored], state: State | None = None) -> State:
    """The state of a log, or of `state` and what came after it. Raises CorruptLog for a gap or a bad beginning."""
    for stored in events:
        if state is None:
            if stored.seq != 1 or not isinstance(stored.event, RunCreated):
                raise CorruptLog(f"a log begins with event {stored.seq}, {stored.event.type}, not with run_created")
            state = State(stored.event)
            continue
        if stored.seq != state.seq + 1:
            raise CorruptLog(f"event {stored.seq} follows event {state.seq}: the log has a gap")
        state = evolve(state, stored.event)
    if state is None:
        raise CorruptLog("the log is empty")
    return state


def evolve_all(state: State, events: Iterable[Event]) -> State:
    """The state after several events."""
    return reduce(evolve, events, state)


# -- what to do -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the model for turn `turn_index`; `started` says that the log has its turn_started already."""

    turn_index: int
    started: bool


@dataclass(frozen=True, slots=True)
class Execute:
    """See to it that these open calls get their results: start them, or join those that run already."""

    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Append these events; the last one is terminal."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing for an owner to do: the run has ended, or waits for a slot or a person."""


Step = CallModel | Execute | Finish | Wait


def next_step(state: State) -> Step:
    """The one thing that the owner of a run has to do now."""
    if state.status in TERMINAL or state.status in (Status.QUEUED, Status.AWAITING_APPROVAL):
        return Wait()
    if state.cancel:
        reason = state.cancel.reason or f"cancelled by {state.cancel.by}"
        return Finish((*closing_results(state.open_calls), RunCancelled(reason=reason)))
    if state.open_calls:
        if unsettled := _all_unsettled(state.open_calls):
            return Finish((unsettled,))
        return Execute(state.open_calls)
    if state.turn and not state.turn.calls:
        message = state.turn.message
        return Finish((RunCompleted(output=message.text, stop_reason=message.stop_reason),))
    if state.turn_count >= state.max_turns:
        message_text = f"the limit of {state.max_turns} turns is used up; raise max_turns and resume"
        return Finish((RunFailed(code="max_turns", message=message_text, phase="model"),))
    return CallModel(state.turn_count, state.turn_started)


def _all_unsettled(calls: tuple[Call, ...]) -> RunFailed | None:
    if not all(call.unsettled for call in calls):
        return None
    first = calls[0]
    return RunFailed(
        code="unsettled_effect",
        message=f"call {first.tool_call_id} ({first.request.name}) had started when it was interrupted, and it is "
        f"unknown whether it took effect: {first.unsettled}. Resume the run to ask again.",
        phase="tool",
        tool_call_id=first.tool_call_id,
    )


# -- what the model sees ----------------------------------------------------------------------------------


def messages(state: State) -> list[dict[str, Any]]:
    """The conversation: every tool call is answered by exactly one result in the next message."""
    said: list[dict[str, Any]] = [{"role": "user", "content": state.created.input}]
    for turn in state.turns:
        calls = [
            {"id": call.tool_call_id, "name": call.request.name, "arguments": call.request.arguments}
            for call in turn.calls
        ]
        said.append({"role": "assistant", "text": turn.message.text, "tool_calls": calls})
        results = [
            {
                "tool_call_id": call.tool_call_id,
                "name": call.request.name,
                "content": call.result.content,
                "is_error": call.result.is_error,
            }
            for call in turn.calls
            if call.result
        ]
        if results:
            said.append({"role": "tool", "results": results})
    return said


def idempotency_key(run_id: str, tool_call_id: str) -> str:
    """The key of a call, the same over all its attempts. Run ids have one length, so that no two pairs collide."""
    return hashlib.sha256(f"{run_id}{tool_call_id}".encode()).hexdigest()
