"""A crash at every point of every shape: before and after each commit, and around each effect.

Each point is a run of its own. It must end like the run without a crash, having shown the model the same and having
done nothing twice. What nobody can tell but a person is asked, and the person tells the truth.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import pytest

from perdure.store.events import ApprovalDecided, Settlement, ToolCallSettled
from perdure.store.log import EventLog
from perdure.store.sql import open_log

from .harness import Fault, Victims, World
from .shapes import SHAPES, Shape
from .sweep import Report, check, play

by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def points(clean: Report, who: Literal["all", "owner", "journal"] = "all") -> Iterator[Fault]:
    """Every fault that can strike a run like this one."""
    marked = any(tool.effect == "non_idempotent" for tool in clean.world.shape.tools)
    fates: tuple[Victims, ...] = get_args(Victims) if marked else ("still", "effect")
    for victims in fates if who != "owner" else fates[:1]:  # the tools do not notice the death of an owner
        for n in range(1, clean.world.commits + 1):
            yield Fault("before", n, victims, who)
            yield Fault("after", n, victims, who)
        for n in range(1, clean.world.steps + 1):
            yield Fault("step", n, victims, who)


@by_shape
async def test_a_run_without_faults_keeps_every_promise(shape: Shape, tmp_path: Path) -> None:
    report = await play(shape, tmp_path)
    check(report, report)
    assert report.lives == 1


async def test_between_them_the_shapes_see_every_answer_of_a_person(tmp_path: Path) -> None:
    given: set[tuple[str, bool]] = set()
    for shape in SHAPES:
        for stored in (await play(shape, tmp_path)).events:
            match stored.event:
                case ApprovalDecided():
                    given.add((stored.event.decision, stored.event.arguments is not None))
                case ToolCallSettled():
                    given.add((stored.event.outcome, False))
    settled = {(outcome, False) for outcome in get_args(Settlement)}
    assert given == {*settled, ("approve", False), ("approve", True), ("reject", False)}


async def sweep(shape: Shape, folder: Path, faults: Iterator[Fault], clean: Report) -> list[Report]:
    """Try every fault, each in a run of its own, and check each against the run without."""
    reports = []
    for fault in faults:
        report = await play(shape, folder, fault)
        try:
            assert report.world.fired == 1, "the fault did not strike"
            check(report, clean)
        except AssertionError as error:
            raise AssertionError(f"{fault}: {error}") from error
        reports.append(report)
    print(f"{shape.name}: {len(reports)} points")
    return reports


@by_shape
async def test_a_run_whose_processes_all_die_at_any_point_ends_as_if_nothing_had_happened(
    shape: Shape, tmp_path: Path
) -> None:
    clean = await play(shape, tmp_path)
    reports = await sweep(shape, tmp_path, points(clean), clean)
    assert len(reports) >= 2 * clean.world.commits
    assert all(report.lives == 2 for report in reports)


@by_shape
async def test_tools_outlive_their_run_actor_and_are_adopted_by_the_next(shape: Shape, tmp_path: Path) -> None:
    clean = await play(shape, tmp_path)
    reports = await sweep(shape, tmp_path, points(clean, "owner"), clean)
    assert any(report.lives == 2 for report in reports)
    for report in reports:
        assert report.row.error == clean.row.error, "the journal was there all the time: nothing was unclear"
        if not any(tool.quirk for tool in shape.tools):
            assert sorted(report.world.dispatched) == sorted(clean.world.dispatched), "a task was started twice"


@by_shape
async def test_a_run_outlives_its_journal(shape: Shape, tmp_path: Path) -> None:
    clean = await play(shape, tmp_path)
    reports = await sweep(shape, tmp_path, points(clean, "journal"), clean)
    assert any(report.lives == 1 for report in reports), "no owner lived on"


@by_shape
async def test_a_second_crash_during_the_recovery_changes_nothing(shape: Shape, tmp_path: Path) -> None:
    seeded = random.Random(shape.name)
    clean = await play(shape, tmp_path)
    both = 0
    every = list(points(clean))
    for first in seeded.sample(every, k=min(12, len(every))):
        second = Fault(seeded.choice(("before", "after")), seeded.randint(1, 3), seeded.choice(get_args(Victims)))
        report = await play(shape, tmp_path, first, second)
        check(report, clean)
        both += report.world.fired == 2
    assert both, "no second crash struck"


@by_shape
async def test_the_log_in_sql_survives_the_same_crashes(shape: Shape, tmp_path: Path) -> None:
    async def in_sql(world: World) -> EventLog:
        return await open_log(tmp_path / f"{next(numbers)}.db", clock=world.clock)

    numbers = itertools.count()
    clean = await play(shape, tmp_path, open_log=in_sql)
    faults = random.Random(shape.name).sample(list(points(clean)), k=6)
    for fault in faults:
        report = await play(shape, tmp_path, fault, open_log=in_sql)
        assert report.world.fired == 1
        check(report, clean)
