"""What a sweep has seen, beside what should have come out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .plan import Plan
from .table import CLASSES, EXPECTED, MEANING, POINTS, Class, Outcome, Point


@dataclass
class Report:
    """Counts of a sweep. `breaches` says what was not as it should be, with its plan."""

    seen: dict[tuple[Class, Point], list[Outcome]] = field(default_factory=dict)
    victims: dict[tuple[Class, Point], Counter[str]] = field(default_factory=dict)
    breaches: list[str] = field(default_factory=list)
    duplicates: int = 0
    missed: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0

    def note(self, plan: Plan, outcome: Outcome, duplicates: int) -> None:
        key = (plan.cls, plan.point)
        self.seen.setdefault(key, []).append(outcome)
        self.victims.setdefault(key, Counter())[plan.victim] += 1
        self.duplicates += duplicates
        expected = EXPECTED[plan.cls][plan.point]
        if duplicates:
            self.breaches.append(f"{plan}: {duplicates} effects were done twice")
        if not expected.allows(outcome):
            self.breaches.append(f"{plan}: {outcome}; expected: {expected}")

    def table(self) -> Iterator[str]:
        for point in POINTS:
            rows = [(cls, self.seen.get((cls, point), [])) for cls in CLASSES]
            if not any(seen for _, seen in rows):
                continue
            yield f"\n{point}: {MEANING[point]}"
            for cls, seen in rows:
                expected = EXPECTED[cls][point]
                good = sum(map(expected.allows, seen))
                killed = ", ".join(
                    f"{kind} {n}" for kind, n in sorted(self.victims.get((cls, point), Counter()).items())
                )
                yield f"  {cls:<25} {good:>3} of {len(seen):<3} {expected}  ({killed})"
        yield ""
        yield from self.breaches

    def json_lines(self) -> Iterator[str]:
        for (cls, point), seen in self.seen.items():
            expected = EXPECTED[cls][point]
            yield json.dumps(
                {
                    "class": cls,
                    "point": point,
                    "expected": vars(expected),
                    "tried": len(seen),
                    "as_expected": sum(map(expected.allows, seen)),
                    "victims": self.victims[cls, point],
                }
            )

    def totals(self) -> dict[str, Any]:
        every = [outcome for outcomes in self.seen.values() for outcome in outcomes]
        healed = Counter(outcome.healed for outcome in every)
        return {
            "crash points tried": len(every),
            "kills": sum(self.kills.values()),
            "kills by process": dict(self.kills),
            "missed and repeated": self.missed,
            "effects doubled": self.duplicates,
            "people asked to approve": sum(outcome.asked == "approval" for outcome in every),
            "people asked whether it happened": sum(outcome.asked == "whether it happened" for outcome in every),
            "settled by probes": healed["probe"],
            "settled by late results": healed["late result"],
            "settled by people": healed["person"],
            "dispatched again": healed["retry"],
            "gone on from the log": healed["replay"],
            "breaches": len(self.breaches),
            "seconds": round(self.took_s),
        }
