"""One budget for many runs: what the log makes of reservations, and what the owners of runs make of a budget."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.actors.model import ModelError, ModelReply, ModelRequest
from perdure.actors.requests import Execute, Executed, Start
from perdure.actors.run import Owner
from perdure.store.budgets import Amount, Budget, Cap, reserved, tokens
from perdure.store.errors import PerdureError
from perdure.store.events import (
    AssistantMessage,
    BudgetReleased,
    BudgetReserved,
    CancelRequested,
    Event,
    RunCancelled,
    RunFailed,
    RunRequeued,
    TurnStarted,
    Usage,
)
from perdure.store.log import Accepted, Append, Cancel, Command, EventLog, Refused, Requeue
from perdure.store.memory import MemoryLog
from perdure.store.sql import open_log
from perdure.store.states import Status

from .fakes import ManualClock, accepted, claim, created, give_lease, loader, new_run
from .limit_kit import Play, turn
from .limit_kit import call as call_of
from .store_kit import KINDS, Clock, open_kind

PRICED = "anthropic:claude-3-5-haiku-latest"


@pytest.fixture(params=KINDS)
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EventLog]:
    log = await open_kind(request.param, tmp_path, Clock())
    yield log
    await log.close()


async def only(log: EventLog) -> Budget:
    (budget,) = await log.budgets()
    return budget


# -- the log ----------------------------------------------------------------------------------------------

SMALL = Amount(10, Decimal("0.0000001"))
ROOMY = Cap(100)


def call(index: int = 0, size: int = 10, cost: Decimal | None = SMALL.cost) -> tuple[Event, ...]:
    return (
        TurnStarted(turn_index=index),
        BudgetReserved(turn_index=index, prompt_tokens=size, output_tokens=0, cost=cost),
    )


def answered(index: int = 0, took: int = 4, cost: Decimal | None = Decimal("0.00000003")) -> AssistantMessage:
    usage = Usage(input_tokens=1, output_tokens=took - 1)
    return AssistantMessage(turn_index=index, text="hm", stop_reason="end_turn", usage=usage, cost=cost)


async def a_run(log: EventLog, run_id: str = "r1", cap: Cap = ROOMY) -> int:
    await log.cap_budget("b", {"tokens": cap.tokens, "cost": cap.cost})
    await new_run(log, created(budget="b"), run_id)
    return await claim(log, run_id)


async def test_a_call_holds_its_reservation_and_its_message_settles_it_once(log: EventLog) -> None:
    epoch = await a_run(log)
    asks, tells = Append("r1", epoch, 2, call()), Append("r1", epoch, 4, (answered(),))
    for _ in range(2):
        await accepted(log, asks)
        assert await only(log) == Budget("b", Cap(100), held=SMALL)
    for _ in range(2):
        await accepted(log, tells)
        assert await only(log) == Budget("b", Cap(100), spent=Amount(4, Decimal("0.00000003")))
    row = await log.run("r1")
    assert row and (row.budget, row.held) == ("b", None)


async def test_a_call_and_its_answer_may_come_in_one_append_or_be_found_half_there(log: EventLog) -> None:
    epoch = await a_run(log)
    both = (*call(), answered())
    await accepted(log, Append("r1", epoch, 2, both[:2]))
    await accepted(log, Append("r1", epoch, 2, both))
    assert (await only(log)).taken == Amount(4, Decimal("0.00000003"))


async def test_a_call_that_died_with_its_owner_is_charged_as_reserved_when_its_run_is_claimed(log: EventLog) -> None:
    epoch = await a_run(log)
    await accepted(log, Append("r1", epoch, 2, call()))
    await claim(log, "r1")
    assert await only(log) == Budget("b", Cap(100), spent=SMALL, estimated=SMALL)
    (late,) = await log.commit([Append("r1", epoch, 4, (answered(),))])
    assert isinstance(late, Refused), "an answer that comes after all changes nothing"
    assert (await only(log)).spent == SMALL


async def test_the_end_of_a_run_charges_what_it_holds(log: EventLog) -> None:
    epoch = await a_run(log)
    await accepted(log, Append("r1", epoch, 2, call()))
    await accepted(log, Cancel("r1", CancelRequested(by="me")))
    assert (await only(log)).held == SMALL, "its owner may still hear the answer"
    await accepted(log, Append("r1", epoch, 5, (RunCancelled(reason="me"),)))
    assert await only(log) == Budget("b", Cap(100), spent=SMALL, estimated=SMALL)


async def test_what_does_not_fit_is_refused_with_the_budget_and_leaves_nothing(log: EventLog) -> None:
    await a_run(log, cap=Cap(15))
    second = await a_run(log, "r2", Cap(15))
    await accepted(log, Append("r1", 1, 2, call()))
    (refused,) = await log.commit([Append("r2", second, 2, call())])
    assert isinstance(refused, Refused) and refused.reason == "budget"
    assert refused.budget == Budget("b", Cap(15), held=SMALL) == pickle.loads(pickle.dumps(refused)).budget
    assert (await only(log)).held == SMALL and len(await log.read("r2")) == 2
    await log.cap_budget("b", {"tokens": 20})
    await accepted(log, Append("r2", second, 2, call()))
    assert (await only(log)).held == SMALL + SMALL


async def test_two_calls_of_one_group_do_not_both_get_the_last_of_a_budget(log: EventLog) -> None:
    epochs = [await a_run(log, f"r{n}", Cap(15)) for n in range(3)]
    verdicts = await log.commit([Append(f"r{n}", epochs[n], 2, call()) for n in range(3)])
    assert [isinstance(verdict, Accepted) for verdict in verdicts] == [True, False, False]


async def test_transactions_at_once_do_not_pass_the_cap(log: EventLog) -> None:
    epochs = [await a_run(log, f"r{n}", Cap(45)) for n in range(9)]
    asked = (log.commit([Append(f"r{n}", epochs[n], 2, call())]) for n in range(9))
    verdicts = [verdict for (verdict,) in await asyncio.gather(*asked)]
    assert sum(isinstance(verdict, Accepted) for verdict in verdicts) == 4
    assert (await only(log)).held.tokens == 40


async def test_a_call_without_a_price_gets_nothing_of_a_budget_in_dollars(log: EventLog) -> None:
    epoch = await a_run(log, cap=Cap(None, Decimal(1)))
    (refused,) = await log.commit([Append("r1", epoch, 2, call(cost=None))])
    assert isinstance(refused, Refused) and refused.reason == "budget"


async def test_a_run_of_a_budget_that_there_is_not_is_not_created(log: EventLog) -> None:
    with pytest.raises(AssertionError, match="no budget 'b'"):
        await new_run(log, created(budget="b"))


async def test_a_cap_is_changed_and_what_is_spent_stays(log: EventLog) -> None:
    epoch = await a_run(log)
    await accepted(log, Append("r1", epoch, 2, (*call(), answered())))
    await log.cap_budget("b", {"cost": Decimal("0.5")})
    assert (await only(log)).cap == Cap(100, Decimal("0.5"))
    assert (await log.cap_budget("b", {"tokens": None})) == (await only(log)) != Budget("b")
    assert (await only(log)).spent.tokens == 4


RUNS = 3
MOVES = "ask", "ask", "tell", "free", "claim", "end"
moves = st.lists(
    st.tuples(
        st.integers(0, RUNS - 1), st.sampled_from(["ask", "ask", "tell", "free", "claim", "end"]), st.integers(0, 40)
    ),
    max_size=30,
)


@given(st.integers(0, 90), st.decimals(0, 1, places=7), moves)
@settings(max_examples=20, deadline=None)
def test_runs_together_never_pass_the_cap_and_the_row_is_the_sum_of_the_logs(
    most: int, money: Decimal, script: list[tuple[int, str, int]]
) -> None:
    async def play(log: EventLog) -> Budget:
        for n in range(RUNS):
            await a_run(log, f"r{n}", Cap(most, money))
        for n, move, size in script:
            await step(log, f"r{n}", move, size)
            budget = await only(log)
            assert budget.cap.allows(budget.taken), "calls that keep to their reservations never pass a cap"
        await check(log)
        return await only(log)

    async def both() -> None:
        with TemporaryDirectory() as folder:
            sql = await open_log(Path(folder) / "runs.db")
            try:
                assert await play(sql) == await play(MemoryLog())
            finally:
                await sql.close()

    asyncio.run(both())


async def step(log: EventLog, run_id: str, move: str, size: int) -> None:
    """One move of a run, as far as it can make it now; sent twice, as if its answer had been lost."""
    row = await log.run(run_id)
    assert row
    if row.status is Status.FAILED:
        await accepted(log, Requeue(run_id, RunRequeued(by="me")))
    if row.status is Status.FAILED or move == "claim":
        await claim(log, run_id)
        return
    events: tuple[Event, ...] = ()
    price = Decimal(size) * SMALL.cost
    if move == "ask":
        started = sum(isinstance(stored.event, TurnStarted) for stored in await log.read(run_id)) > row.turns
        events = call(row.turns, size, price)[started:]
    elif move == "tell" and row.held:
        took = max(1, row.held.tokens * size // 40)
        events = (answered(row.turns, took, row.held.cost * size / 40),) if row.held.tokens else ()
    elif move == "free" and row.held:
        events = (BudgetReleased(turn_index=row.turns),)
    elif move == "end":
        events = (RunFailed(code="x", message="x", phase="model"),)
    command: Command = Append(run_id, row.epoch, row.seq, events)
    first, second = (await log.commit([command]))[0], (await log.commit([command]))[0]
    assert isinstance(first, Accepted) == isinstance(second, Accepted)


async def check(log: EventLog) -> None:
    """The budget is what the logs of its runs say."""
    spent, held, estimated = Amount(), Amount(), Amount()
    for n in range(RUNS):
        holds: Amount | None = None
        for stored in await log.read(f"r{n}"):
            event = stored.event
            if isinstance(event, AssistantMessage) and holds:
                spent += Amount(tokens(event.usage), event.cost or Decimal(0))
                holds = None
            elif event.type == "budget_released":
                holds = None
            elif holds and event.type in ("budget_reserved", "run_claimed", "run_failed"):
                spent, estimated = spent + holds, estimated + holds
                holds = None
            if isinstance(event, BudgetReserved):
                holds = reserved(event)
        row = await log.run(f"r{n}")
        assert row and row.held == holds
        held += holds or Amount()
    budget = await only(log)
    assert (budget.spent, budget.held, budget.estimated) == (spent, held, estimated)


# -- owners -----------------------------------------------------------------------------------------------


async def shared(log: EventLog, replies: list[ModelReply], number: int = 0) -> Play:
    await give_lease(log)
    play = Play(replies, log=log, run_id=f"{number:020}", price_as=PRICED)
    play.fields = {"budget": "b"}
    return play


async def test_a_call_is_reserved_before_the_model_is_asked_and_charged_with_what_it_took() -> None:
    log = MemoryLog(ManualClock())
    await log.cap_budget("b", {"cost": Decimal(1)})
    play = await shared(log, [turn(text="done", input_tokens=50, output_tokens=7)])
    held: list[Budget] = []

    async def model(request: ModelRequest) -> ModelReply:
        held.append(await only(log))
        return play.turns[0]

    play.agent = play.agent.model_copy(update={"model": model})
    assert (await play.drive()).status is Status.COMPLETED
    assert held[0].held.tokens > 57 and not held[0].spent.tokens
    budget, state = await only(log), await play.state()
    assert budget.spent == state.used == Amount(57, state.cost) and state.cost > 0
    assert not budget.held.tokens and not budget.estimated.tokens


async def test_a_run_that_does_not_fit_fails_says_which_budget_and_goes_on_with_a_higher_cap() -> None:
    log = MemoryLog(ManualClock())
    await log.cap_budget("b", {"tokens": 10})
    play = await shared(log, [turn(text="done", input_tokens=5)])
    ended = await play.drive()
    assert isinstance(ended.end, RunFailed) and ended.end.code == "budget_exceeded"
    assert "'b'" in ended.end.message and "0 of 10 tokens" in ended.end.message
    assert not play.shown and not any(isinstance(event, TurnStarted) for event in await play.events())
    await log.cap_budget("b", {"tokens": 5_000})
    assert (await play.resume()).status is Status.COMPLETED
    assert (await only(log)).spent == Amount(5, (await play.state()).cost)


async def test_the_last_answer_is_cut_to_what_is_left() -> None:
    log = MemoryLog(ManualClock())
    await log.cap_budget("b", {"tokens": 2_000})
    play = await shared(log, [turn(text="done", input_tokens=5)])
    await play.drive()
    (request,) = play.shown
    assert request.max_output_tokens and 0 < request.max_output_tokens < 2_000
    brief = await shared(log, [turn(text="done")], 1)
    brief.agent = brief.agent.model_copy(update={"model_settings": {"max_tokens": 7}})
    await brief.drive()
    assert brief.shown[0].max_output_tokens == 7


async def test_many_runs_at_once_wait_for_each_other_and_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.actors.shares.PAUSE_S", (0.0, 0.01))
    log = MemoryLog(ManualClock())
    await log.cap_budget("b", {"tokens": 10_000})
    plays = [await shared(log, [turn(text="done", input_tokens=100)], n) for n in range(5)]
    seen: list[Budget] = []
    for play in plays:

        async def model(request: ModelRequest) -> ModelReply:
            seen.append(await only(log))
            await asyncio.sleep(0.03)
            return turn(text="done", input_tokens=100)

        play.agent = play.agent.model_copy(update={"model": model})
    ends = await asyncio.gather(*(play.drive() for play in plays))
    assert [end.status for end in ends] == [Status.COMPLETED] * 5
    assert all(budget.cap.allows(budget.taken) for budget in seen) and len(seen) == 5
    assert (await only(log)).spent.tokens == 500


@pytest.mark.parametrize("number", range(1, 4))
async def test_an_append_whose_answer_is_lost_charges_nothing_twice(number: int) -> None:
    log = MemoryLog(ManualClock())
    await log.cap_budget("b", {"tokens": 50_000})
    play, count = await shared(log, [turn(call_of(), input_tokens=9), turn(text="done", input_tokens=3)]), 0
    answers = play._journal

    async def losing(asked: Execute) -> Executed:
        nonlocal count
        done, count = await answers(asked), count + 1
        if count == number:
            raise PerdureError("the answer was lost")
        return done

    play._journal = losing  # type: ignore[method-assign]
    assert (await play.drive()).status is Status.COMPLETED
    assert count > number, "an answer was lost"
    budget = await only(log)
    assert (budget.spent.tokens, budget.held.tokens, budget.estimated.tokens) == (12, 0, 0)
    asked = [event for event in await play.events() if isinstance(event, BudgetReserved)]
    assert [event.turn_index for event in asked] == [0, 1]


async def test_a_call_that_its_provider_does_not_take_costs_nothing_and_one_that_fails_is_charged_as_reserved() -> None:
    for number, (code, free) in enumerate((("bad_key", True), ("unavailable", False))):
        log = MemoryLog(ManualClock())
        await log.cap_budget("b", {"tokens": 50_000})
        play = await shared(log, [], number)

        async def model(request: ModelRequest, code: str = code) -> ModelReply:
            raise ModelError("no", code)

        play.agent = play.agent.model_copy(update={"model": model})
        ended = await play.drive()
        assert isinstance(ended.end, RunFailed) and ended.end.code == code
        budget = await only(log)
        assert budget.spent == budget.estimated and not budget.held.tokens
        assert (budget.spent == Amount()) is free


async def test_a_cancelled_call_is_charged_as_reserved() -> None:
    log = MemoryLog(ManualClock())
    await log.cap_budget("b", {"tokens": 50_000})
    play = await shared(log, [turn(text="done")])

    async def model(request: ModelRequest) -> ModelReply:
        await accepted(log, Cancel(play.run_id, CancelRequested(by="me")))
        owner.look()
        await asyncio.sleep(60)
        raise AssertionError("nobody waits so long")

    play.agent = play.agent.model_copy(update={"model": model})
    await new_run(log, created(config=play.agent.snapshot(), budget="b"), play.run_id)
    start = Start(play.run_id, await claim(log, play.run_id), tuple(await log.read(play.run_id)))
    owner = Owner(start, play._journal, loader(play.agent))
    assert (await owner.drive()).status is Status.CANCELLED
    budget = await only(log)
    assert budget.spent == budget.estimated != Amount() and not budget.held.tokens
