"""kill -9 at the points of a call, on real Ray: for every class of effect what the table of outcomes says.

A few seeds of what `benchmarks/crash_points.py` does at length.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.benchmarks.crashes.plan import draw
from perdure.benchmarks.crashes.report import Report
from perdure.benchmarks.crashes.stage import Stage, runtime_for
from perdure.benchmarks.crashes.sweep import strike_and_note
from perdure.benchmarks.crashes.table import CLASSES, EXPECTED, POINTS, VICTIMS, Outcome, Point, Victim

pytestmark = pytest.mark.ray


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("points")
    async with runtime_for(folder) as runtime:
        stage = Stage(runtime, folder)
        yield stage
        stage.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("before intent", "actor"),
        ("intent durable", "journal"),
        ("start mark written", "journal"),
        ("result on its way", "journal"),
        ("result recorded", "actor"),
        ("decision recorded", "supervisor"),
        ("decision recorded", "journal"),
        ("in an append", "journal"),
    ],
)
async def test_a_kill_at_a_point_has_the_outcome_of_its_class(stage: Stage, point: Point, victim: Victim) -> None:
    plans = [draw(cls, point, seed) for cls in CLASSES for seed in range(2)]
    wave = [plan for plan in plans if plan.victim == victim] * (2 if point == "in an append" else 1)
    report = Report()
    sent = sum(stage.sent.values())
    await strike_and_note(stage, report, wave)
    assert report.breaches == []
    assert report.duplicates == 0
    assert {cls for cls, _ in report.seen} == set(CLASSES)
    assert sum(stage.sent.values()) > sent


def test_every_class_and_point_has_one_outcome_and_both_victims_get_their_seeds() -> None:
    assert all(EXPECTED[cls].keys() == set(POINTS) for cls in CLASSES)
    for point in POINTS:
        for cls in CLASSES:
            assert {draw(cls, point, seed).victim for seed in range(2)} == set(VICTIMS[point])


def test_an_outcome_allows_itself_and_what_is_in_its_range_only() -> None:
    seen = Outcome("completed", "2", "3", "nothing", "retry")
    assert Outcome("completed", "1-9", "1-9", "any", "any").allows(seen)
    assert Outcome("completed", "2", "3", "nothing", "retry").allows(seen)
    for other in (
        Outcome("failed", "2", "3", "nothing", "retry"),
        Outcome("completed", "1", "3", "nothing", "retry"),
        Outcome("completed", "2", "1-2", "nothing", "retry"),
        Outcome("completed", "2", "3", "approval", "retry"),
        Outcome("completed", "2", "3", "nothing", "probe"),
    ):
        assert not other.allows(seen)
