"""Attempts that live on when their journal is gone, and reports that come late: who may ask what, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.attempt import Outcome
from perdure.actors.journal import Journal
from perdure.actors.judgement import judge
from perdure.actors.machine import fold
from perdure.actors.pursuit import CLOCK_MARGIN_S
from perdure.actors.requests import Execute
from perdure.store.errors import StoreUnavailable
from perdure.store.events import (
    CancelRequested,
    Effect,
    RunFailed,
    ToolCallRequested,
    ToolCallRetried,
    ToolResult,
)
from perdure.store.log import Append, Cancel, Retry, Verdict
from perdure.store.memory import MemoryLog
from perdure.store.states import Status

from .fakes import (
    AGENT,
    RUN,
    accepted,
    held,
    refused,
    settle_down,
)
from .hands import CALL, Case, HandTasks

DIED = Outcome(kind="died", content="it was killed", is_error=True)


async def test_nobody_is_asked_and_nothing_is_repeated_while_a_marked_attempt_may_act(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    zombie = await case.dispatched()
    assert await case.mark(zombie.work) is None
    executing = await case.successor()
    for _ in range(5):
        await settle_down()
        assert case.tasks.tasks == [], "probed or dispatched before the proof"
        case.waking.set()
    assert case.tasks.proofs >= 5
    case.tasks.dead = True
    case.waking.set()
    probe = await case.dispatched()
    assert probe.work.probe and probe.work.attempt == 1
    probe.end.set_result(Outcome(kind="happened", content='"paid"'))
    assert fold((await held(executing)).events, fold((await case.log.read(RUN))[:6])).status is Status.RUNNING
    await case.check()


async def test_the_hard_deadline_is_a_proof_too_and_not_a_moment_earlier(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    zombie = await case.dispatched()
    await case.mark(zombie.work)
    marked_at = case.clock.now
    await case.successor()
    while not case.tasks.tasks:
        await settle_down(5)
        case.waking.set()
    assert case.clock.now == pytest.approx(marked_at + 15.0 + CLOCK_MARGIN_S)


async def test_a_probe_that_says_no_counts_only_when_the_world_is_quiet(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    await case.mark((await case.dispatched()).work)
    await case.successor()
    case.tasks.dead = True
    early = await case.dispatched(1)
    early.end.set_result(Outcome(kind="did_not_happen"))
    await settle_down()
    assert len(case.tasks.tasks) == 1, "a request under way may still land"
    proven_at = case.clock.now
    case.waking.set()
    late = await case.dispatched(2)
    assert late.work.probe and case.clock.now == proven_at + 30.0
    late.end.set_result(Outcome(kind="did_not_happen"))
    again = await case.dispatched(3)
    assert not again.work.probe and again.work.attempt == 2
    assert again.work.idempotency_key == early.work.idempotency_key


async def test_a_result_left_in_the_lock_file_is_taken_and_neither_probe_nor_effect_is_asked_for(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path)
    await case.begin()
    await case.mark((await case.dispatched()).work)
    case.lock.write_bytes(Outcome(kind="result", content='"receipt 7"').model_dump_json().encode() + b"\n")
    executing = await case.successor()
    case.tasks.dead = True
    await held(executing)
    assert case.tasks.tasks == []
    last = (await case.log.read(RUN))[-1].event
    assert isinstance(last, ToolResult) and (last.content, last.attempt) == ('"receipt 7"', 1)
    assert not case.lock.exists()


async def test_half_a_result_in_the_lock_file_is_none(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    await case.mark((await case.dispatched()).work)
    case.lock.write_bytes(Outcome(kind="result", content='"receipt 7"').model_dump_json().encode()[:20])
    await case.successor()
    case.tasks.dead = True
    assert (await case.dispatched()).work.probe


async def test_an_unmarked_stale_task_can_never_begin(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    stale = await case.dispatched()
    await case.successor()
    fresh = await case.dispatched()
    assert fresh.work.attempt == 2
    assert "superseded" in (await case.mark(stale.work, "old") or "")
    assert await case.mark(fresh.work, "new") is None
    assert "superseded" in (await case.mark(stale.work, "old") or "")


async def test_two_tasks_of_one_attempt_do_not_both_begin(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    hand = await case.dispatched()
    assert await case.mark(hand.work, "one") is None
    assert "another task" in (await case.mark(hand.work, "other") or "")
    assert await case.mark(hand.work, "one") is None, "a mark whose answer was lost may be asked for again"


async def test_a_repeated_mark_is_refused_once_the_run_is_being_cancelled(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    hand = await case.dispatched()
    assert await case.mark(hand.work) is None
    await accepted(case.log, Cancel(RUN, CancelRequested(by="me")))
    assert "cancelled" in (await case.mark(hand.work) or "")


@pytest.mark.parametrize("effect", ["read_only", "idempotent_write", "non_idempotent"])
async def test_nothing_begins_after_an_accepted_cancel(tmp_path: Path, effect: Effect) -> None:
    case = Case(tmp_path, effect, probe=False)
    await case.begin()
    hand = await case.dispatched()
    await accepted(case.log, Cancel(RUN, CancelRequested(by="me")))
    if effect == "non_idempotent":
        assert "cancelled" in (await case.mark(hand.work) or "")
    else:
        assert "cancelled" in (await case.journal.begin(RUN, CALL, 1, "node", None) or "")


class LosesAnswers(MemoryLog):
    """A log whose next commit is done, though nobody is told so."""

    lose = False

    async def commit(self, commands: Any) -> list[Verdict]:
        verdicts = await super().commit(commands)
        if self.lose:
            self.lose = False
            raise StoreUnavailable("the connection broke in the commit")
        return verdicts


async def test_a_mark_whose_commit_was_in_doubt_still_needs_a_proof_of_death(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.log = LosesAnswers(case.clock)
    await case.begin()
    hand = await case.dispatched()
    case.log.lose = True
    case.waking.set()
    assert await case.mark(hand.work) is None
    hand.dies()
    await settle_down()
    assert case.tasks.proofs == 1
    assert len(case.tasks.tasks) == 1, "probed without a proof"


async def test_a_retry_that_races_a_mark_is_refused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    hand = await case.dispatched()
    retry = Retry(RUN, case.epoch, 0, ToolCallRetried(tool_call_id=CALL, attempt=2, reason="gone"))
    assert await case.mark(hand.work) is None
    assert await refused(case.log, retry) == "superseded"


async def test_a_task_that_dies_while_its_mark_is_being_written_is_settled_and_not_repeated(tmp_path: Path) -> None:
    case = Case(tmp_path)
    executing = await case.begin()
    hand = await case.dispatched()
    marking = asyncio.create_task(case.mark(hand.work))
    await asyncio.sleep(0)  # the mark is on its way
    hand.dies()
    assert await held(marking) is None
    await settle_down()
    executing.cancel()
    assert [hand.work.attempt for hand in case.tasks.tasks] == [1]
    assert (await case.call()).attempt == 1


async def test_a_journal_joins_what_runs_and_starts_nothing_twice(tmp_path: Path) -> None:
    case = Case(tmp_path)
    first = await case.begin()
    hand = await case.dispatched()
    state = fold(await case.log.read(RUN))
    known = tuple(call.request for call in state.open_calls)
    again = Execute(RUN, case.epoch, state.seq, (), known, AGENT, {}, {"pay": case.tool.options})
    second = asyncio.create_task(case.journal.execute(again))
    await settle_down()
    await case.mark(hand.work)
    await settle_down()
    hand.returns('"paid"')
    for executing in (first, second):
        assert any(isinstance(stored.event, ToolResult) for stored in (await held(executing)).events)
    assert len(case.tasks.tasks) == 1


async def test_an_execute_that_is_repeated_at_a_new_journal_is_no_first_dispatch(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    await case.dispatched()
    events = tuple(stored.event for stored in await case.log.read(RUN, 2))
    case.tasks = HandTasks()
    case.journal = Journal(case.log, case.tasks, "store", case.clock, case.sleep)
    ask = Execute(RUN, case.epoch, 2, events, (), AGENT, {}, {"pay": case.tool.options})
    executing = asyncio.create_task(case.journal.execute(ask))
    assert any(isinstance(event, ToolCallRequested) for event in events)
    assert (await case.dispatched()).work.attempt == 2
    executing.cancel()


async def test_a_cancel_by_another_hand_releases_the_owner_and_the_end_kills_the_tool(tmp_path: Path) -> None:
    case = Case(tmp_path, "read_only", probe=False)
    executing = await case.begin()
    await case.dispatched()
    await accepted(case.log, Cancel(RUN, CancelRequested(by="me")))
    await settle_down()
    assert not executing.done()
    await case.journal.sweep()
    await held(executing)
    row = await case.log.run(RUN)
    end = RunFailed(code="crash_loop", message="m", phase="p")
    await accepted(case.log, Append(RUN, case.epoch, row.seq, (end,)))
    await case.journal.sweep()
    await settle_down()
    assert case.tasks.killed == []
    case.waking.set()  # it has not begun, and has had a second for that
    await settle_down()
    assert case.tasks.killed == [CALL]


@pytest.mark.parametrize("effect", ["read_only", "idempotent_write", "non_idempotent"])
def test_what_never_began_is_dispatched_again_whatever_its_class(effect: str) -> None:
    assert judge(effect, DIED, began=False, deaths=9, unbegun=1, attempts_max=3) == "retry"
    assert judge(effect, DIED, began=False, deaths=0, unbegun=20, attempts_max=3) == "record"


def test_only_a_non_idempotent_attempt_that_began_is_settled() -> None:
    for outcome in (DIED, Outcome(kind="exited"), Outcome(kind="timeout")):
        assert judge("non_idempotent", outcome, True, 1, 0, 3) == "settle"
        assert judge("read_only", outcome, True, 1, 0, 3) != "settle"
    assert judge("read_only", DIED, True, 2, 0, 3) == "retry"
    assert judge("read_only", DIED, True, 3, 0, 3) == "record"
    assert judge("non_idempotent", Outcome(kind="result"), True, 0, 0, 3) == "record"
    assert judge("non_idempotent", Outcome(kind="refused"), False, 0, 0, 3) == "drop"
