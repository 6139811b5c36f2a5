"""Two supervisors of one store: the first is frozen, another Runtime takes over with a cluster of its own, and the
first one thaws while that is at work."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Final

from perdure.actors.kernel import process_started
from perdure.benchmarks.processes import processes
from perdure.store.events import ToolCallUnsettled
from perdure.store.rows import Lease

from .case import Case
from .freeze import in_place
from .plan import Plan
from .scenes import PROBED
from .stage import Stage, runtime_for, until
from .thaw import stale

RUNS: Final = 3
RIVAL: Final = Path(__file__).with_name("rival.py")


async def takeover(folder: Path, seed: int) -> None:
    """Play it, in a store of its own. Raises AssertionError when anything is not as it has to be after it."""
    chance = random.Random(seed)
    plan = Plan(PROBED, "before intent", seed, "supervisor", (("send",), ("send",), ("send",)), 1, 0, 0.0)
    async with runtime_for(folder) as runtime:
        stage = Stage(runtime, folder)
        cases = [Case(stage, plan) for _ in range(RUNS)]
        await runtime.launch_many(stage.loaded, [case.request() for case in cases])
        for case in cases:
            await in_place(case)
        first = await stage.working("supervisor")
        await stage.stop_between_writes(first.pid)
        rival = await asyncio.create_subprocess_exec(
            sys.executable, str(RIVAL), str(folder), *(case.run_id for case in cases)
        )
        second = await stage.replaced(first)
        await asyncio.sleep(chance.uniform(0, 1.0))
        stage.thaw(first.pid)
        for case in cases:
            case.go("model")
        assert await asyncio.wait_for(rival.wait(), 120) == 0, "the second Runtime did not see the runs to their ends"
        for case in cases:
            stored = await runtime.log.read(case.run_id)
            outcome = await case.outcome()
            assert outcome.status == "completed", f"{case.run_id}: {outcome}"
            assert not case.duplicates() and [case.acts(f"t{turn}c0") for turn in range(3)] == [1, 1, 1], "effects"
            assert not any(isinstance(one.event, ToolCallUnsettled) for one in stored), "a probe could tell"
            stale(stored)
        await _gave_up(stage, first, second)
        stage.close()


async def _gave_up(stage: Stage, first: Lease, second: Lease) -> None:
    """The first supervisor has lost its lease for good and none of its attempts is left."""
    lease = await stage.runtime.log.lease("supervisor")
    assert lease is None or (lease.pid, lease.nonce) != (first.pid, first.nonce), "the first supervisor is back"
    assert not await asyncio.to_thread(processes, "tool"), "attempts were left behind"

    async def gone() -> bool:
        return process_started(second.pid) != second.pid_started

    await until(gone, "the end of the second supervisor", 20)
