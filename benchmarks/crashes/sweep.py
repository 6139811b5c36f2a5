"""All plans of some classes, points and seeds, in waves of those that die together."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from .case import Case
from .plan import Plan, draw
from .report import Report
from .stage import Stage
from .strike import Missed, play
from .table import VICTIMS, Class, Point

TRIES: Final = 5


def waves(classes: Sequence[Class], points: Iterable[Point], seeds: Sequence[int], side: int) -> Iterator[list[Plan]]:
    """Plans that are struck side by side: of one point and victim; in an append, all of one seed."""
    for point in points:
        plans = [draw(cls, point, seed) for seed in seeds for cls in classes]
        if point == "in an append":
            for seed in seeds:
                yield [plan for plan in plans for _ in range(side // 2) if plan.seed == seed]
            continue
        for victim in VICTIMS[point]:
            theirs = [plan for plan in plans if plan.victim == victim]
            yield from (theirs[start : start + side] for start in range(0, len(theirs), side))


async def sweep(
    stage: Stage, report: Report, classes: Sequence[Class], points: Iterable[Point], seeds: Sequence[int], side: int
) -> None:
    """Play every wave and note what came out; one that was missed is played again."""
    for wave in waves(classes, points, seeds, side):
        await strike_and_note(stage, report, wave)


async def strike_and_note(stage: Stage, report: Report, wave: Sequence[Plan]) -> None:
    """Play one wave and note what came out of each run."""
    try:
        cases = await _struck(stage, report, wave)
        for case in cases:
            report.note(case.plan, await case.outcome(), case.duplicates())
    except AssertionError as error:
        report.breaches.append(f"{wave[0]} and {len(wave) - 1} more: {error}")
        print(f"breach: {report.breaches[-1]}", file=sys.stderr)
    else:
        print(f"{wave[0].point}, {wave[0].victim}: {len(wave)} struck", file=sys.stderr)


async def _struck(stage: Stage, report: Report, wave: Sequence[Plan]) -> list[Case]:
    """Play a wave until it was struck. Raises AssertionError when it never is, or does not come out."""
    for _ in range(TRIES):
        try:
            return await play(stage, wave)
        except Missed as missed:
            report.missed += 1
            print(f"missed: {missed}", file=sys.stderr)
    raise AssertionError(f"missed {TRIES} times")
