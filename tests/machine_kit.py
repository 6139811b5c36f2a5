"""Events for tests of the pure machine: one of each, and the beginnings of runs."""

from __future__ import annotations

from typing import Any, Literal

from perdure.actors.guards import Limits, Standing, TurnPlan, plan_turn
from perdure.actors.machine import CallModel
from perdure.store.budgets import Amount
from perdure.store.events import (
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
    RunFailed,
    RunRequeued,
    RunTimedOut,
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

from .fakes import created

CALL = "t0c0"


def requested(number: int = 0, turn: int = 0, effect: Any = "non_idempotent") -> ToolCallRequested:
    call_id = f"t{turn}c{number}"
    return ToolCallRequested(
        turn_index=turn,
        tool_call_id=call_id,
        provider_id="call_0",
        name="pay",
        arguments="{}",
        effect=effect,
        idempotency_key=f"key of {call_id}",
    )


def due(index: int, started: bool = False) -> CallModel:
    """The step that asks the model for a turn, after turns of one token without limits but the default ones."""
    last = Usage(input_tokens=1) if index else None
    plan = plan_turn(Limits(), Standing(index, Amount(index), last))
    assert isinstance(plan, TurnPlan)
    return CallModel(index, started, plan)


def marked(attempt: int = 1) -> ToolCallStarted:
    return ToolCallStarted(
        tool_call_id=CALL,
        attempt=attempt,
        nonce="n",
        node="node",
        boot_id="boot",
        pid=1,
        pid_started=1.0,
        lock="/lock",
        hold_s=1.0,
    )


def result(call_id: str = CALL, content: str = '"ok"') -> ToolResult:
    return ToolResult(tool_call_id=call_id, attempt=1, content=content)


def answer(turn: int = 0, text: str = "hm") -> AssistantMessage:
    return AssistantMessage(turn_index=turn, text=text, stop_reason="end_turn", usage=Usage(input_tokens=1))


def delta(text: str = "h", offset: int = 0, turn: int = 0, told: Usage | None = None) -> AssistantDelta:
    return AssistantDelta(turn_index=turn, offset=offset, text=text, usage=told)


def asked(call_id: str = CALL, question: str = "q1") -> ApprovalRequested:
    return ApprovalRequested(
        event_id=question,
        tool_call_id=call_id,
        name="pay",
        arguments="{}",
        effect="non_idempotent",
        digest="d",
        arguments_schema={},
    )


def decided(decision: Literal["approve", "reject"] = "approve", **fields: Any) -> ApprovalDecided:
    values = {"tool_call_id": CALL, "question": "q1", "digest": "d", "by": "ann"} | fields
    return ApprovalDecided(decision=decision, **values)


def unsettled(call_id: str = CALL, question: str = "q1") -> ToolCallUnsettled:
    return ToolCallUnsettled(event_id=question, tool_call_id=call_id, attempt=1, why="no probe")


def settled(question: str = "q1", call_id: str = CALL) -> ToolCallSettled:
    return ToolCallSettled(tool_call_id=call_id, attempt=1, question=question, outcome="not_happened", by="ann")


CLAIMED = RunClaimed(epoch=1, owner="s", reason="start")
BEGAN: tuple[Event, ...] = (CLAIMED, TurnStarted(turn_index=0), answer())
TWO_CALLS: tuple[Event, ...] = (*BEGAN, requested(0), requested(1))
ONE_OF_EACH: dict[str, Event] = {
    event.type: event
    for event in (
        created(),
        CLAIMED,
        CodeChanged(was="d", digest="e", tools={}),
        NoticeInjected(turn_index=0, text="the last one"),
        TurnStarted(turn_index=0),
        BudgetReserved(turn_index=0, prompt_tokens=1, output_tokens=1),
        BudgetReleased(turn_index=0),
        delta(),
        AssistantInterrupted(turn_index=0, usage=Usage(input_tokens=1), estimated=True),
        answer(),
        requested(),
        marked(),
        ToolCallRetried(tool_call_id=CALL, attempt=2, reason="gone"),
        ToolCallProbed(tool_call_id=CALL, attempt=1, end="gone", answer="unknown", why="no receipt"),
        unsettled(),
        settled(),
        asked(),
        decided(),
        ApprovalExpired(tool_call_id=CALL, question="q1"),
        result(),
        ToolEvidence(tool_call_id=CALL, attempt=1, content='"ok"', is_error=False, why="late"),
        CancelRequested(by="me"),
        RunCompleted(output="x", stop_reason="end_turn"),
        RunFailed(code="c", message="m", phase="model"),
        RunCancelled(reason="r"),
        ProcessesChecked(asked=1, machines=()),
        RunTimedOut(reason="r"),
        RunRequeued(by="me"),
    )
}
