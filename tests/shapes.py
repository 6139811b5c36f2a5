"""Small runs of every kind, as data: what the model says, which tools there are and how those misbehave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from perdure.actors.guards import Limits
from perdure.actors.model import ModelReply, ToolUse
from perdure.actors.tools import Approval, ApprovalAsk, Word
from perdure.store.events import Effect, Usage

Quirk = Literal["", "fails", "dies_once", "dies_once_after", "exits", "exits_after"]
"""How a handler ends. `dies`: its process is gone; `exits`: it raises SystemExit; `after`: once its effect happened."""


Gate = Literal["", "approve", "reject", "edit"]
"""What a person answers to the question whether a call may run; nothing where none is asked."""


@dataclass(frozen=True)
class ToolShape:
    """A tool of a shape. Of one with a policy the first call passes, the second is gated, the third is denied. One
    that is `abandoned` when nobody can tell whether it took effect has no truth to be found. A `dull` one has the same
    result each time."""

    name: str
    effect: Effect
    quirk: Quirk = ""
    probe: bool = False
    gate: Gate = ""
    policy: bool = False
    abandoned: bool = False
    dull: bool = False

    @property
    def approval(self) -> Approval:
        return Approval(_policy if self.policy else "always" if self.gate else "never")


async def _policy(ask: ApprovalAsk) -> Word:
    number: int = ask.arguments["x"]
    return get_args(Word)[number]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Shape:
    """A run: its tools, and the answers of its model in order."""

    name: str
    turns: tuple[ModelReply, ...]
    tools: tuple[ToolShape, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def tool(self, name: str) -> ToolShape:
        """The tool of that name."""
        return next(tool for tool in self.tools if tool.name == name)

    @property
    def may_be_unsettled(self) -> bool:
        """Whether an interruption can leave a question that nobody but a person can answer."""
        return any(tool.effect == "non_idempotent" and not tool.probe for tool in self.tools)

    @property
    def is_gated(self) -> bool:
        """Whether a person is asked before some call runs."""
        return any(tool.gate for tool in self.tools)


def says(text: str) -> ModelReply:
    """A final answer."""
    return ModelReply(text=text, usage=Usage(input_tokens=5, output_tokens=2))


def asks(*names: str, provider_id: str = "") -> ModelReply:
    """A turn that calls these tools in parallel, each with a number of its own."""
    calls = tuple(ToolUse(name=name, arguments={"x": x}, id=provider_id) for x, name in enumerate(names))
    return ModelReply(text="let me see", tool_calls=calls, usage=Usage(input_tokens=3, output_tokens=1))


READ = ToolShape("look", "read_only")
PUT = ToolShape("put", "idempotent_write")
ONCE = ToolShape("pay", "non_idempotent")
PROBED = ToolShape("pay_probed", "non_idempotent", probe=True)
GATED = ToolShape("pay_gated", "non_idempotent", probe=True, gate="approve")
POLICED = ToolShape("put", "idempotent_write", gate="approve", policy=True)


def _one(name: str, tool: ToolShape) -> Shape:
    return Shape(name, (asks(tool.name), says("done")), (tool,))


SHAPES: tuple[Shape, ...] = (
    Shape("no tool", (says("hello"),)),
    _one("a read", READ),
    _one("a write", PUT),
    _one("an effect", ONCE),
    _one("an effect with a probe", PROBED),
    Shape("all classes in parallel", (asks("look", "put", "pay", "pay_probed"), says("ok")), (READ, PUT, ONCE, PROBED)),
    Shape("two effects in parallel", (asks("pay_probed", "pay_probed"), says("ok")), (PROBED,)),
    Shape(
        "several turns",
        (asks("look"), asks("put", "pay_probed"), asks("pay_probed"), says("ok")),
        (READ, PUT, PROBED),
    ),
    Shape("five turns", (*(asks("put"),) * 4, says("ok")), (PUT,)),
    Shape("repeated provider ids", (*(asks("put", "put", provider_id="call_0"),) * 3, says("ok")), (PUT,)),
    _one("a failing read", ToolShape("look", "read_only", "fails")),
    _one("a failing effect", ToolShape("pay", "non_idempotent", "fails", probe=True)),
    Shape("an unknown tool", (asks("look", "nothing"), says("ok")), (READ,)),
    Shape(
        "invalid arguments",
        (ModelReply(tool_calls=(ToolUse(name="look", arguments={"x": "many"}), ToolUse(name="look"))), says("ok")),
        (READ,),
    ),
    _one("a read that exits", ToolShape("look", "read_only", "exits")),
    _one("a write that exits after its effect", ToolShape("put", "idempotent_write", "exits_after")),
    _one("an effect that exits", ToolShape("pay", "non_idempotent", "exits", abandoned=True)),
    _one("an effect that exits afterwards", ToolShape("pay", "non_idempotent", "exits_after")),
    _one("an effect that dies once", ToolShape("pay", "non_idempotent", "dies_once")),
    _one("a probed effect that exits", ToolShape("pay", "non_idempotent", "exits", probe=True)),
    _one("a probed effect that exits afterwards", ToolShape("pay", "non_idempotent", "exits_after", probe=True)),
    _one("a read that dies once", ToolShape("look", "read_only", "dies_once")),
    _one("a write that dies once", ToolShape("put", "idempotent_write", "dies_once_after")),
    _one("a probed effect that dies once", ToolShape("pay", "non_idempotent", "dies_once", probe=True)),
    _one(
        "a probed effect that dies once afterwards", ToolShape("pay", "non_idempotent", "dies_once_after", probe=True)
    ),
    _one("a gated effect", GATED),
    _one("a gated effect with other arguments", ToolShape("pay", "non_idempotent", gate="edit")),
    _one("a rejected effect", ToolShape("pay", "non_idempotent", gate="reject")),
    Shape("gated beside free", (asks("look", "pay_gated", "pay_gated"), says("ok")), (READ, GATED)),
    Shape("a policy for each call", (asks("put", "put", "put"), says("ok")), (POLICED,)),
    Shape("too many turns", (*(asks("look"),) * 3, says("never")), (READ,), Limits(max_turns=2)),
    Shape("a last turn without a word", (asks("put"), ModelReply()), (PUT,), Limits(max_turns=2)),
    Shape(
        "a ceiling on calls",
        (asks("look", "put", "pay_probed"), asks("put", "look"), says("ok")),
        (READ, PUT, PROBED),
        Limits(max_tool_calls=3, max_tool_calls_per_turn=2),
    ),
    Shape("a budget of tokens", (*(asks("put"),) * 4, says("never")), (PUT,), Limits(max_tokens=13)),
    Shape("a loop", (*(asks("look"),) * 5, says("never")), (ToolShape("look", "read_only", dull=True),)),
    Shape(
        "a loop that is left",
        (*(asks("put"),) * 3, asks("look"), says("ok")),
        (ToolShape("put", "idempotent_write", dull=True), READ),
    ),
)
