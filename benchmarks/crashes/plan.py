"""What a seed stands for: the calls of a run, where it is struck, and who dies there."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from .table import CLASSES, TOOLS, VICTIMS, Class, Point, Victim

HOLDS: Final[dict[Point, str]] = {
    "intent durable": "bound",
    "start mark written": "begun",
    "effect done": "acted",
    "result on its way": "acted",
    "result recorded": "acted",
}
"""Where the tool waits, by point; at the others it does not."""


@dataclass(frozen=True)
class Plan:
    """What a seed stands for. `targets` are the calls that are looked at."""

    cls: Class
    point: Point
    seed: int
    victim: Victim
    turns: tuple[tuple[str, ...], ...]
    """Names of the tools, by turn."""
    turn: int
    """Of the target."""
    position: int
    delay_s: float
    """Between coming to the point and the kill."""
    place: str = ""
    """Where the tool waits, if not where its point says."""

    @property
    def waits_at(self) -> str:
        return self.place or HOLDS.get(self.point, "model")

    @property
    def targets(self) -> tuple[str, ...]:
        if self.point == "in an append":
            return tuple(f"t{turn}c{n}" for turn, names in enumerate(self.turns) for n in range(len(names)))
        return (f"t{self.turn}c{self.position}",)

    @property
    def hold(self) -> int:
        """The turn in which the model waits, -1 for none."""
        return {"before intent": self.turn, "result recorded": self.turn + 1}.get(self.point, -1)

    def __str__(self) -> str:
        return f"{self.cls}, {self.point}, seed {self.seed}, {self.victim} killed"


def draw(cls: Class, point: Point, seed: int) -> Plan:
    """The plan of a seed; the same for ever."""
    chance = random.Random(f"{cls}/{point}/{seed}")
    victim = VICTIMS[point][(seed + CLASSES.index(cls)) % len(VICTIMS[point])]
    name = TOOLS[cls]
    if point == "in an append":
        turns = [[name] * chance.randint(1, 2) for _ in range(chance.randint(3, 5))]
        return Plan(cls, point, seed, victim, tuple(map(tuple, turns)), 0, 0, chance.uniform(0, 0.3))
    before = [[chance.choice(("read", "put", "send"))] for _ in range(chance.randint(0, 1))]
    target = [chance.choice(("read", "put")) for _ in range(chance.randint(0, 2))]
    position = chance.randint(0, len(target))
    target.insert(position, f"ask_{name}" if point == "decision recorded" else name)
    after = [["send"] for _ in range(chance.randint(0, 1))]
    turns = [*before, target, *after]
    return Plan(cls, point, seed, victim, tuple(map(tuple, turns)), len(before), position, chance.uniform(0, 0.1))
