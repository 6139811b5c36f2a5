"""What has to come out of a crash: one outcome for every class of effect and point, whoever died there."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Final, Literal, get_args

Class = Literal["read_only", "idempotent_write", "non_idempotent, probe", "non_idempotent, no probe"]
Point = Literal[
    "before intent",
    "intent durable",
    "start mark written",
    "effect done",
    "result on its way",
    "result recorded",
    "decision recorded",
    "in an append",
]
Victim = Literal["actor", "tool", "journal", "supervisor"]
Healed = Literal["replay", "retry", "probe", "person", "late result", "any"]
Asked = Literal["nothing", "approval", "whether it happened", "any"]

CLASSES: Final = get_args(Class)
POINTS: Final = get_args(Point)
TOOLS: Final[dict[Class, str]] = {
    "read_only": "read",
    "idempotent_write": "put",
    "non_idempotent, probe": "send",
    "non_idempotent, no probe": "blind",
}
VICTIMS: Final[dict[Point, tuple[Victim, ...]]] = {
    "before intent": ("actor", "journal"),
    "intent durable": ("tool", "journal"),
    "start mark written": ("tool", "journal"),
    "effect done": ("tool", "journal"),
    "result on its way": ("journal",),
    "result recorded": ("actor", "journal"),
    "decision recorded": ("supervisor", "journal"),
    "in an append": ("journal",),
}
"""Who is at a point, and is killed there; a seed says which."""
MEANING: Final[dict[Point, str]] = {
    "before intent": "the model has been asked and has not answered",
    "intent durable": "the call is in the log and its task is there, but has no leave to begin",
    "start mark written": "leave to begin is given, in the log for a non_idempotent call; nothing was done",
    "effect done": "the effect is in the world and the handler has not returned",
    "result on its way": "the handler has returned and the journal has not taken the result",
    "result recorded": "the result is in the log and nobody has acted on it",
    "decision recorded": "a person's approval is in the log and nobody has acted on it",
    "in an append": "the journal is inside of a transaction, with many runs writing",
}


@dataclass(frozen=True)
class Outcome:
    """How a call, and its run, came out. `effects` counts what the world was asked to do, `attempts` those that the
    log opened; a range where it depends on what the call was at when the journal died."""

    status: str
    effects: str
    attempts: str
    asked: Asked
    healed: Healed

    def allows(self, seen: Outcome) -> bool:
        return all(_allows(word, is_) for word, is_ in zip(astuple(self), astuple(seen), strict=True))

    def __str__(self) -> str:
        times = "effect" if self.effects == "1" else "effects"
        attempts = "attempt" if self.attempts == "1" else "attempts"
        return (
            f"{self.status}, {self.effects} {times}, {self.attempts} {attempts}, asked {self.asked}, by {self.healed}"
        )


def _allows(word: str, seen: str) -> bool:
    if word == "any":
        return True
    low, _, high = word.partition("-")
    return int(low) <= int(seen) <= int(high) if high.isdigit() else word == seen


def _out(effects: str, attempts: str, healed: Healed, asked: Asked = "nothing") -> Outcome:
    return Outcome("completed", effects, attempts, asked, healed)


_REPEATED: Final[dict[Point, Outcome]] = {
    "before intent": _out("1", "1", "replay"),
    "intent durable": _out("1", "2", "retry"),
    "start mark written": _out("1", "2", "retry"),
    "effect done": _out("2", "2", "retry"),  # the same key for both: the service does it once
    "result on its way": _out("2", "2", "retry"),
    "result recorded": _out("1", "1", "replay"),
    "decision recorded": _out("1", "1", "replay", "approval"),
    "in an append": _out("1-9", "1-9", "any"),
}
EXPECTED: Final[dict[Class, dict[Point, Outcome]]] = {
    "read_only": _REPEATED,
    "idempotent_write": _REPEATED,
    "non_idempotent, probe": _REPEATED
    | {
        "start mark written": _out("1", "2", "probe"),
        "effect done": _out("1", "1", "probe"),
        "result on its way": _out("1", "1", "late result"),
        "in an append": _out("1", "1-9", "any"),
    },
    "non_idempotent, no probe": _REPEATED
    | {
        "start mark written": _out("1", "2", "person", "whether it happened"),
        "effect done": _out("1", "1", "person", "whether it happened"),
        "result on its way": _out("1", "1", "late result"),
        "in an append": _out("1", "1-9", "any", "any"),
    },
}
