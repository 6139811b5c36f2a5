"""What can happen to a run: one frozen model per event, one union, one strict JSON codec.

Events are facts and never change: a new meaning is a new name. Every event carries `v`, the version of its own
form, and `event_id`, by which a repeated append is recognised. Text in, text out: no pickle, and nothing in an
event names code to run except the agent reference of `run_created`.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from .errors import CorruptLog
from .event_base import AgentRef as AgentRef
from .event_base import BaseEvent
from .event_base import Decision as Decision
from .event_base import Effect as Effect
from .event_base import Fate as Fate
from .event_base import Machine as Machine
from .event_base import Raised as Raised
from .event_base import ResultSource as ResultSource
from .event_base import Settlement as Settlement
from .event_base import Usage as Usage
from .event_base import canonical as canonical


class RunCreated(BaseEvent):
    """A run exists. `config` is the snapshot of the agent's settings that the run obeys from now on."""

    type: Literal["run_created"] = "run_created"
    agent: AgentRef
    input: JsonValue
    config: dict[str, JsonValue] = Field(default_factory=dict)
    batch: str | None = None
    budget: str | None = None
    """The name of the budget that it shares with others."""
    sample: str | None = None
    correlation_id: str | None = None
    priority: int = 0
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class RunClaimed(BaseEvent):
    """A supervisor took the run over. `charged` counts towards the restart limit."""

    type: Literal["run_claimed"] = "run_claimed"
    epoch: int
    owner: str
    reason: Literal["start", "respawn", "hung", "node_lost", "recovery", "decision"]
    charged: bool = False


class CodeChanged(BaseEvent):
    """The owner's code of the agent is another than the log has known so far: `digest` in the place of `was`. `tools`
    are what `config` of run_created says of them, as they are now; `raised` are open calls, by id."""

    type: Literal["code_changed"] = "code_changed"
    was: str
    digest: str
    tools: dict[str, JsonValue]
    raised: dict[str, Raised] = Field(default_factory=dict)


class NoticeInjected(BaseEvent):
    """What the model is told before this turn, beside the conversation. The newest one of a turn counts."""

    type: Literal["notice_injected"] = "notice_injected"
    turn_index: int
    text: str


class TurnStarted(BaseEvent):
    type: Literal["turn_started"] = "turn_started"
    turn_index: int


class BudgetReserved(BaseEvent):
    """The most that the model call which follows can take of the budget that the run shares; its answer is cut to
    `output_tokens`. `cost` is in US dollars, None where the prices of its model are not known."""

    type: Literal["budget_reserved"] = "budget_reserved"
    turn_index: int
    prompt_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    cost: Decimal | None = Field(default=None, ge=0)


class BudgetReleased(BaseEvent):
    """The model call was not made, or its provider did not take it: it has cost nothing."""

    type: Literal["budget_released"] = "budget_released"
    turn_index: int


class AssistantDelta(BaseEvent):
    """A piece of an answer that is being received, from character `offset` of its text on; at 0 another model call
    begins. `usage` is what the call has taken as far as its model has told, `complete` if that is all of it."""

    type: Literal["assistant_delta"] = "assistant_delta"
    turn_index: int
    offset: int = Field(ge=0)
    text: str
    usage: Usage | None = None
    complete: bool = False


class AssistantInterrupted(BaseEvent):
    """The model call whose answer is in the log so far was given up, or died with its process: what it has cost."""

    type: Literal["assistant_interrupted"] = "assistant_interrupted"
    turn_index: int
    usage: Usage
    estimated: bool


class AssistantMessage(BaseEvent):
    """The model's answer. Its tool calls follow as tool_call_requested in the same append. `native` is the model's own,
    which goes back to it as it is."""

    type: Literal["assistant_message"] = "assistant_message"
    turn_index: int
    text: str
    stop_reason: str
    usage: Usage = Usage()
    native: JsonValue | None = None
    cost: Decimal | None = Field(default=None, ge=0)
    """US dollars that the call is charged with in the budget that its run shares."""


class ToolCallRequested(BaseEvent):
    """The intent: durable before anything executes. `arguments` is canonical JSON text."""

    type: Literal["tool_call_requested"] = "tool_call_requested"
    turn_index: int
    tool_call_id: str
    provider_id: str
    name: str
    arguments: str
    effect: Effect
    idempotency_key: str


class ToolCallStarted(BaseEvent):
    """The start mark of a non_idempotent attempt: from here on it may act, until `hold_s` after the commit."""

    type: Literal["tool_call_started"] = "tool_call_started"
    tool_call_id: str
    attempt: int
    nonce: str
    node: str
    boot_id: str
    pid: int
    pid_started: float
    lock: str
    hold_s: float


class ToolCallRetried(BaseEvent):
    """The call is dispatched again; `attempt` is the new attempt's number. Of the attempt before, as far as it was
    heard of: `node` and `pid` are its process, `ran_s` is how long before its end it had begun."""

    type: Literal["tool_call_retried"] = "tool_call_retried"
    tool_call_id: str
    attempt: int
    reason: str
    node: str = ""
    pid: int = 0
    ran_s: float | None = None


class ToolCallProbed(BaseEvent):
    """The tool's probe was asked what an attempt did, which had ended as `end` says. It changes no state. `why` goes
    with its answer, or says why there is none; `node`, `pid` and `took_s` are of the probe."""

    type: Literal["tool_call_probed"] = "tool_call_probed"
    tool_call_id: str
    attempt: int
    end: str
    answer: Literal["happened", "did_not_happen", "unknown"]
    why: str = ""
    node: str = ""
    pid: int = 0
    took_s: float | None = None


class ToolCallUnsettled(BaseEvent):
    """It is unknown whether this attempt's effect happened, and no probe could tell: a person is asked. The event's
    id names the question."""

    type: Literal["tool_call_unsettled"] = "tool_call_unsettled"
    tool_call_id: str
    attempt: int
    why: str


class ApprovalRequested(BaseEvent):
    """A person is asked whether this call may run; until then nothing of it can begin. The event's id names the
    question. `digest` is of the exact arguments and the tool's schema. `timeout_s` counts from the commit on the
    store's clock, None for ever; then `default` decides or, without one, the run times out."""

    type: Literal["approval_requested"] = "approval_requested"
    tool_call_id: str
    name: str
    arguments: str
    effect: Effect
    digest: str
    arguments_schema: dict[str, JsonValue]
    """JSON schema of the arguments, to which edited ones are held."""
    reason: str = ""
    timeout_s: float | None = None
    default: Decision | None = None


class ApprovalDecided(BaseEvent):
    """The one answer to a question; it is used once. `arguments` are the edited ones, None where they stay."""

    type: Literal["approval_decided"] = "approval_decided"
    tool_call_id: str
    question: str
    digest: str
    decision: Decision
    by: str
    reason: str = ""
    arguments: str | None = None


class ApprovalExpired(BaseEvent):
    """A question's deadline has passed. Beside running calls it is only noted; then the run times out."""

    type: Literal["approval_expired"] = "approval_expired"
    tool_call_id: str
    question: str


class ToolCallSettled(BaseEvent):
    """A person says what became of an attempt. `happened` and `abandon` are followed by the call's result in the same
    append; `not_happened` withdraws its start mark, and leaves the call to be dispatched as a new attempt."""

    type: Literal["tool_call_settled"] = "tool_call_settled"
    tool_call_id: str
    attempt: int
    question: str
    outcome: Settlement
    by: str
    reason: str = ""


class ToolResult(BaseEvent):
    """The one result of a call. `content` is JSON text. Where an attempt reported it: `node` and `pid` are its process,
    `took_s` is how long its handler ran. `fate` is of a call that was closed because its run is cancelled."""

    type: Literal["tool_result"] = "tool_result"
    tool_call_id: str
    attempt: int
    content: str
    is_error: bool = False
    source: ResultSource = "tool"
    node: str = ""
    pid: int = 0
    took_s: float | None = None
    fate: Fate | None = None


class ToolEvidence(BaseEvent):
    """What an attempt reported too late to count as the call's result. It changes no state."""

    type: Literal["tool_evidence"] = "tool_evidence"
    tool_call_id: str
    attempt: int
    content: str
    is_error: bool
    why: str


class CancelRequested(BaseEvent):
    type: Literal["cancel_requested"] = "cancel_requested"
    by: str
    reason: str = ""


class RunCompleted(BaseEvent):
    type: Literal["run_completed"] = "run_completed"
    output: JsonValue
    stop_reason: str


class RunFailed(BaseEvent):
    """`code` is for programs, `message` for people; `tool_call_id` names the call that is to blame, if one is."""

    type: Literal["run_failed"] = "run_failed"
    code: str
    message: str
    phase: str
    tool_call_id: str | None = None


class RunCancelled(BaseEvent):
    type: Literal["run_cancelled"] = "run_cancelled"
    reason: str


class ProcessesChecked(BaseEvent):
    """All `asked` machines were looked at for processes that a cancelled run has started. `machines` are those where
    its attempts ran, as far as that is known, or where a process is left; `gone` are nodes of attempts that could not
    be asked."""

    type: Literal["processes_checked"] = "processes_checked"
    asked: int
    machines: tuple[Machine, ...]
    gone: tuple[str, ...] = ()


class RunTimedOut(BaseEvent):
    """Nobody decided in time. Calls that wait stay open: a resumed run asks anew."""

    type: Literal["run_timed_out"] = "run_timed_out"
    reason: str
    tool_call_id: str | None = None


class RunRequeued(BaseEvent):
    """A run that has ended goes on. `limits` are those that are raised or lifted from here on."""

    type: Literal["run_requeued"] = "run_requeued"
    by: str
    limits: dict[str, JsonValue] | None = None


Event = (
    RunCreated
    | RunClaimed
    | CodeChanged
    | NoticeInjected
    | TurnStarted
    | BudgetReserved
    | BudgetReleased
    | AssistantDelta
    | AssistantInterrupted
    | AssistantMessage
    | ToolCallRequested
    | ToolCallStarted
    | ToolCallRetried
    | ToolCallProbed
    | ToolCallUnsettled
    | ToolCallSettled
    | ApprovalRequested
    | ApprovalDecided
    | ApprovalExpired
    | ToolResult
    | ToolEvidence
    | CancelRequested
    | RunCompleted
    | RunFailed
    | RunCancelled
    | ProcessesChecked
    | RunTimedOut
    | RunRequeued
)

STRICTNESS: Final[tuple[Effect, ...]] = ("read_only", "idempotent_write", "non_idempotent")
"""The effect classes, the strictest last."""

_adapter: Final[TypeAdapter[Event]] = TypeAdapter(
    Annotated[Event, Field(discriminator="type")], config=ConfigDict(defer_build=True)
)


@dataclass(frozen=True, slots=True)
class Stored:
    """An event in its place: `seq` counts from 1 without gaps, `at` is the store's clock in seconds."""

    seq: int
    at: float
    epoch: int
    event: Event

    def __reduce__(self) -> tuple[Any, ...]:
        return _stored, (self.seq, self.at, self.epoch, encode(self.event))


def _stored(seq: int, at: float, epoch: int, text: str) -> Stored:
    return Stored(seq, at, epoch, decode(text))


def encode(event: Event) -> str:
    """The event as JSON text. Raises ValueError for text that is not valid Unicode."""
    return event.model_dump_json()


def decode(text: str | bytes) -> Event:
    """The event of a JSON text. Raises CorruptLog."""
    try:
        return _adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptLog(f"an event cannot be read ({where}: {first['msg']}): {text[:120]!r}") from error
