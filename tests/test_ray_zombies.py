"""Processes that are frozen, replaced and thawed again, on real Ray: nothing of theirs counts twice.

Some of the scenes that `benchmarks/zombies.py` plays at length.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.benchmarks.crashes.scenes import SCENES, Scene
from perdure.benchmarks.crashes.stage import Stage, runtime_for
from perdure.benchmarks.crashes.thaw import stale, thawed
from perdure.store.events import RunClaimed, Stored, TurnStarted

pytestmark = pytest.mark.ray
CHOSEN = (
    "actor, during a tool, thawed before it is killed",
    "actor, during an append",
    "tool, in a child",
    "journal, during an append",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("zombies")
    async with runtime_for(folder, hung_s=2.0, lease_s=1.5) as runtime:
        stage = Stage(runtime, folder)
        yield stage
        stage.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("scene", [scene for scene in SCENES if scene.name in CHOSEN], ids=lambda scene: scene.name)
async def test_who_was_frozen_and_thaws_does_nothing_twice(stage: Stage, scene: Scene) -> None:
    case = await thawed(stage, scene, 0)
    assert [case.acts(call_id) for call_id in case.plan.targets] == [1] * len(case.plan.targets)


def test_every_process_is_frozen_in_every_phase() -> None:
    for victim in ("actor", "tool", "journal", "supervisor"):
        phases = " ".join(scene.phase for scene in SCENES if scene.victim == victim)
        assert all(phase in phases for phase in ("a tool", "a decision", "an append"))
        assert "a model call" in phases or victim == "tool"


def test_an_append_of_a_replaced_owner_is_noticed() -> None:
    claims = [RunClaimed(epoch=epoch, owner="s", reason="start") for epoch in (1, 2)]
    events = [Stored(n, 0.0, n, claim) for n, claim in enumerate(claims, 1)]
    stale([*events, Stored(3, 0.0, 2, TurnStarted(turn_index=0))])
    with pytest.raises(AssertionError, match="epoch 1"):
        stale([*events, Stored(3, 0.0, 1, TurnStarted(turn_index=0))])
