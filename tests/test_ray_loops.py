"""Runs that kill what keeps them going, and rivals of a working supervisor: the others are not disturbed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure import Runtime
from perdure.store.events import CancelRequested, RunClaimed
from perdure.store.log import Cancel
from perdure.store.writer import GroupWriter

from .ray_kit import AGENT, Bench, Case, kill, quick, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]
SAMPLES = 18


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("loops")
    async with quick(Runtime(folder / "runs.db", actors=3, concurrency=6), respawns_max=3) as runtime:
        yield Bench(runtime, folder)


async def claims(case: Case) -> list[RunClaimed]:
    return [stored.event for stored in await case.events() if isinstance(stored.event, RunClaimed)]


async def charged(case: Case, count: int) -> None:
    """Wait until that many respawns of a run were charged to it."""

    async def enough() -> bool:
        return sum(claim.charged for claim in await claims(case)) >= count

    await until(enough, f"{count} charged respawns")


async def test_one_that_kills_its_actor_and_one_that_kills_the_supervisor_leave_the_others_whole(bench: Bench) -> None:
    first = await bench.lease("supervisor")
    fatal = await bench.start("die")
    beheading = await bench.start([("put", "behead,act")], [("put", "behead,act")])
    others = [await bench.start([("put", "act")], [("send", "act")]) for _ in range(SAMPLES)]
    for case in (beheading, *others):
        assert (await case.outcome()).status == "completed"
        assert [line.attempt for line in case.ledger()] == [1, 1]
        await case.check_log()
    assert (await bench.lease("supervisor")).pid != first.pid
    outcome = await fatal.outcome()
    assert (outcome.status, outcome.error) == ("failed", "crash_loop")
    assert sum(claim.charged for claim in await claims(fatal)) == bench.runtime.settings.respawns_max


async def test_the_limit_of_respawns_outlives_the_supervisor(bench: Bench) -> None:
    fatal = await bench.start("die")
    await charged(fatal, 2)
    old = await bench.lease("supervisor")
    kill(old.pid)
    await bench.replaced(old)
    outcome = await fatal.outcome()
    assert (outcome.status, outcome.error) == ("failed", "crash_loop")
    made = await claims(fatal)
    assert sum(claim.charged for claim in made) == bench.runtime.settings.respawns_max
    assert len(made) <= 2 + bench.runtime.settings.respawns_max, "at most the start and one recovery are free"
    await fatal.check_log()


async def test_a_run_that_crashes_again_and_again_can_be_cancelled_in_between(bench: Bench) -> None:
    fatal = await bench.start("die")
    await charged(fatal, 1)
    request = Cancel(fatal.run.run_id, CancelRequested(by="test"))
    await GroupWriter(bench.runtime.log).submit(request)
    assert (await fatal.outcome()).status == "cancelled"
    await fatal.check_log()


async def test_rivals_for_the_store_are_refused_in_one_line_and_the_first_goes_on(bench: Bench) -> None:
    case = await bench.start([("put", "wait,act")])
    await case.begun()
    before = await bench.lease("supervisor")
    db = str(bench.folder / "runs.db")
    program = f"import perdure; perdure.run({AGENT!r}, {{'turns': []}}, store={db!r})"
    rivals = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        for arguments in (
            ["-m", "perdure", "up", "--db", db],
            ["-m", "perdure", "run", AGENT, "x", "--db", db],
            ["-c", program],
        )
    ]
    told = [await rival.communicate() for rival in rivals]
    assert [rival.returncode for rival in rivals] == [2, 2, 1]
    for (out, err), lines in zip(told, (1, 1, None), strict=True):
        last = err.decode().splitlines()[-1]
        assert f"another supervisor (process {before.pid} on node" in last
        assert out == b"" and lines in (None, err.count(b"\n"))
    assert (await bench.lease("supervisor")).nonce == before.nonce
    case.go()
    assert (await case.outcome()).status == "completed"
    assert len(await claims(case)) == 1
