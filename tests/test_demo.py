"""The demonstration on real Ray: it kills what it says, and nothing is doubled, missing or left behind."""

from __future__ import annotations

import pytest

from perdure.examples import demo, plan
from perdure.examples.wreckage import KINDS

RUNS = 12


@pytest.mark.ray
async def test_refunds_are_paid_once_while_every_kind_of_process_is_killed() -> None:
    said: list[str] = []
    report = await demo.demonstrate(RUNS, said.append)
    assert report.trouble == [], "\n".join(said)
    assert report.completed == RUNS
    assert {kind: report.killed(kind) > 0 for kind in KINDS} == dict.fromkeys(KINDS, True)
    assert report.made == report.wanted > RUNS
    assert report.respawns > 0


@pytest.mark.parametrize("runs", [12, 20, 60, 100])
def test_every_kind_of_process_is_killed_in_each_round(runs: int) -> None:
    kinds = [hang.target for hang in plan.hangs(runs)] + [kind for _, kind in plan.points(runs)]
    assert {kind: kinds.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, plan.rounds(runs))
    assert all(0 < share < 1 for share, _ in plan.points(runs))
    assert len({hang.run for hang in plan.hangs(runs)}) == 2 * plan.rounds(runs)


def test_refunds_hang_before_and_after_paying_for_each_victim() -> None:
    assert {(hang.target, hang.moment) for hang in plan.hangs(60)} == {
        (target, moment) for target in ("tool worker", "journal") for moment in ("before", "after")
    }
