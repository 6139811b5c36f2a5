"""The tool calls of a turn, and what each event about one makes of it. Pure; the machine folds calls with this."""

from __future__ import annotations

from typing import NamedTuple

from ..store.events import (
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    AssistantMessage,
    Effect,
    Raised,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolResult,
)
from ..store.rows import Gate

AboutCall = (
    ToolCallStarted
    | ToolCallRetried
    | ToolCallUnsettled
    | ToolCallSettled
    | ApprovalRequested
    | ApprovalDecided
    | ApprovalExpired
    | ToolResult
)
"""Events that change an open call."""


class Call(NamedTuple):
    """A tool call of a turn. It is open until it has its result."""

    request: ToolCallRequested
    attempt: int = 1
    started_attempt: int = 0
    unsettled: str | None = None
    gate: Gate = ""
    question: str = ""
    """Id of the newest question to a person about it, answered or not."""
    asked: ApprovalRequested | None = None
    """The newest question whether it may run."""
    edited: str | None = None
    """The arguments that a person gave it."""
    raised: Effect | None = None
    """Its class, where a newer version of its tool is of a stricter one than was requested."""
    result: ToolResult | None = None

    @property
    def tool_call_id(self) -> str:
        return self.request.tool_call_id

    @property
    def arguments(self) -> str:
        """Those that it runs with."""
        return self.request.arguments if self.edited is None else self.edited

    @property
    def effective(self) -> ToolCallRequested:
        """The request with the arguments and the class that it runs with."""
        if self.edited is None and self.raised is None:
            return self.request
        return self.request.model_copy(update={"arguments": self.arguments, "effect": self.effect})

    @property
    def effect(self) -> Effect:
        return self.raised or self.request.effect

    @property
    def started(self) -> bool:
        """Whether the current attempt holds a start mark."""
        return 0 < self.attempt == self.started_attempt

    @property
    def waits(self) -> bool:
        """Whether it is open and a person's move."""
        return self.result is None and (self.unsettled is not None or self.gate in ("asked", "expired"))


class Turn(NamedTuple):
    """A model's answer and the calls that it asked for, in order."""

    message: AssistantMessage
    calls: tuple[Call, ...] = ()

    @property
    def open_calls(self) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.result is None)


def evolve_call(call: Call, event: AboutCall) -> Call | None:
    """An open call after an event about it; None for an answer to what is not asked, or a question out of turn."""
    match event:
        case ToolCallStarted():
            return call._replace(started_attempt=event.attempt)
        case ToolCallRetried():
            return call._replace(attempt=event.attempt, unsettled=None)
        case ToolCallUnsettled():
            return call._replace(unsettled=event.why, question=event.event_id)
        case ToolResult():
            return call._replace(result=event)
        case ApprovalRequested() if call.gate not in ("asked", "expired") and not call.started_attempt:
            return call._replace(gate="asked", attempt=0, question=event.event_id, asked=event)
        case ApprovalDecided() if call.gate == "asked" and event.question == call.question:
            if event.decision == "reject":
                return call  # its result is the next event
            return call._replace(gate="approved", edited=call.edited if event.arguments is None else event.arguments)
        case ApprovalExpired() if call.gate == "asked" and event.question == call.question:
            return call._replace(gate="expired")
        case ToolCallSettled() if call.unsettled is not None and event.question == call.question:
            begun = 0 if event.outcome == "not_happened" else call.started_attempt
            return call._replace(unsettled=None, started_attempt=begun)
    return None


def of_class(call: Call, raised: Raised) -> Call:
    """An open call of a stricter class than before: what may run of it by now counts as marked."""
    may_run = raised.effect == "non_idempotent" and call.attempt
    return call._replace(raised=raised.effect, started_attempt=call.attempt if may_run else call.started_attempt)


def resumed(call: Call) -> Call:
    """A call of a run that is resumed: what was asked about it and not answered is to be asked anew."""
    if not call.waits:
        return call
    if call.gate in ("asked", "expired"):
        return call._replace(gate="due", question="")
    return call._replace(unsettled=None)
