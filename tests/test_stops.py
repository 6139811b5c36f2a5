"""What the journal makes of the calls of a run that is cancelled, or ended by another hand, with tasks in hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.actors.attempt import Outcome
from perdure.actors.judgement import judge
from perdure.actors.machine import fold
from perdure.actors.requests import Execute, Executed
from perdure.store.events import CancelRequested, Effect, RunFailed, ToolResult
from perdure.store.log import Abandon, Cancel

from .fakes import AGENT, LEASE, RUN, accepted, held, settle_down, until
from .hands import CALL, Case, Hand

DIED = Outcome(kind="died", content="it was killed", is_error=True)
STOPPED = Outcome(kind="stopped", content='"it was interrupted"', is_error=True)


class Stop:
    """A run with one call under way that is cancelled, and the owner that joins it."""

    def __init__(self, folder: Path, effect: Effect, probe: bool = False) -> None:
        self.case = Case(folder, effect, probe)

    async def begun(self) -> Hand:
        self.first = await self.case.begin()
        hand = await self.case.dispatched()
        if hand.work.effect == "non_idempotent":
            assert await self.case.mark(hand.work) is None
        else:
            assert await self.case.journal.begin(RUN, CALL, 1, "node", None, 1) is None
        return hand

    async def cancel(self) -> asyncio.Task[Executed]:
        """Cancel it; what its owner then asks of the same journal."""
        await accepted(self.case.log, Cancel(RUN, CancelRequested(by="me")))
        return await self.join()

    async def join(self) -> asyncio.Task[Executed]:
        state = fold(await self.case.log.read(RUN))
        known = tuple(call.request for call in state.open_calls)
        ask = Execute(RUN, self.case.epoch, state.seq, (), known, AGENT, {}, {"pay": self.case.tool.options})
        executing = asyncio.create_task(self.case.journal.execute(ask))
        await settle_down()
        return executing

    async def passes(self, true: Callable[[], bool]) -> None:
        """Let one sleep after the other be over until something is so."""
        for _ in range(100):
            if true():
                return
            self.case.waking.set()
            await settle_down()
        raise AssertionError("it never happened")

    async def result(self) -> ToolResult | None:
        events = [stored.event for stored in await self.case.log.read(RUN)]
        await self.case.check()
        return next((event for event in events if isinstance(event, ToolResult)), None)


def message(result: ToolResult | None) -> str:
    assert result and result.is_error and result.source == "cancel", result
    return str(json.loads(result.content)["message"])


@pytest.mark.parametrize(("effect", "words"), [("read_only", ""), ("idempotent_write", "with the idempotency key")])
async def test_what_may_be_repeated_and_heeds_the_signal_is_recorded_as_stopped(
    tmp_path: Path, effect: Effect, words: str
) -> None:
    stop = Stop(tmp_path, effect)
    hand = await stop.begun()
    executing = await stop.cancel()
    assert stop.case.tasks.told == [CALL] and not executing.done()
    hand.end.set_result(STOPPED)
    await held(executing)
    assert message(await stop.result()).startswith("stopped before it finished") and stop.case.tasks.killed == []
    assert words in message(await stop.result())


async def test_what_does_not_heed_it_is_killed_when_the_grace_time_is_over(tmp_path: Path) -> None:
    stop = Stop(tmp_path, "read_only")
    hand = await stop.begun()
    executing = await stop.cancel()
    await stop.passes(lambda: bool(stop.case.tasks.killed))
    assert stop.case.clock.slept == [1.0, 5.0]
    assert await stop.result() is None and not executing.done()
    hand.dies()
    await held(executing)
    assert message(await stop.result()) == "stopped before it finished: it was killed"
    assert len(stop.case.tasks.tasks) == 1


@pytest.mark.parametrize("effect", ["read_only", "idempotent_write", "non_idempotent"])
async def test_what_finishes_in_spite_of_it_has_its_own_result(tmp_path: Path, effect: Effect) -> None:
    stop = Stop(tmp_path, effect)
    hand = await stop.begun()
    executing = await stop.cancel()
    hand.returns('"paid"')
    await held(executing)
    result = await stop.result()
    assert result and (result.content, result.source, result.is_error) == ('"paid"', "tool", False)


async def test_what_has_not_begun_is_left_to_the_owner(tmp_path: Path) -> None:
    stop = Stop(tmp_path, "read_only")
    await stop.case.begin()
    hand = await stop.case.dispatched()
    executing = await stop.cancel()
    assert "cancelled" in (await stop.case.journal.begin(RUN, CALL, 1, "node", None, 1) or "")
    await stop.passes(lambda: bool(stop.case.tasks.killed))
    assert stop.case.clock.slept == [1.0]
    hand.dies()
    await held(executing)
    assert await stop.result() is None


async def test_a_marked_call_is_closed_only_after_the_proof_that_it_is_over(tmp_path: Path) -> None:
    stop = Stop(tmp_path, "non_idempotent")
    hand = await stop.begun()
    executing = await stop.cancel()
    hand.dies()
    await until(lambda: stop.case.tasks.proofs > 0)
    await settle_down()
    assert await stop.result() is None and not executing.done()
    stop.case.tasks.dead = True
    await stop.passes(executing.done)
    assert message(await stop.result()).startswith("killed in mid-effect: it is unknown whether it took effect")


@pytest.mark.parametrize("restarted", [False, True], ids=["the same journal", "its successor"])
async def test_the_probe_says_what_a_stopped_call_did_if_it_can_tell_at_once(tmp_path: Path, restarted: bool) -> None:
    stop = Stop(tmp_path, "non_idempotent", probe=True)
    hand = await stop.begun()
    stop.case.tasks.dead = True
    if restarted:
        await accepted(stop.case.log, Cancel(RUN, CancelRequested(by="me")))
        executing = await stop.case.successor()
        stop.case.tasks.dead = True
        await stop.case.dispatched()
    else:
        executing = await stop.cancel()
        hand.end.set_result(STOPPED)
        await stop.case.dispatched(2)
    assert stop.case.tasks.tasks[-1].work.probe
    stop.case.tasks.tasks[-1].end.set_result(Outcome(kind="happened", content='"paid"'))
    await held(executing)
    result = await stop.result()
    assert result and (result.content, result.source) == ('"paid"', "probe")


async def test_nobody_waits_for_the_world_to_settle_and_the_call_is_then_unknown(tmp_path: Path) -> None:
    stop = Stop(tmp_path, "non_idempotent", probe=True)
    hand = await stop.begun()
    stop.case.tasks.dead = True
    executing = await stop.cancel()
    hand.dies()
    (await stop.case.dispatched(2)).end.set_result(Outcome(kind="did_not_happen"))
    await held(executing)
    assert "a request of it may still be under way" in message(await stop.result())


async def test_a_question_that_waits_for_the_world_to_settle_is_cut_short(tmp_path: Path) -> None:
    stop = Stop(tmp_path, "non_idempotent", probe=True)
    hand = await stop.begun()
    stop.case.tasks.dead = True
    hand.dies()
    (await stop.case.dispatched(2)).end.set_result(Outcome(kind="did_not_happen"))
    await settle_down()
    await held(await stop.cancel())
    assert "unknown whether it took effect" in message(await stop.result())


@pytest.mark.parametrize("finishes", [False, True])
async def test_of_a_run_that_others_have_ended_what_runs_is_stopped_and_only_a_result_of_its_own_is_kept(
    tmp_path: Path, finishes: bool
) -> None:
    stop = Stop(tmp_path, "read_only")
    hand = await stop.begun()
    end = RunFailed(code="crash_loop", message="m", phase="p")
    await accepted(stop.case.log, Abandon(RUN, LEASE, stop.case.epoch, end))
    before = len(await stop.case.log.read(RUN))
    await stop.case.journal.sweep()
    await settle_down()
    assert stop.case.tasks.told == [CALL]
    if finishes:
        hand.returns('"read"')
    else:
        hand.end.set_result(STOPPED)
    await settle_down()
    added = [stored.event.type for stored in (await stop.case.log.read(RUN))[before:]]
    assert added == (["tool_evidence"] if finishes else [])
    stop.first.cancel()


def test_a_stopped_attempt_is_never_followed_by_another() -> None:
    for effect in ("read_only", "idempotent_write", "non_idempotent"):
        for outcome in (DIED, STOPPED, Outcome(kind="exited"), Outcome(kind="timeout"), Outcome(kind="spared")):
            for began in (True, False):
                assert judge(effect, outcome, began, 1, 0, 3, stops=True) != "retry"
    assert judge("read_only", Outcome(kind="spared"), True, 0, 0, 3, True) == "record"
    assert judge("non_idempotent", STOPPED, True, 0, 0, 3, True) == "settle"
