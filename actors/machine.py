"""The machine of a run: two pure functions hold all logic.

`evolve(state, event)` folds what happened; `next_step(state)` says what to do next. Nothing else changes a state,
and nothing else decides. There is no code for recovery: a start, a resume and a respawn after a crash all fold
the log and ask `next_step`. What is legal stands in `TRANSITIONS`, which the log obeys too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import reduce
from typing import Any, NamedTuple

from ..store.budgets import EXACT, ZERO, Amount, tokens
from ..store.errors import CorruptLog, IllegalTransition
from ..store.events import (
    AgentRef,
    AssistantDelta,
    AssistantInterrupted,
    AssistantMessage,
    BudgetReleased,
    BudgetReserved,
    CancelRequested,
    CodeChanged,
    Event,
    NoticeInjected,
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
    canonical,
)
from ..store.projections import add_usage, closing_results
from ..store.states import TERMINAL, TRANSITIONS, Status, status_after
from .calls import AboutCall, Call, Turn, evolve_call, of_class, resumed
from .ceilings import GOES_ON, Answer, is_final, is_final_notice
from .guards import Limits, Stop, TurnPlan, after_final, changed, limits_of, plan_turn
from .partial import Partial, heard, interrupted
from .prices import PriceList, cost
from .standing import loop_end, standing
from .unanswered import is_empty, is_refusal, refused, silent, told_of_silence

__all__ = ["TRANSITIONS", "Call", "State", "begin", "evolve", "fold", "messages", "next_step"]


class State(NamedTuple):
    """A run, folded from its log up to event `seq`. `turn` is the newest answered turn, `past` those before."""

    created: RunCreated
    status: Status = Status.QUEUED
    seq: int = 1
    epoch: int = 0
    past: tuple[Turn, ...] = ()
    turn: Turn | None = None
    turn_started: bool = False
    """A model call is under way (or was, when its process died)."""
    reserved: BudgetReserved | None = None
    """What its present owner holds of the budget that it shares."""
    partial: Partial | None = None
    """What was received of an answer that is not complete."""
    usage: Usage = Usage()
    cost: Decimal = ZERO
    """US dollars, of the model calls whose prices are known."""
    limits: Limits = Limits()
    """Those of the launch, overlaid by what each resume has raised."""
    prices: PriceList | None = None
    notices: tuple[NoticeInjected, ...] = ()
    resumed: int = 0
    """How many turns there were when the run was last resumed."""
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
    def used(self) -> Amount:
        return Amount(tokens(self.usage), self.cost)


def begin(created: RunCreated) -> State:
    """The state of a run that was only created. Raises CorruptLog for limits and prices that are none."""
    try:
        prices = created.config.get("prices")
        limits = limits_of(created.config.get("limits"))
        known = None if prices is None else PriceList.model_validate(prices)
        return State(created, limits=limits, prices=known)
    except ValueError as error:
        raise CorruptLog(f"the limits or the prices of a run cannot be read: {error}") from error


# -- what happened ----------------------------------------------------------------------------------------


def evolve(state: State, event: Event) -> State:
    """The state after one more event. Raises IllegalTransition, naming state and event."""
    turn = _evolve_turn(state, event)
    open_calls = turn.open_calls if turn else ()
    status = status_after(state.status, event, len(open_calls), sum(call.waits for call in open_calls))
    return state._replace(seq=state.seq + 1, status=status, turn=turn, **_changes(state, event))


def _changes(state: State, event: Event) -> dict[str, Any]:
    """What an event changes in a state, but for the newest turn and the status."""
    match event:
        case RunClaimed():
            return {"epoch": event.epoch, "reserved": None}
        case CodeChanged():
            return {"changes": (*state.changes, event)}
        case NoticeInjected():
            if event.turn_index != state.turn_count:
                raise IllegalTransition(state.status, event.type, f"turn {event.turn_index} is not due")
            return {"notices": (*state.notices, event)}
        case TurnStarted():
            if event.turn_index != state.turn_count or state.turn_started:
                raise IllegalTransition(state.status, event.type, f"turn {event.turn_index} is not due")
            return {"turn_started": True}
        case BudgetReserved():
            if event.turn_index != state.turn_count or not state.turn_started:
                raise IllegalTransition(state.status, event.type, f"turn {event.turn_index} was not started")
            return {"reserved": event}
        case BudgetReleased():
            if state.reserved is None or event.turn_index != state.turn_count:
                raise IllegalTransition(state.status, event.type, "nothing is reserved")
            return {"reserved": None}
        case AssistantDelta():
            return {"partial": _heard(state, event)}
        case AssistantInterrupted():
            if state.partial is None or state.partial.counted or event.turn_index != state.turn_count:
                raise IllegalTransition(state.status, event.type, "no call is known that came to nothing")
            return {**_spent(state, event.usage), "partial": replace(state.partial, counted=True)}
        case AssistantMessage():
            spent = _spent(state, event.usage)
            return {**spent, "past": state.turns, "turn_started": False, "partial": None, "reserved": None}
        case CancelRequested():
            return {"cancel": event}
        case RunCompleted() | RunFailed() | RunCancelled() | RunTimedOut():
            return {"end": event}
        case RunRequeued():
            limits = changed(state.limits, event.limits) if event.limits else state.limits
            return {"cancel": None, "end": None, "limits": limits, "resumed": state.turn_count}
    return {}


def _spent(state: State, usage: Usage) -> dict[str, Any]:
    spent = EXACT.add(state.cost, cost(state.prices, usage)) if state.prices else state.cost
    return {"usage": add_usage(state.usage, usage), "cost": spent}


def _heard(state: State, event: AssistantDelta) -> Partial:
    if event.turn_index != state.turn_count or not state.turn_started:
        raise IllegalTransition(state.status, event.type, f"turn {event.turn_index} was not started")
    if (partial := heard(state.partial, event)) is None:
        raise IllegalTransition(state.status, event.type, "the piece does not follow")
    return partial


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
            return state.turn._replace(calls=(*state.turn.calls, Call(event)))
        case RunRequeued() if state.turn:
            return state.turn._replace(calls=tuple(resumed(call) for call in state.turn.calls))
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
    return state.turn._replace(calls=tuple(calls))


def _with_call(state: State, event: AboutCall) -> Turn:
    calls = state.turn.calls if state.turn else ()
    at = next((n for n, c in enumerate(calls) if c.tool_call_id == event.tool_call_id and c.result is None), None)
    if state.turn is None or at is None:
        raise IllegalTransition(state.status, event.type, f"call {event.tool_call_id} is not open")
    call = evolve_call(calls[at], event)
    if call is None:
        raise IllegalTransition(state.status, event.type, f"call {event.tool_call_id} does not wait for that")
    return state.turn._replace(calls=(*calls[:at], call, *calls[at + 1 :]))


def fold(events: Iterable[Stored], state: State | None = None) -> State:
    """The state of a log, or of `state` and what came after it. Raises CorruptLog for a gap or a bad beginning."""
    for stored in events:
        if state is None:
            if stored.seq != 1 or not isinstance(stored.event, RunCreated):
                raise CorruptLog(f"a log begins with event {stored.seq}, {stored.event.type}, not with run_created")
            state = begin(stored.event)
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
    """Ask the model for turn `turn_index` as planned. `started` says that the log has its turn_started already;
    `notice` is to be recorded before."""

    turn_index: int
    started: bool
    plan: TurnPlan
    notice: str | None = None


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
        return Finish((*uncounted(state), *closing_results(state.open_calls), RunCancelled(reason=reason)))
    if state.status is Status.AWAITING_APPROVAL:
        return Wait()
    if due := tuple(call for call in state.open_calls if call.gate == "due"):
        return Ask(due)
    if state.open_calls:
        return Execute(tuple(call for call in state.open_calls if not call.waits))
    end = _end(state)
    plan = end or plan_turn(state.limits, standing(state.turns, state.used, state.limits), state.prices)
    match plan:
        case Answer(output, stop_reason):
            return Finish((RunCompleted(output=output, stop_reason=stop_reason),))
        case Stop(code, message):
            return Finish((RunFailed(code=code, message=message, phase="model"),))
    return CallModel(state.turn_count, state.turn_started, plan, _notice(state, plan))


def uncounted(state: State) -> tuple[Event, ...]:
    """What is to be recorded of a model call that came to nothing, before the run goes on or ends."""
    if state.partial is None or state.partial.counted:
        return ()
    return (interrupted(state.partial, state.turn_count, len(canonical(messages(state)))),)


def _end(state: State) -> Answer | Stop | None:
    """How a run ends whose newest turn, with all its results, is its last; None where another one is due."""
    turn, limits = state.turn, state.limits
    if turn is None:
        return None
    message, fresh = turn.message, state.turn_count > state.resumed
    if is_refusal(message):
        return refused(message) if fresh else None
    if is_final(message.turn_index, limits.max_turns):
        return after_final(limits, standing(state.turns, state.used, state.limits), message.text)
    if is_empty(turn) and limits.max_empty is not None:
        return silent(state.turns[state.resumed :], limits)
    if not turn.calls and (message.text or fresh):
        return Answer(message.text, message.stop_reason)
    why = loop_end(limits, state.turns, state.resumed)
    return Stop("loop_detected", f"{why}; resume it to give it another chance") if why else None


def _notice(state: State, plan: TurnPlan) -> str | None:
    """What the model has to be told before its next turn and was not told yet."""
    told = state.notices[-1].text if state.notices else None
    empty = state.turn is not None and is_empty(state.turn)
    silence = told_of_silence(state.turns[state.resumed :], state.limits) if empty else None
    raised = GOES_ON if told is not None and is_final_notice(told) else None
    wanted = plan.notice or silence or raised
    return None if wanted == told else wanted


# -- what the model sees ----------------------------------------------------------------------------------


def messages(state: State) -> list[dict[str, Any]]:
    """The conversation: every tool call is answered by exactly one result in the next message; a notice is the
    user's, before the turn that it is about."""
    said: list[dict[str, Any]] = [{"role": "user", "content": state.created.input}]
    notices = {notice.turn_index: notice.text for notice in state.notices}
    for turn in state.turns:
        if notice := notices.get(turn.message.turn_index):
            said.append({"role": "user", "content": notice})
        if is_empty(turn) or is_refusal(turn.message):
            continue  # nobody takes an empty message, and one that was refused is not gone on with
        calls = [
            {"id": call.tool_call_id, "name": call.request.name, "arguments": call.request.arguments}
            for call in turn.calls
        ]
        native = {} if turn.message.native is None else {"native": turn.message.native}
        said.append({"role": "assistant", "text": turn.message.text, "tool_calls": calls, **native})
        results = [_seen_result(call, call.result) for call in turn.calls if call.result]
        if results:
            said.append({"role": "tool", "results": results})
    if notice := notices.get(state.turn_count):
        said.append({"role": "user", "content": notice})
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
