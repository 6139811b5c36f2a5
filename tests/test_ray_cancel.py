"""Cancels on real Ray: of model calls, around completion, behind a full supervisor, in the instant of the start."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from perdure import Run, Runtime
from perdure.actors.machine import fold
from perdure.actors.stopping import GRACE_S
from perdure.client.cancel import Cancelled
from perdure.client.launching import Request, check_agent
from perdure.store.errors import NotFound
from perdure.store.states import Status

from .ray_kit import until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

AGENT = f"{Path(__file__).parent / 'agents' / 'timed.py'}:agent"
SEED = 4
LIVE = 8
FAR_S = 3600.0
ENDED = ["run_created", "cancel_requested", "run_cancelled"]


@dataclass
class Floor:
    """A Runtime, and runs that end when they are told to."""

    runtime: Runtime
    folder: Path

    def __post_init__(self) -> None:
        self.loaded = check_agent(AGENT)

    async def launch(self, *in_s: float, pays: bool = False) -> list[Run]:
        """Runs whose model answers so many seconds from now."""
        now, about = time.time(), {"dir": str(self.folder)}
        requests = [Request({"at": now + s, "pays": pays}, metadata=dict(about)) for s in in_s]
        return await self.runtime.launch_many(self.loaded, requests)

    def noted(self, kind: str, run: Run) -> list[float]:
        """When something was noted of a run."""
        ledger = self.folder / "ledger"
        lines = [line.split(",") for line in ledger.read_text().splitlines()] if ledger.exists() else []
        return [float(at) for what, run_id, at in lines if (what, run_id) == (kind, run.run_id)]

    async def asked(self, *runs: Run) -> None:
        async def all_asked() -> bool:
            return all(self.noted("asked", run) for run in runs)

        await until(all_asked, "the models are asked")

    async def lag_s(self) -> float:
        """How long after its model's answer a run is over."""
        in_s = [0.25 + 0.01 * n for n in range(LIVE)]
        now, lags = time.time(), []
        for run, s in zip(await self.launch(*in_s), in_s, strict=True):
            await run.outcome()
            row = await self.runtime.log.run(run.run_id)
            assert row
            lags.append(row.updated_at - (now + s))
        return statistics.median(lags)

    async def kinds(self, run: Run) -> list[str]:
        return [stored.event.type for stored in await self.runtime.log.read(run.run_id)]

    async def agrees(self, run: Run, told: Cancelled) -> Status:
        """The final state, which the answer that the canceller got has to fit."""
        async with asyncio.timeout(30):
            outcome = await run.outcome()
        row = await self.runtime.log.run(run.run_id)
        assert row and row.status is outcome.status
        expected = told.row.status if told.answer == "ended" else Status.CANCELLED
        assert outcome.status is expected, (told, outcome, await self.kinds(run))
        return outcome.status


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def floor(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Floor]:
    folder = tmp_path_factory.mktemp("cancel")
    async with Runtime(folder / "runs.db", actors=2, concurrency=LIVE) as runtime:
        made = Floor(runtime, folder)
        await asyncio.gather(*(run.outcome() for run in await made.launch(0.0, 0.0)))
        yield made


async def test_a_model_call_is_closed_within_a_second_of_the_cancel(floor: Floor) -> None:
    runs = await floor.launch(*[FAR_S] * 4)
    await floor.asked(*runs)
    began = time.time()
    told = [await floor.runtime.cancel(run.run_id, reason="too dear", by="ann") for run in runs]
    assert [one.answer for one in told] == ["cancelling"] * 4
    outcomes = [await run.outcome() for run in runs]
    assert [(one.status, one.message) for one in outcomes] == [("cancelled", "too dear")] * 4
    assert time.time() - began < 1.0
    for run in runs:
        (closed,) = floor.noted("closed", run)
        assert closed - began < 1.0
        assert (await floor.kinds(run))[-2:] == ["assistant_interrupted", "run_cancelled"]
        partial = fold(await floor.runtime.log.read(run.run_id)).partial
        assert partial and partial.text == "so far"
    again = await floor.runtime.cancel(runs[0].run_id)
    assert (again.answer, again.again) == ("cancelled", True)
    with pytest.raises(NotFound, match="no run nobody"):
        await floor.runtime.cancel("nobody")


async def test_around_its_completion_the_answer_to_the_canceller_and_the_final_state_agree(floor: Floor) -> None:
    """200 cancels, from 50 ms before to 50 ms after a run completes, in a time that runs before them have taken."""
    dice = random.Random(SEED)
    ended: Counter[str] = Counter()
    lag_s = await floor.lag_s()

    async def one(run: Run, at: float, offset: float) -> None:
        await asyncio.sleep(max(0.0, at + lag_s + offset - time.time()))
        told = await floor.runtime.cancel(run.run_id)
        ended[f"{told.answer}, {await floor.agrees(run, told)}"] += 1

    for _ in range(200 // LIVE):
        times = [0.25 + 0.01 * n for n in range(LIVE)]
        now = time.time()
        runs = await floor.launch(*times)
        offsets = [dice.uniform(-0.05, 0.05) for _ in times]
        await asyncio.gather(*(one(run, now + s, o) for run, s, o in zip(runs, times, offsets, strict=True)))
    assert sum(ended.values()) == 200
    around = "ended, completed", "cancelling, cancelled"
    assert set(ended) <= {*around, "cancelled, cancelled"}, ended  # the last: it was not claimed yet
    assert min(ended[each] for each in around) >= 5, f"it was not around the completion: {ended}"


async def test_what_is_queued_behind_a_full_supervisor_never_starts(floor: Floor) -> None:
    full = await floor.launch(*[FAR_S] * LIVE)
    queued = await floor.launch(*[0.0] * 6, pays=True)
    await floor.asked(*full)
    told = [await floor.runtime.cancel(run.run_id) for run in queued]
    assert [one.answer for one in told] == ["cancelled"] * 6
    last = (await floor.launch(0.0))[0]
    for run in full:
        await floor.runtime.cancel(run.run_id)
    assert (await last.outcome()).status == "completed", "there was room for what was queued behind them"
    for run, answer in zip(queued, told, strict=True):
        await floor.agrees(run, answer)
        assert await floor.kinds(run) == ENDED
        assert not floor.noted("asked", run)
    for run in full:
        assert (await run.outcome()).status == "cancelled"


async def test_in_the_instant_of_the_start_no_effect_is_dated_after_an_accepted_cancel(floor: Floor) -> None:
    """Cancelled when the launch is durable, or up to 40 ms later: while it is claimed, asked, answered, dispatched."""
    dice = random.Random(SEED)
    fates: Counter[str] = Counter()

    async def one(run: Run) -> None:
        await asyncio.sleep(dice.choice([0.0, dice.uniform(0.0, 0.04)]))
        told = await floor.runtime.cancel(run.run_id)
        cancelled_at = time.time()
        await floor.agrees(run, told)
        effects, kinds = floor.noted("effect", run), await floor.kinds(run)
        assert all(at < cancelled_at + GRACE_S for at in effects)
        assert len(effects) <= kinds.count("tool_call_started") <= 1
        if "tool_call_started" in kinds and told.answer == "cancelling":
            assert kinds.index("tool_call_started") < kinds.index("cancel_requested"), "it began after the cancel"
        ends = (await floor.runtime.certificate(run.run_id)).calls
        fates.update([str(end.fate) for end in ends] or ["no call was open"])
        if effects and ends:
            assert ends[0].fate in ("finished", "unknown"), "it happened"

    for _ in range(5):
        runs = await floor.launch(*[FAR_S] * LIVE, pays=True)
        await asyncio.gather(*(one(run) for run in runs))
    assert sum(fates.values()) == 5 * LIVE


async def test_a_run_whose_time_is_over_is_cancelled_while_its_model_is_asked(floor: Floor) -> None:
    request = Request({"at": time.time() + FAR_S, "pays": False}, metadata={"dir": str(floor.folder)})
    (run,) = await floor.runtime.launch_many(floor.loaded, [request], limits={"timeout_s": 0.7})
    async with asyncio.timeout(10):
        outcome = await run.outcome()
    assert (outcome.status, outcome.message) == ("cancelled", "deadline")
    assert len(floor.noted("closed", run)) == 1
