"""How attempts end otherwise than by returning, and what is told of it: timeouts, deaths, and what probes say."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.attempt import Outcome
from perdure.actors.judgement import TaskDied
from perdure.actors.requests import Executed
from perdure.cli.receipts import Receipt, receipts_json, receipts_lines
from perdure.store.events import Effect, ToolCallProbed, ToolCallRetried, ToolCallUnsettled, ToolResult

from .fakes import RUN, held, settle_down
from .hands import CALL, Case, Hand

INTERRUPTED = Outcome(kind="timeout", content='{"error":"Timeout","message":"it was interrupted"}', is_error=True)
NO = Outcome(kind="did_not_happen", content="no such refund", node="there", pid=8, took_s=0.25)
YES = Outcome(kind="happened", content='"paid"', node="there", pid=8, took_s=0.25)


def death(why: str = "it was killed", timed_out: bool = False) -> TaskDied:
    """A death in a process that is known."""
    died = TaskDied(why)
    died.node, died.pid, died.ran_s, died.timed_out = "node", 7, 2.5, timed_out
    return died


class Story(Case):
    """A case whose first attempt has begun."""

    executing: asyncio.Task[Executed]

    async def begun(self) -> Hand:
        self.executing = await self.begin()
        hand = await self.dispatched()
        await self.leave(hand)
        return hand

    async def leave(self, hand: Hand) -> None:
        if hand.work.effect == "non_idempotent":
            assert await self.mark(hand.work) is None
        else:
            assert await self.journal.begin(RUN, CALL, hand.work.attempt, "node", None, 7) is None
        self.tasks.dead = True

    async def probed(self, number: int, answer: Outcome | TaskDied) -> None:
        """The next task is a probe, which ends like this."""
        hand = await self.dispatched(number)
        assert hand.work.probe
        if isinstance(answer, Outcome):
            hand.end.set_result(answer)
        else:
            hand.end.set_exception(answer)

    async def of(self, kind: type[Any]) -> list[Any]:
        return [stored.event for stored in await self.log.read(RUN) if isinstance(stored.event, kind)]

    async def receipt(self) -> Receipt:
        calls = await self.log.calls(RUN)
        (receipt,) = receipts_json(await self.log.read(RUN), calls)
        return receipt


@pytest.mark.parametrize("effect", ["read_only", "idempotent_write"])
async def test_a_death_at_its_own_deadline_is_a_timeout_and_not_repeated(tmp_path: Path, effect: Effect) -> None:
    case = Story(tmp_path, effect, probe=False)
    (await case.begun()).end.set_exception(death(timed_out=True))
    await held(case.executing)
    (result,) = await case.of(ToolResult)
    assert (result.source, result.is_error, result.attempt) == ("timeout", True, 1)
    assert (result.node, result.pid, result.took_s) == ("node", 7, 2.5)
    assert "10 s" in result.content and len(case.tasks.tasks) == 1
    await case.check()


@pytest.mark.parametrize("end", ["killed", "interrupted"])
async def test_an_effect_that_timed_out_is_asked_about_and_never_repeated(tmp_path: Path, end: str) -> None:
    case = Story(tmp_path)
    hand = await case.begun()
    if end == "killed":
        hand.end.set_exception(death(timed_out=True))
    else:
        hand.end.set_result(INTERRUPTED)
    await case.probed(2, NO)
    await settle_down()
    case.waking.set()  # the world is quiet
    await case.probed(3, NO)
    await held(case.executing)
    (result,) = await case.of(ToolResult)
    assert (result.source, result.is_error) == ("timeout", True) and "did not happen" in result.content
    assert await case.of(ToolCallRetried) == []
    await case.check()


async def test_an_effect_that_timed_out_and_happened_has_its_result(tmp_path: Path) -> None:
    case = Story(tmp_path)
    (await case.begun()).end.set_exception(death(timed_out=True))
    await case.probed(2, YES)
    await held(case.executing)
    (result,) = await case.of(ToolResult)
    assert (result.source, result.is_error, result.content) == ("probe", False, '"paid"')


async def test_an_effect_that_timed_out_and_that_nobody_knows_of_is_put_to_a_person(tmp_path: Path) -> None:
    case = Story(tmp_path, probe=False)
    (await case.begun()).end.set_exception(death(timed_out=True))
    await held(case.executing)
    (question,) = await case.of(ToolCallUnsettled)
    assert "did not end within 10 s" in question.why and "no reconcile probe" in question.why


async def test_each_asking_of_a_probe_is_in_the_log_also_one_that_dies(tmp_path: Path) -> None:
    case = Story(tmp_path)
    (await case.begun()).end.set_exception(TaskDied("the process crashed"))
    await case.probed(2, death("out of memory"))
    await case.probed(3, NO)
    await settle_down()
    case.waking.set()
    await case.probed(4, YES)
    await held(case.executing)
    died, no, yes = await case.of(ToolCallProbed)
    assert (died.answer, died.node, died.pid, died.took_s) == ("unknown", "node", 7, 2.5)
    assert "out of memory" in died.why and died.end == "the process crashed"
    assert (no.answer, no.why, no.pid) == ("did_not_happen", "no such refund", 8)
    assert (yes.answer, yes.why, yes.took_s) == ("happened", "", 0.25)
    receipt = await case.receipt()
    (attempt,) = receipt["attempts"]
    assert [probe["answer"] for probe in attempt["probes"]] == ["unknown", "did_not_happen", "happened"]
    assert attempt["end"] == "the process crashed" and attempt["ended_at"] >= attempt["started_at"]
    assert (attempt["node"], receipt["result"]["source"]) == ("node", "probe")
    text = "\n".join(receipts_lines(await case.log.read(RUN), await case.log.calls(RUN)))
    assert "did not happen: no such refund, process 8 on node there" in text
    await case.check()


async def test_a_probe_that_does_not_end_in_its_time_is_not_asked_again(tmp_path: Path) -> None:
    case = Story(tmp_path)
    case.tool.options = replace(case.tool.options, settles_after_s=0)
    (await case.begun()).end.set_exception(death())
    await case.probed(2, death(timed_out=True))
    await held(case.executing)
    (probed,) = await case.of(ToolCallProbed)
    (question,) = await case.of(ToolCallUnsettled)
    assert "did not end in time" in probed.why and probed.why in question.why


@pytest.mark.parametrize("effect", ["read_only", "idempotent_write"])
async def test_an_attempt_without_a_start_mark_has_its_process_and_its_times_in_the_receipt(
    tmp_path: Path, effect: Effect
) -> None:
    case = Story(tmp_path, effect, probe=False)
    first = await case.begun()
    case.clock.now += 4.0
    first.end.set_exception(death("the process crashed"))
    second = await case.dispatched(2)
    await case.leave(second)
    case.clock.now += 4.0
    second.end.set_result(Outcome(kind="result", content='"seen"', node="other", pid=9, took_s=1.5))
    await held(case.executing)
    one, two = (await case.receipt())["attempts"]
    ended_at = case.clock.now - 4.0
    assert (one["node"], one["pid"], one["took_s"], one["end"]) == ("node", 7, 2.5, "the process crashed")
    assert (one["started_at"], one["ended_at"]) == (ended_at - 2.5, ended_at)
    assert (two["node"], two["pid"], two["started_at"]) == ("other", 9, case.clock.now - 1.5)
    text = "\n".join(receipts_lines(await case.log.read(RUN), await case.log.calls(RUN)))
    assert "the process crashed (after 2.5 s in process 7 on node node)" in text
