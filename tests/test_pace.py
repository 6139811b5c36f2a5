"""How fast a provider is asked: in time that is reckoned, with a provider that is played."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from perdure.actors.model import Interrupted, ModelError
from perdure.actors.providers.pace import DISTANCE_MAX_S, PATIENCE_S, Pace, Passing

from .fakes import settle_down

TROUBLE = ModelError("busy", "unavailable")


class Time:
    """Time that goes on to the next who waits, once nobody can do anything now."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        over = asyncio.Event()
        heapq.heappush(self._waiting, (self.now + seconds, next(self._numbers), over))
        await over.wait()

    async def let(self, work: Awaitable[object]) -> None:
        """Let it all happen."""
        task = asyncio.ensure_future(work)
        await settle_down(5)
        while not task.done():
            self.now, _, over = heapq.heappop(self._waiting)
            over.set()
            await settle_down(5)
        await task


class Service:
    """A provider: each request takes `takes_s`; `trouble` says what it has with the n-th, if any."""

    def __init__(self, time: Time, trouble: Callable[[int, float], Passing | None], takes_s: float = 1) -> None:
        self.time, self.trouble, self.takes_s = time, trouble, takes_s
        self.asked: list[float] = []
        self.answers = 0

    async def __call__(self) -> str:
        number, at = len(self.asked), self.time.now
        self.asked.append(at)
        await self.time.sleep(self.takes_s)
        if trouble := self.trouble(number, at):
            raise trouble
        self.answers += 1
        return "answer"


async def batch(pace: Pace, service: Service, runs: int, at_once: int) -> None:
    """Requests of as many runs, so many of them at once."""
    room = asyncio.Semaphore(at_once)

    async def run() -> None:
        async with room:
            await pace.answered(service)

    await asyncio.gather(*(run() for _ in range(runs)))


def paced() -> tuple[Time, Pace]:
    time = Time()
    return time, Pace(time, time.sleep, random.Random(7))


async def test_without_trouble_nobody_waits() -> None:
    time, pace = paced()
    service = Service(time, lambda number, at: None)
    await time.let(batch(pace, service, 50, 50))
    assert time.now == 1.0 and service.asked == [0.0] * 50


async def test_a_wait_that_the_provider_names_holds_for_all_and_no_run_fails() -> None:
    time, pace = paced()
    chance = random.Random(3)
    limited: list[float] = []

    def trouble(number: int, at: float) -> Passing | None:
        if chance.random() > 1 / 3:
            return None
        limited.append(at + 1)
        return Passing(TROUBLE, limited=True, retry_after_s=2)

    service = Service(time, trouble)
    await time.let(batch(pace, service, 200, 50))
    assert service.answers == 200 and len(limited) > 50
    early = [at for at in service.asked for told in limited if told < at < told + 2]
    assert early == [], "somebody asked before the time was over"


async def test_a_limit_that_hits_every_other_request_for_ever_fails_no_run() -> None:
    time, pace = paced()
    chance = random.Random(3)
    service = Service(time, lambda n, at: Passing(TROUBLE, limited=True) if chance.random() < 0.5 else None, 0.01)
    await time.let(batch(pace, service, 200, 50))
    assert service.answers == 200 and time.now > PATIENCE_S


async def test_a_request_that_is_limited_for_ever_while_others_are_answered_ends() -> None:
    time, pace = paced()
    never = Service(time, lambda n, at: Passing(TROUBLE, limited=True))
    others = Service(time, lambda n, at: None)

    async def both() -> None:
        failing = asyncio.create_task(pace.answered(never))
        while not failing.done():
            await pace.answered(others)
            await time.sleep(60)
        with pytest.raises(ModelError):
            await failing

    await time.let(both())
    assert 100 <= len(never.asked) < 110


async def test_the_rate_drops_for_all_and_recovers() -> None:
    time, pace = paced()

    def trouble(number: int, at: float) -> Passing | None:
        return Passing(TROUBLE, limited=True) if at < 10 else None

    service = Service(time, trouble)
    await time.let(batch(pace, service, 200, 50))
    assert service.answers == 200
    during = [at for at in service.asked if 0 < at < 10]
    assert len(during) <= 50, "fifty runs went on asking a provider that is limited"
    assert pace.distance_s == 0, "it has recovered"
    after = [at for at in service.asked if at >= 10]
    together = max(sum(1 for at in after if start <= at < start + 0.05) for start in after)
    assert together < 50, "they came back all at once"


async def test_other_processes_of_the_machine_are_held_back_too(tmp_path: Path) -> None:
    time, pace = paced()
    pace.board = tmp_path / "provider"
    other = Pace(time, time.sleep, random.Random(1), pace.board)
    limited = Service(time, lambda number, at: Passing(TROUBLE, True, 20) if number == 0 else None)
    service = Service(time, lambda number, at: None)

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pace.answered(limited))
            await time.sleep(5)
            tasks.create_task(other.answered(service))

    await time.let(both())
    assert service.asked[0] >= 21
    for nonsense in ("9e99", "x", ""):
        pace.board.write_text(nonsense)
        before = time.now
        await time.let(other.answered(service))
        assert service.asked[-1] == before


async def test_pauses_grow_have_chance_in_them_and_are_bounded() -> None:
    time, pace = paced()
    service = Service(time, lambda number, at: Passing(TROUBLE) if number < 12 else None)
    await time.let(pace.answered(service))
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(service.asked)]
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses[:7]))
    assert max(pauses) <= 60 and len({round(pause, 6) for pause in pauses}) == len(pauses)


async def test_trouble_of_one_request_slows_down_no_other() -> None:
    time, pace = paced()
    service = Service(time, lambda number, at: Passing(TROUBLE) if number == 0 else None)
    await time.let(batch(pace, service, 10, 10))
    assert service.asked[:10] == [0.0] * 10 and pace.distance_s == 0


async def test_patience_ends_with_the_error_that_names_the_trouble() -> None:
    time, pace = paced()
    service = Service(time, lambda number, at: Passing(TROUBLE, limited=True))
    with pytest.raises(ModelError) as failed:
        await time.let(pace.answered(service))
    assert failed.value is TROUBLE and PATIENCE_S / 2 < time.now <= PATIENCE_S + DISTANCE_MAX_S + 62
    with pytest.raises(ModelError):
        await time.let(pace.answered(Service(time, lambda n, at: Passing(TROUBLE, True, PATIENCE_S + 1))))


async def test_an_answer_that_broke_off_is_given_back_after_the_pause() -> None:
    time, pace = paced()
    trouble = Passing(TROUBLE)
    trouble.heard = True
    with pytest.raises(Interrupted) as broken:
        await time.let(pace.answered(Service(time, lambda number, at: trouble)))
    assert time.now > 1 and broken.value.code == "unavailable"
