"""The scenes: which process is frozen in which phase, and what has to become of it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

from . import freeze
from .case import Case
from .plan import Plan
from .stage import Stage
from .table import Class, Point, Victim

Fate = Literal["killed", "goes on"]
PROBED: Final[Class] = "non_idempotent, probe"


@dataclass(frozen=True)
class Scene:
    """A process and a phase. `play` freezes and thaws; it returns the process that it froze.

    turns, point, place: what the run does and where it waits, as in a Plan. effects, attempts: of its first call.
    """

    victim: Victim
    phase: str
    fate: Fate
    point: Point
    turns: tuple[tuple[str, ...], ...]
    play: Callable[[Stage, Case, random.Random], Awaitable[int]]
    effects: str = "1"
    attempts: str = "1"
    place: str = ""

    @property
    def name(self) -> str:
        return f"{self.victim}, {self.phase}"

    def plan(self, seed: int) -> Plan:
        return Plan(PROBED, self.point, seed, self.victim, self.turns, 0, 0, 0.0, self.place)


_MODEL: Point = "before intent"
_TOOL: Point = "start mark written"
_BOUND: Point = "intent durable"
_FREE: Point = "in an append"
_GATED: Point = "decision recorded"
_SENDS, _ASKED = (("send",), ("send",)), (("ask_send",), ("send",))
_BOTH = (("send", "ask_put"), ("send",))
_MANY = (("send", "send"),) * 18

SCENES: Final[tuple[Scene, ...]] = (
    Scene("actor", "during a model call", "killed", _MODEL, _SENDS, freeze.actor),
    Scene(
        "actor", "during a model call, thawed before it is killed", "killed", _MODEL, _SENDS, freeze.actor_thawed_early
    ),
    Scene("actor", "during a tool", "killed", _TOOL, _SENDS, freeze.actor),
    Scene("actor", "during a tool, thawed before it is killed", "killed", _TOOL, _SENDS, freeze.actor_thawed_early),
    Scene("actor", "at a decision", "killed", _TOOL, _BOTH, freeze.actor_at_a_decision),
    Scene("actor", "during an append", "killed", _MODEL, _SENDS, freeze.actor_in_an_append),
    Scene("tool", "before its mark", "goes on", _BOUND, _SENDS, freeze.tool),
    Scene("tool", "during a tool", "goes on", _TOOL, _SENDS, freeze.tool),
    Scene("tool", "before its mark, the journal dies", "killed", _BOUND, _SENDS, freeze.tool_superseded, attempts="2"),
    Scene("tool", "during a tool, the journal dies", "killed", _TOOL, _SENDS, freeze.tool_superseded, attempts="1-2"),
    Scene("tool", "in a child", "killed", _TOOL, _SENDS, freeze.tool_outlived_by_a_child, attempts="2", place="forked"),
    Scene("tool", "at a decision", "goes on", _TOOL, _BOTH, freeze.tool_at_a_decision),
    Scene("tool", "during an append", "goes on", _BOUND, _SENDS, freeze.tool_in_an_append),
    Scene("journal", "during a model call", "killed", _MODEL, _SENDS, freeze.lease_holder),
    Scene("journal", "during a model call, thawed soon", "goes on", _MODEL, _SENDS, freeze.lease_holder_thawed_early),
    Scene("journal", "during a tool", "killed", _TOOL, _SENDS, freeze.lease_holder),
    Scene("journal", "at a decision", "killed", _GATED, _ASKED, freeze.lease_holder_at_a_decision),
    Scene("journal", "during an append", "killed", _FREE, _MANY, freeze.lease_holder_in_an_append, attempts="1-9"),
    Scene("supervisor", "during a model call", "goes on", _MODEL, _SENDS, freeze.lease_holder),
    Scene("supervisor", "during a tool", "goes on", _TOOL, _SENDS, freeze.lease_holder),
    Scene("supervisor", "at a decision", "goes on", _GATED, _ASKED, freeze.lease_holder_at_a_decision),
    Scene("supervisor", "during an append", "goes on", _MODEL, _SENDS, freeze.lease_holder_in_an_append),
)
