"""What people decide about runs on real Ray: each call by its own question, once, and durable through every death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from perdure import Runtime, UsageError
from perdure.actors.machine import fold, idempotency_key, messages
from perdure.benchmarks.crashes.stage import Stage
from perdure.benchmarks.crashes.takeover import RIVAL
from perdure.benchmarks.crashes.thaw import stale
from perdure.client import decisions
from perdure.store.events import ApprovalDecided, CancelRequested
from perdure.store.log import Cancel, Decide, Refused
from perdure.store.sql import SqlLog, open_log
from perdure.store.states import Status

from .ray_kit import Bench, Case, kill, quick, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]
RACES = 4
CALLS = 25
"""Gated calls of each run that is raced for."""
CANCELS = 8
FAILURES = 4


def made(folder: Path) -> Runtime:
    return quick(Runtime(folder / "runs.db", actors=3, concurrency=6), lease_s=2.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("decisions")
    bench = Bench(await made(folder).__aenter__(), folder)
    try:
        yield bench
    finally:
        await bench.runtime.__aexit__()


async def parked(bench: Bench, *turns: Any) -> Case:
    """A run that waits for a person."""
    case = await bench.start(*turns)
    assert (await case.outcome()).status == "awaiting_approval"
    return case


async def approved(case: Case, call: str | None = None) -> None:
    case.run = await case.bench.runtime.approve(case.run.run_id, call, by="ann")


async def seen(case: Case) -> list[dict[str, Any]]:
    """The results that the model was shown, turn by turn and call by call."""
    shown = messages(fold(await case.events()))
    return [result for message in shown if message["role"] == "tool" for result in message["results"]]


async def refusal(attempt: Any) -> str:
    with pytest.raises(UsageError) as caught:
        await attempt
    return caught.value.message


async def command(bench: Bench, *args: str) -> str:
    """What another process says that is given a command on the store."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure", "--db", str(bench.folder / "runs.db"), *args),
        stdout=asyncio.subprocess.PIPE,
        cwd=bench.folder,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def test_of_two_calls_one_is_approved_and_one_rejected_and_neither_decision_counts_for_a_later_call(
    bench: Bench,
) -> None:
    case = await parked(bench, [("wire", "act"), ("wire", "first-act")], [("wire", "act"), ("wire", "first-act")])
    run_id, runtime = case.run.run_id, bench.runtime
    old, second = await runtime.questions(run_id)
    assert (old.tool_call_id, second.tool_call_id) == ("t0c0", "t0c1") and old.question != second.question
    await approved(case, "t0c1")
    assert (await case.outcome()).status == "awaiting_approval"
    assert [line.call for line in case.ledger()] == ["t0c1"]
    case.run = await runtime.reject(run_id, "t0c0", reason="not this one", by="bob")
    assert (await case.outcome()).status == "awaiting_approval"
    first, other = await seen(case)
    assert (first["tool_call_id"], first["is_error"]) == ("t0c0", True) and "not this one" in first["content"]
    assert (other["tool_call_id"], other["is_error"]) == ("t0c1", False)

    assert "rejected by bob" in await refusal(runtime.approve(run_id, "t0c0"))
    assert "approved by ann" in await refusal(runtime.reject(run_id, "t0c1", reason="too late"))
    stale = ApprovalDecided(tool_call_id="t1c0", question=old.question, digest=old.digest, decision="approve", by="eve")
    (verdict,) = await runtime.log.commit([Decide(run_id, stale)])
    assert isinstance(verdict, Refused)
    assert len(await runtime.questions(run_id)) == 2

    await approved(case, "t1c0")
    await approved(case, "t1c1")
    assert (await case.outcome()).status == "completed"
    assert sorted(line.call for line in case.ledger()) == ["t0c1", "t1c0", "t1c1"]
    await case.check_log()


async def test_calls_of_a_mixed_turn_run_once_though_everything_is_killed_and_nobody_is_up_at_the_decision(
    bench: Bench,
) -> None:
    case = await parked(bench, [("send", "act"), ("wire", "act"), ("read", "act")])
    run_id = case.run.run_id
    assert sorted(line.call for line in case.ledger()) == ["t0c0", "t0c2"]
    bench.runtime.kill()
    with contextlib.suppress(Exception):
        await bench.runtime.__aexit__()
    assert "nobody works on this store" in await command(bench, "approve", run_id, "--by", "ann")
    bench.runtime = await made(bench.folder).__aenter__()
    assert (await bench.runtime.outcome(run_id)).status == "completed"
    assert Counter(line.call for line in case.ledger()) == {"t0c0": 1, "t0c1": 1, "t0c2": 1}
    assert Counter(line.call for line in case.ledger("begin")) == {"t0c0": 1, "t0c1": 1, "t0c2": 1}
    assert [result["tool_call_id"] for result in await seen(case)] == ["t0c0", "t0c1", "t0c2"]
    await case.check_log()


async def race(case: Case, number: int, clients: list[SqlLog], words: tuple[str, str]) -> str:
    """Two clients decide about a call at once, each by its own connection; what the winner decided."""
    run_id, call = case.run.run_id, f"t0c{number}"

    async def decide(client: SqlLog, word: str, by: str) -> str:
        if word == "approve":
            await decisions.approve(client, run_id, call, by=by)
        else:
            await decisions.reject(client, run_id, call, reason="no", by=by)
        return f"{'approved' if word == 'approve' else 'rejected'} by {by}"

    sides = [(words[0], "ann"), (words[1], "bob")]
    order = sides if number % 2 else sides[::-1]
    ends = await asyncio.gather(
        *(decide(client, *side) for client, side in zip(clients, order, strict=True)), return_exceptions=True
    )
    won = [end for end in ends if isinstance(end, str)]
    lost = [end.message for end in ends if isinstance(end, UsageError)]
    assert len(won) == len(lost) == 1, ends
    assert won[0] in lost[0], "who comes second is told how it was decided"
    return won[0]


async def test_of_two_people_who_decide_at_once_one_wins_and_the_other_is_told_and_there_is_one_effect(
    bench: Bench,
) -> None:
    clients = [await open_log(bench.folder / "runs.db") for _ in range(2)]

    async def raced(words: tuple[str, str]) -> list[str]:
        case = await parked(bench, [("wire", "act")] * CALLS)
        won = [await race(case, number, clients, words) for number in range(CALLS)]
        await bench.runtime.nudge([case.run.run_id])  # it may have gone on by itself before, and even have ended
        assert (await bench.runtime.outcome(case.run.run_id)).status == "completed"
        acted = Counter(line.call for line in case.ledger())
        assert acted == {f"t0c{n}": 1 for n, how in enumerate(won) if how.startswith("approved")}
        decided = [stored.event for stored in await case.events() if isinstance(stored.event, ApprovalDecided)]
        assert {event.tool_call_id: event.by for event in decided} == {
            f"t0c{n}": how.rpartition(" ")[2] for n, how in enumerate(won)
        }
        assert len(decided) == CALLS
        await case.check_log()
        return won

    try:
        words = [("approve", "approve"), ("approve", "reject")] * (RACES // 2)
        won = await asyncio.gather(*map(raced, words))
    finally:
        for client in clients:
            await client.close()
    assert {how for one in won for how in one} == {"approved by ann", "approved by bob", "rejected by bob"}


async def test_an_approval_that_comes_while_the_supervisor_is_dead_is_found_by_the_next_one(bench: Bench) -> None:
    case = await parked(bench, [("wire", "act")])
    old = await bench.lease("supervisor")
    kill(old.pid)
    await decisions.approve(bench.runtime.log, case.run.run_id, by="ann")
    await bench.replaced(old)
    assert (await bench.runtime.outcome(case.run.run_id)).status == "completed"
    assert len(case.ledger()) == 1


@pytest.mark.parametrize("death", ["kill", "exit", "sysexit"])
async def test_an_approved_call_whose_process_dies_after_the_effect_is_neither_repeated_nor_asked_about_again(
    bench: Bench, death: str
) -> None:
    case = await parked(bench, [("wire", f"act,first-{death}")])
    await approved(case)
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger()) == len(case.ledger("begin")) == 1
    assert (await case.results())[0].source == "probe"
    assert (await case.kinds()).count("approval_requested") == 1


async def test_an_approval_outlives_a_model_that_fails_again_and_again_after_the_call(bench: Bench) -> None:
    case = await parked(bench, [("wire", "act")], "falter")
    await approved(case)
    for _ in range(FAILURES):
        assert (await case.outcome()).error == "model_error"
        (case.run,) = await bench.runtime.resume([case.run.run_id])
    assert (await case.outcome()).status == "failed"
    case.go()
    (case.run,) = await bench.runtime.resume([case.run.run_id])
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger("begin")) == len(case.ledger()) == 1
    assert (await case.kinds()).count("approval_requested") == 1


async def test_an_approved_call_is_dispatched_once_though_its_run_actor_is_frozen(bench: Bench) -> None:
    case = await parked(bench, [("wire", "wait,act")])
    await approved(case)
    await case.begun()
    pid, _ = await bench.holder(case.run.run_id)
    os.kill(pid, signal.SIGSTOP)
    other, _ = await bench.holder(case.run.run_id)
    assert other != pid
    case.go()
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger()) == len(case.ledger("begin")) == 1
    assert (await case.kinds()).count("approval_requested") == 1


@pytest.mark.parametrize("beheaded", [False, True])
async def test_a_cancel_closes_both_open_questions_at_once_and_the_run_can_go_on_from_there(
    bench: Bench, beheaded: bool
) -> None:
    case = await parked(bench, [("wire", "act"), ("wire", "act")])
    run_id, runtime = case.run.run_id, bench.runtime
    old = await bench.lease("supervisor")
    if beheaded:
        kill(old.pid)
    (verdict,) = await runtime.log.commit([Cancel(run_id, CancelRequested(by="me"))])
    assert not isinstance(verdict, Refused) and verdict.row.status is Status.CANCELLED
    assert [json.loads(result.content) for result in await case.results()] == ["cancelled: never started"] * 2
    assert "the run is cancelled" in await refusal(runtime.approve(run_id, "t0c0"))
    assert await runtime.questions(run_id) == []
    if beheaded:
        await bench.replaced(old)
    (case.run,) = await runtime.resume([run_id])
    assert (await case.outcome()).status == "completed"
    assert [result["is_error"] for result in await seen(case)] == [True, True]
    assert case.ledger("begin") == []
    await case.check_log()


async def test_a_cancel_and_an_approval_in_one_instant_agree_with_what_happens(bench: Bench) -> None:
    async def both(number: int) -> tuple[Case, bool, bool]:
        case = await parked(bench, [("wire", "act")])
        run_id, log = case.run.run_id, bench.runtime.log

        async def cancel() -> bool:
            (verdict,) = await log.commit([Cancel(run_id, CancelRequested(by="me"))])
            return not isinstance(verdict, Refused)

        async def approve() -> bool:
            try:
                await decisions.approve(log, run_id, by="ann")
            except UsageError as error:
                assert "cancelled" in error.message
                return False
            return True

        if number % 2:
            cancelled, was_approved = await asyncio.gather(cancel(), approve())
        else:
            was_approved, cancelled = await asyncio.gather(approve(), cancel())
        await bench.runtime.nudge([run_id])
        return case, cancelled, was_approved

    for case, cancelled, was_approved in await asyncio.gather(*map(both, range(CANCELS))):
        status = (await bench.runtime.outcome(case.run.run_id)).status
        assert status == ("cancelled" if cancelled else "completed")
        assert len(case.ledger()) <= was_approved
        (result,) = await case.results()
        assert len(case.ledger()) == 1 or "never started" in result.content
        await case.check_log()


async def test_an_approval_that_nobody_gives_times_the_run_out_and_a_resumed_run_asks_anew(
    bench: Bench,
) -> None:
    case, other = await parked(bench, [("haste", "act")]), await bench.start([("peek", "act")])
    run_id, log = case.run.run_id, bench.runtime.log
    (old,) = await bench.runtime.questions(run_id)

    async def over() -> bool:
        row = await log.run(run_id)
        return row is not None and row.status is Status.TIMED_OUT

    await until(over, "a run that timed out")
    assert "the time to decide has passed" in await refusal(bench.runtime.approve(run_id))
    assert case.ledger("begin") == [] and await case.results() == [], "that nobody answered is no rejection"
    (case.run,) = await bench.runtime.resume([run_id])
    assert (await case.outcome()).status == "awaiting_approval"
    (new,) = await bench.runtime.questions(run_id)
    assert new.question != old.question and (new.due_at or 0) > (old.due_at or 0) + 1
    await approved(case)
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger()) == len(case.ledger("begin")) == 1
    await case.check_log()

    assert (await bench.runtime.outcome(other.run.run_id)).status == "completed"
    (result,) = await other.results()
    assert (result.source, other.ledger("begin")) == ("rejection", [])
    (decided,) = [stored.event for stored in await other.events() if isinstance(stored.event, ApprovalDecided)]
    assert (decided.by, decided.decision) == ("deadline", "reject")


async def test_an_approved_call_runs_with_the_arguments_that_a_person_gave_it(bench: Bench) -> None:
    case = await parked(bench, [("wire", "raise")])
    assert "do" in await refusal(bench.runtime.approve(case.run.run_id, arguments={"do": 7}))
    case.run = await bench.runtime.approve(case.run.run_id, arguments={"do": "act"}, by="ann")
    assert (await case.outcome()).status == "completed"
    (effect,) = case.ledger()
    assert effect.key == idempotency_key(case.run.run_id, "t0c0")
    (result,) = await seen(case)
    assert not result["is_error"] and '{"do":"act"}' in result["note"]
    await case.check_log()


async def test_calls_that_stay_open_for_several_lease_periods_run_once(bench: Bench) -> None:
    waits, works = await parked(bench, [("wire", "act")]), await parked(bench, [("wire", "wait,act")])
    await approved(works)
    await works.begun()
    first = await bench.lease("supervisor")

    async def renewed() -> bool:
        return (await bench.lease("supervisor")).expires_at > first.expires_at + 3 * bench.runtime.settings.lease_s

    await until(renewed, "three lease periods")
    await approved(waits)
    works.go()
    for case in (waits, works):
        assert (await case.outcome()).status == "completed"
        assert len(case.ledger()) == len(case.ledger("begin")) == (await case.kinds()).count("tool_call_retried") == 1
        assert (await case.kinds()).count("run_claimed") == 2, "at its start, and after the decision"


async def test_two_supervisors_over_runs_that_wait_and_runs_that_were_approved_double_nothing(bench: Bench) -> None:
    """The last test: the first supervisor has lost the store by its end."""
    waits, *others = await asyncio.gather(*(parked(bench, [("wire", "act"), ("send", "act")]) for _ in range(5)))
    stage = Stage(bench.runtime, bench.folder)
    first = await bench.lease("supervisor")
    await stage.stop_between_writes(first.pid)
    for case in others:
        await decisions.approve(bench.runtime.log, case.run.run_id, by="ann")
    ids = [case.run.run_id for case in others]
    rival = await asyncio.create_subprocess_exec(sys.executable, str(RIVAL), str(bench.folder), *ids)
    await bench.replaced(first)
    stage.thaw(first.pid)
    assert await asyncio.wait_for(rival.wait(), 120) == 0
    stage.close()
    for case in others:
        assert (await case.kinds())[-1] == "run_completed"
        assert Counter(line.call for line in case.ledger()) == {"t0c0": 1, "t0c1": 1}
        assert Counter(line.call for line in case.ledger("begin")) == {"t0c0": 1, "t0c1": 1}
        stale(await case.events())
    row = await bench.runtime.log.run(waits.run.run_id)
    assert row and row.status is Status.AWAITING_APPROVAL and [line.call for line in waits.ledger()] == ["t0c1"]
    assert (await waits.kinds()).count("approval_requested") == (await waits.kinds()).count("run_claimed") == 1
