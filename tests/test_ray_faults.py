"""kill -9 and freezing of each kind of process, on real Ray; effects are counted in a ledger outside."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure import Runtime
from perdure.client.launching import Request
from perdure.store.budgets import Amount, Budget
from perdure.store.events import RunCompleted, ToolCallProbed, ToolResult

from .ray_kit import Bench, Case, kill, quick, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]
TIMEOUT_S = 2.0
GRACE_S = 5.0
"""How much later a tool is killed that cannot be interrupted."""
SLACK_S = 1.5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("faults")
    async with quick(Runtime(folder / "runs.db", actors=3, concurrency=6), lease_s=3.0) as runtime:
        yield Bench(runtime, folder)


async def test_a_run_of_all_classes_completes_and_acts_once_each(bench: Bench) -> None:
    case = await bench.start([("read", "act"), ("put", "act"), ("send", "act")], [("send", "act")])
    outcome = await case.outcome()
    assert (outcome.status, outcome.output) == ("completed", "all done")
    assert len(case.ledger()) == 4
    assert len({line.key for line in case.ledger()}) == 4
    await case.check_log()


async def test_tools_outlive_their_run_actor_and_are_adopted(bench: Bench) -> None:
    case = await bench.start([("send", "wait,act"), ("put", "wait,act")])
    await case.begun(2)
    pid, _ = await bench.holder(case.run.run_id)
    kill(pid)
    other, _ = await bench.holder(case.run.run_id)
    assert other != pid
    case.go()
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger("begin")) == len(case.ledger()) == 2
    assert "tool_call_retried" not in await case.kinds()
    await case.check_log()


@pytest.mark.parametrize("death", ["first-kill", "first-exit", "first-sysexit"])
@pytest.mark.parametrize("tool", ["read", "put"])
async def test_a_repeatable_call_whose_process_dies_is_dispatched_again_with_its_key(
    bench: Bench, tool: str, death: str
) -> None:
    case = await bench.start([(tool, f"{death},act")])
    assert (await case.outcome()).status == "completed"
    begun = case.ledger("begin")
    assert [line.attempt for line in begun] == [1, 2]
    assert len({line.key for line in begun}) == 1
    assert [line.attempt for line in case.ledger()] == [2]


async def test_a_call_that_kills_its_process_every_time_is_an_error_result_after_its_attempts(bench: Bench) -> None:
    case = await bench.start([("read", "kill")])
    assert (await case.outcome()).status == "completed"
    (result,) = await case.results()
    assert result.is_error
    assert result.source == "crash"
    assert len(case.ledger("begin")) == 3


@pytest.mark.parametrize("death", ["first-kill", "first-exit", "first-sysexit"])
async def test_an_interrupted_send_that_happened_is_found_and_never_sent_again(bench: Bench, death: str) -> None:
    case = await bench.start([("send", f"act,{death}")])
    assert (await case.outcome()).status == "completed"
    (result,) = await case.results()
    assert (result.source, result.content) == ("probe", '"found in the ledger"')
    assert len(case.ledger()) == len(case.ledger("begin")) == 1
    await case.check_log()


async def test_an_interrupted_send_that_did_not_happen_is_sent_by_a_new_attempt(bench: Bench) -> None:
    case = await bench.start([("send", "first-kill,act")])
    assert (await case.outcome()).status == "completed"
    assert [line.attempt for line in case.ledger()] == [2]
    assert [mark.attempt for mark in await case.marks()] == [1, 2]


async def test_each_asking_of_a_probe_is_recorded_with_its_process_also_one_that_dies(bench: Bench) -> None:
    case = await bench.start([("vague", "act,kill")])
    assert (await case.outcome()).status == "completed"
    told = [stored.event for stored in await case.events() if isinstance(stored.event, ToolCallProbed)]
    assert [(event.answer, event.pid) for event in told] == [
        (answer, line.pid) for answer, line in zip(("unknown", "happened"), case.ledger("probe"), strict=True)
    ]
    assert "the probe's process died" in told[0].why and told[0].node
    assert len(case.ledger()) == len(case.ledger("begin")) == 1


@pytest.mark.parametrize("death", ["first-kill", "first-exit", "first-sysexit"])
async def test_a_send_that_nobody_can_tell_about_is_put_to_a_person_whose_word_is_its_result(
    bench: Bench, death: str
) -> None:
    case = await bench.start([("blind", f"act,{death}")])
    assert (await case.outcome()).status == "awaiting_approval"
    (question,) = await bench.runtime.questions(case.run.run_id)
    assert (question.kind, question.tool_call_id, question.tool) == ("settlement", "t0c0", "blind")
    run = await bench.runtime.settle(case.run.run_id, "happened", result="seen at the bank", by="ann")
    assert (await run.outcome()).status == "completed"
    (result,) = await case.results()
    assert (result.source, result.content) == ("person", '"seen at the bank"')
    assert len(case.ledger()) == len(case.ledger("begin")) == 1
    await case.check_log()


async def test_a_send_that_did_not_happen_by_a_persons_word_is_sent_by_a_new_attempt(bench: Bench) -> None:
    case = await bench.start([("blind", "first-kill,act")])
    assert (await case.outcome()).status == "awaiting_approval"
    run = await bench.runtime.settle(case.run.run_id, "not_happened", by="ann")
    assert (await run.outcome()).status == "completed"
    (effect,) = case.ledger()
    assert [line.attempt for line in case.ledger("begin")] == [1, 2] and effect.attempt == 2
    await case.check_log()


async def test_a_journal_killed_in_mid_send_settles_the_call_by_its_probe(bench: Bench) -> None:
    case = await bench.start([("send", "act,wait")])
    await case.acted()
    old = await bench.lease("journal")
    kill(old.pid)
    await bench.replaced(old)
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger()) == 1
    assert (await case.results())[0].source == "probe"
    await case.check_log()


async def test_a_supervisor_killed_in_mid_run_disturbs_nobody(bench: Bench) -> None:
    case = await bench.start([("put", "wait,act")], [("send", "act")])
    await case.begun()
    old = await bench.lease("supervisor")
    kill(old.pid)
    await bench.replaced(old)
    case.go()
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger()) == 2
    assert (await case.kinds()).count("run_claimed") == 1


async def test_a_frozen_run_actor_is_replaced_and_what_it_wakes_up_to_is_not_its_own(bench: Bench) -> None:
    case = await bench.start([("send", "wait,act")], [("send", "act")])
    await case.begun()
    pid, _ = await bench.holder(case.run.run_id)
    os.kill(pid, signal.SIGSTOP)
    other, _ = await bench.holder(case.run.run_id)
    assert other != pid
    case.go()
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger()) == 2
    claims = [stored.event for stored in await case.events() if stored.event.type == "run_claimed"]
    assert [claim.reason for claim in claims] == ["start", "hung"]
    await case.check_log()


async def test_a_frozen_journal_is_killed_and_the_runs_go_on(bench: Bench) -> None:
    case = await bench.start([("send", "act,wait")], [("put", "act")])
    await case.acted()
    old = await bench.lease("journal")
    os.kill(old.pid, signal.SIGSTOP)
    await bench.replaced(old)
    case.go()
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger()) == 2
    await case.check_log()


async def test_a_run_that_kills_its_actor_ends_as_crash_loop_and_the_others_complete(bench: Bench) -> None:
    fatal = await bench.start("die")
    others = [await bench.start([("put", "act")]) for _ in range(4)]
    assert [(await case.outcome()).status for case in others] == ["completed"] * 4
    outcome = await fatal.outcome()
    assert (outcome.status, outcome.error) == ("failed", "crash_loop")
    claims = [stored.event for stored in await fatal.events() if stored.event.type == "run_claimed"]
    assert sum(claim.charged for claim in claims) == bench.runtime.settings.respawns_max


async def test_a_send_longer_than_every_lease_is_dispatched_once(bench: Bench) -> None:
    case = await bench.start([("send", "wait,act")])
    await case.begun()
    first = await bench.lease("supervisor")

    async def renewed() -> bool:
        return (await bench.lease("supervisor")).expires_at > first.expires_at + 2 * bench.runtime.settings.lease_s

    from .ray_kit import until

    await until(renewed, "two lease periods")
    case.go()
    assert (await case.outcome()).status == "completed"
    assert len(case.ledger("begin")) == len(case.ledger()) == 1


async def test_tools_that_do_not_end_are_stopped_at_their_timeout_and_hold_up_nobody(bench: Bench) -> None:
    ways = [("glance", "sleep"), ("glance", "spin"), ("dart", "sleep"), ("glance", "grind"), ("dart", "grind")]

    async def begun(name: str, how: str) -> Case:
        case = await bench.start([(name, f"{how},act")])
        await case.begun()
        return case

    endless = [await begun(*way) for way in ways[:-1]]
    grinding = endless[-1]  # it holds one of the two CPUs that there are at least
    others = [await bench.start([("put", "act")]) for _ in range(5)]
    for case in others:
        assert (await case.outcome()).status == "completed"
    endless.append(await begun(*ways[-1]))
    for case, (name, how) in zip(endless, ways, strict=True):
        assert (await case.outcome()).status == "completed"
        (result,) = [stored for stored in await case.events() if isinstance(stored.event, ToolResult)]
        assert isinstance(result.event, ToolResult) and result.event.is_error and result.event.source == "timeout"
        limit_s = TIMEOUT_S + (GRACE_S if how == "grind" else 0)
        assert abs((result.event.took_s or 0) - limit_s) < SLACK_S
        assert name == "dart" or abs(result.at - case.ledger("begin")[0].at - limit_s) < SLACK_S
        assert case.ledger() == [] and len(case.ledger("begin")) == 1, "it is neither done nor begun again"
        assert result.event.pid == case.ledger("begin")[0].pid
        assert len(case.ledger("probe")) == (name == "dart") == (await case.kinds()).count("tool_call_probed")
    ends = [stored.at for case in others for stored in await case.events() if isinstance(stored.event, RunCompleted)]
    assert max(ends) < grinding.ledger("begin")[0].at + TIMEOUT_S + GRACE_S


async def test_a_model_call_that_dies_with_its_actor_is_charged_as_reserved_in_its_budget(bench: Bench) -> None:
    runtime, folder = bench.runtime, bench.folder / "shared"
    folder.mkdir()
    await runtime.budget("b", tokens=40_000)
    request = Request({"turns": ["hold"]}, budget="b", metadata={"dir": str(folder)})
    case = Case(bench, folder, (await runtime.launch_many(bench.loaded, [request]))[0])

    async def standing(estimated: bool) -> Budget | None:
        budget = await runtime.budget("b")
        return budget if budget.held.tokens and bool(budget.estimated.tokens) is estimated else None

    before: Budget = await until(lambda: standing(False), "a reservation")
    kill((await bench.holder(case.run.run_id))[0])
    after: Budget = await until(lambda: standing(True), "the call that died is charged, and another is made")
    assert after.spent == after.estimated == before.held == Amount(after.held.tokens)
    case.go()
    assert (await case.outcome()).status == "completed"
    assert await runtime.budget("b") == Budget("b", before.cap, after.spent, Amount(), after.estimated)
    kinds = await case.kinds()
    assert (kinds.count("budget_reserved"), kinds.count("assistant_message")) == (3, 2)
    await case.check_log()
