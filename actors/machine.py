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
    AgentRef,
    AssistantMessage,
    CancelRequested,
    CodeChanged,
    Event,
    RunCancelled,
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunRequeued,
    RunTimedOut,
    Stored,
    ToolCallRequested,
    ToolResult,
    TurnStarted,
    Usage,
)
from ..store.projections import add_usage, closing_results
from ..store.states import TERMINAL, TRANSITIONS, Status, status_after
from .calls import AboutCall, Call, evolve_call, of_class, resumed

__all__ = ["TRANSITIONS", "Call", "State", "evolve", "fold", "messages", "next_step"]


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
    changes: tuple[CodeChanged, ...] = ()
    """The versions of the agent's code that came after the one that the run began with."""
    cancel: CancelRequested | None = None
    end: RunCompleted | RunFailed | RunCancelled | RunTimedOut | None = None
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
    def code(self) -> AgentRef:
        """The agent's code, as far as the log knows."""
        agent = self.created.agent
        return agent.model_copy(update={"digest": self.changes[-1].digest}) if self.changes else agent

    @property
    def max_turns(self) -> int:
        limits = cast(dict[str, int], self.created.config.get("limits") or {})
        return limits.get("max_turns", 50)


# -- what happened ----------------------------------------------------------------------------------------


def evolve(state: State, event: Event) -> State:
    """The state after one more event. Raises IllegalTransition, naming state and event."""
    before, turn = state.turn, _evolve_turn(state, event)
    open_calls = turn.open_calls if turn else ()
    status = status_after(state.status, event, len(open_calls), sum(call.waits for call in open_calls))
    state = replace(state, seq=state.seq + 1, status=status, turn=turn)
    match event:
        case RunClaimed():
            return replace(state, epoch=event.epoch)
        case CodeChanged():
            return replace(state, changes=(*state.changes, event))
        case TurnStarted():
            if event.turn_index != state.turn_count or state.turn_started:
                raise IllegalTransition(status, event.type, f"turn {event.turn_index} is not due")
            return replace(state, turn_started=True)
        case AssistantMessage():
            past = (*state.past, before) if before else state.past
            return replace(state, past=past, turn_started=False, usage=add_usage(state.usage, event.usage))
        case CancelRequested():
            return replace(state, cancel=event)
        case RunCompleted() | RunFailed() | RunCancelled() | RunTimedOut():
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
        case RunRequeued() if state.turn:
            return replace(state.turn, calls=tuple(resumed(call) for call in state.turn.calls))
        case CodeChanged() if event.raised:
            return _with_raised(state, event)
    if isinstance(event, AboutCall):
        return _with_call(state, event)
    return state.turn


def _with_raised(state: State, event: CodeChanged) -> Turn:
    if state.turn is None or not event.raised.keys() <= {call.tool_call_id for call in state.turn.open_calls}:
        raise IllegalTransition(state.status, event.type, "a call that is raised is not open")
    calls = [
        of_class(call, raised) if (raised := event.raised.get(call.tool_call_id)) else call for call in state.turn.calls
    ]
    return replace(state.turn, calls=tuple(calls))


def _with_call(state: State, event: AboutCall) -> Turn:
    calls = state.turn.calls if state.turn else ()
    at = next((n for n, c in enumerate(calls) if c.tool_call_id == event.tool_call_id and c.result is None), None)
    if state.turn is None or at is None:
        raise IllegalTransition(state.status, event.type, f"call {event.tool_call_id} is not open")
    call = evolve_call(calls[at], event)
    if call is None:
        raise IllegalTransition(state.status, event.type, f"call {event.tool_call_id} does not wait for that")
    return replace(state.turn, calls=(*calls[:at], call, *calls[at + 1 :]))


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
    """See to it that these released calls get their results: start them, or join those that run already."""

    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Put these gated calls to a person anew."""

    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Append these events; the last one is terminal."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing for an owner to do: the run has ended, or waits for a slot or a person."""


Step = CallModel | Execute | Ask | Finish | Wait


def next_step(state: State) -> Step:
    """The one thing that the owner of a run has to do now."""
    if state.status in TERMINAL or state.status is Status.QUEUED:
        return Wait()
    if state.cancel:
        reason = state.cancel.reason or f"cancelled by {state.cancel.by}"
        return Finish((*closing_results(state.open_calls), RunCancelled(reason=reason)))
    if state.status is Status.AWAITING_APPROVAL:
        return Wait()
    if due := tuple(call for call in state.open_calls if call.gate == "due"):
        return Ask(due)
    if state.open_calls:
        return Execute(tuple(call for call in state.open_calls if not call.waits))
    if state.turn and not state.turn.calls:
        message = state.turn.message
        return Finish((RunCompleted(output=message.text, stop_reason=message.stop_reason),))
    if state.turn_count >= state.max_turns:
        message_text = f"the limit of {state.max_turns} turns is used up; raise max_turns and resume"
        return Finish((RunFailed(code="max_turns", message=message_text, phase="model"),))
    return CallModel(state.turn_count, state.turn_started)


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
        results = [_seen_result(call, call.result) for call in turn.calls if call.result]
        if results:
            said.append({"role": "tool", "results": results})
    return said


def _seen_result(call: Call, result: ToolResult) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "tool_call_id": call.tool_call_id,
        "name": call.request.name,
        "content": result.content,
        "is_error": result.is_error,
    }
    if call.arguments != call.request.arguments:
        seen["note"] = f"a person changed the arguments to {call.arguments}"
    return seen


def idempotency_key(run_id: str, tool_call_id: str) -> str:
    """The key of a call, the same over all its attempts. Run ids have one length, so that no two pairs collide."""
    return hashlib.sha256(f"{run_id}{tool_call_id}".encode()).hexdigest()
