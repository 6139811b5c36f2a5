"""One run whose actor is killed again and again, and one run that two drivers create at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import JsonValue

from perdure import Runtime
from perdure.client.launching import Request, create
from perdure.store.events import RunClaimed
from perdure.store.sql import open_log
from perdure.store.writer import GroupWriter

from .ray_kit import Bench, Case, kill, quick

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]
KILLS = 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("respawns")
    async with quick(Runtime(folder / "runs.db", actors=2), respawns_max=10 * KILLS) as runtime:
        yield Bench(runtime, folder)


async def test_every_kill_of_a_runs_actor_is_followed_by_one_new_owner_and_no_second_effect(bench: Bench) -> None:
    case = await bench.start([("put", "act"), ("send", "wait,act")], [("send", "act")])
    await case.acted()
    owners = []
    for _ in range(KILLS):
        pid, _ = await bench.holder(case.run.run_id)
        owners.append(pid)
        kill(pid)
    case.go()
    assert (await case.outcome()).status == "completed"
    assert len(set(owners)) == KILLS, "an actor was found to drive the run after its death"
    epochs = [stored.event.epoch for stored in await case.events() if isinstance(stored.event, RunClaimed)]
    assert epochs == list(range(1, KILLS + 2))
    assert Counter(line.call for line in case.ledger()) == {"t0c0": 1, "t0c1": 1, "t1c0": 1}
    assert Counter(line.call for line in case.ledger("begin")) == {"t0c0": 1, "t0c1": 1, "t1c0": 1}
    await case.check_log()


async def test_a_run_that_two_drivers_create_in_one_instant_is_one_run(bench: Bench, tmp_path: Path) -> None:
    other = await open_log(bench.folder / "runs.db")
    writer = GroupWriter(other)
    asked: JsonValue = {"turns": [[{"name": "send", "arguments": {"do": "act"}}]]}
    requests = [Request(asked, metadata={"dir": str(tmp_path)}) for _ in range(10)]
    creates = [create(bench.loaded, request) for request in requests]
    again = [create(bench.loaded, request) for request in requests]
    runs, _ = await asyncio.gather(bench.runtime.launch_many(bench.loaded, requests), writer.submit_all(again))
    await bench.runtime.create(creates)
    for run in runs:
        case = Case(bench, tmp_path, run)
        assert (await case.outcome()).status == "completed"
        assert len(case.ledger("begin")) == len(case.ledger()) == 1
        kinds = Counter(await case.kinds())
        assert (kinds["run_created"], kinds["run_claimed"]) == (1, 1)
        await case.check_log()
    await other.close()
