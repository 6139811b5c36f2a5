"""Ceilings, the last turn and budgets: what is let through, what is refused, and how a run ends that has none left."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from perdure.actors.budgets import (
    HIDDEN_TOKENS,
    Share,
    amount,
    breach,
    expected_next,
    output_room,
    prompt_at_most,
    share,
    smaller_share,
)
from perdure.actors.ceilings import Answer, final_answer, final_notice, is_final, over, takes_place, turns_left
from perdure.actors.guards import (
    Limits,
    Refused,
    Standing,
    Stop,
    TurnPlan,
    Wanted,
    after_final,
    judge_calls,
    limits_of,
    plan_turn,
)
from perdure.actors.loops import Made, call_hash
from perdure.actors.prices import PriceList, Rate
from perdure.store.budgets import Amount, Budget, Cap
from perdure.store.events import Usage

PRICES = PriceList(
    model="test",
    input=Rate(base=Decimal(3)),
    output=Rate(base=Decimal(15)),
    cache_creation_input=Rate(base=Decimal("3.75")),
    cache_read_input=Rate(base=Decimal("0.3")),
)
RAN = ("tool", "crash", "timeout", "probe", "cancel", "policy", "rejection", "person", None)

# -- limits -----------------------------------------------------------------------------------------------


def test_a_log_without_limits_has_the_default_ones() -> None:
    assert limits_of(None) == Limits() == limits_of({})
    assert limits_of({"max_turns": 7}).max_turns == 7
    assert (Limits().max_turns, Limits().max_repeats, Limits().max_cost) == (50, 3, None)


@pytest.mark.parametrize("given", ["0.1", 0.1, Decimal("0.1")])
def test_a_cost_limit_is_exact_however_it_is_written_and_survives_the_store(given: Any) -> None:
    limits = Limits(max_cost=given)
    assert limits.max_cost == Decimal("0.1")
    stored = limits.model_dump(mode="json")
    assert stored["max_cost"] == "0.1" and limits_of(stored) == limits


def test_each_resume_overlays_what_it_changes() -> None:
    limits = limits_of({"max_turns": 5, "max_cost": "1"}, [{"max_turns": 8}, {"max_cost": "2.5"}, {"max_cost": None}])
    assert (limits.max_turns, limits.max_cost) == (8, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_turns": 0},
        {"max_cost": "-1"},
        {"max_cost": "NaN"},
        {"max_tokens": 0},
        {"max_repeats": 2},
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"max_wishes": 3},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        limits_of(wrong)


# -- calls ------------------------------------------------------------------------------------------------


def verdicts(limits: Limits, calls: int, standing: Standing | None = None) -> list[str]:
    wanted = [Wanted("look", f'{{"n":{n}}}') for n in range(calls)]
    return [refused.why if refused else "" for refused in judge_calls(limits, standing or Standing(), (), wanted)]


def test_of_eight_calls_six_run_and_two_are_told_which_limit_it_is() -> None:
    for limits in (Limits(max_tool_calls=6), Limits(max_tool_calls_per_turn=6)):
        said = verdicts(limits, 8)
        assert [bool(why) for why in said] == [False] * 6 + [True] * 2
        assert "6 tool calls" in said[6]


def test_a_raised_limit_lets_a_run_go_on_from_where_it_was() -> None:
    stood = Standing(turn_count=1, tools=("look",) * 6)
    assert all(verdicts(Limits(max_tool_calls=6), 3, stood))
    assert [bool(why) for why in verdicts(Limits(max_tool_calls=8), 3, stood)] == [False, False, True]


def test_a_call_counts_unless_it_was_never_let_through() -> None:
    assert all(takes_place(source) for source in RAN)
    assert not any(takes_place(source) for source in ("validation", "limit", "loop"))


def test_a_call_that_does_not_fit_takes_no_place() -> None:
    calls = [Wanted("gone", "{}", fits=False), Wanted("look", "{}"), Wanted("look", '{"n":1}')]
    assert [bool(it) for it in judge_calls(Limits(max_tool_calls=1), Standing(), (), calls)] == [False, False, True]


@given(st.integers(0, 12), st.integers(0, 12), *[st.none() | st.integers(0, 12)] * 2)
def test_the_first_calls_of_a_turn_run_as_far_as_both_limits_reach(
    wanted: int, taken: int, per_turn: int | None, in_all: int | None
) -> None:
    said = over(wanted, taken, per_turn, in_all)
    room = wanted if per_turn is None else min(wanted, per_turn)
    room = room if in_all is None else min(room, max(0, in_all - taken))
    assert [not why for why in said] == [True] * room + [False] * (wanted - room)


def test_a_looping_call_takes_no_place_and_is_told_so_even_if_it_does_not_fit() -> None:
    past = [Made(n, "look", call_hash("look", '{"b":1,"a":2}'), "same") for n in range(2)]
    calls = [Wanted("look", '{"a":2,"b":1}', fits=False), Wanted("poke", "{}")]
    first, second = judge_calls(Limits(max_tool_calls=1), Standing(turn_count=2), past, calls)
    assert isinstance(first, Refused) and first.source == "loop" and second is None
    calls[0] = calls[0]._replace(fits=True)
    assert judge_calls(Limits(max_tool_calls=1), Standing(turn_count=2), past, calls) == (first, None)
    assert judge_calls(Limits(max_repeats=None), Standing(turn_count=2), past, calls) == (None, None)


# -- turns ------------------------------------------------------------------------------------------------


def test_the_last_turn_has_a_notice_and_no_tools() -> None:
    plans = [plan_turn(Limits(max_turns=3), Standing(turn_count=turn)) for turn in range(4)]
    assert [plan.final if isinstance(plan, TurnPlan) else plan.code for plan in plans] == [
        False,
        False,
        True,
        "max_turns",
    ]
    assert isinstance(plans[1], TurnPlan) and "2 of 3" in plans[1].turns_left
    assert isinstance(plans[2], TurnPlan) and plans[2].notice == final_notice(3)


def test_a_run_of_one_turn_keeps_its_tools() -> None:
    plan = plan_turn(Limits(max_turns=1), Standing())
    assert isinstance(plan, TurnPlan) and not plan.final and turns_left(0, 1) == "This is the last turn."


def test_calls_in_the_last_turn_are_answered_and_not_executed() -> None:
    said = verdicts(Limits(max_turns=4), 2, Standing(turn_count=3))
    assert len(said) == 2 and all("last turn" in why for why in said)
    assert not any(verdicts(Limits(max_turns=9), 2, Standing(turn_count=3))), "a raised limit moves the last turn"


@given(st.integers(0, 60), st.integers(1, 50))
def test_a_run_has_one_last_turn_and_it_is_the_one_before_none_is_left(turn: int, max_turns: int) -> None:
    plan = plan_turn(Limits(max_turns=max_turns), Standing(turn_count=turn))
    assert isinstance(plan, Stop) == (turn >= max_turns)
    if isinstance(plan, TurnPlan):
        assert plan.final == is_final(turn, max_turns) == (turn == max_turns - 1 and max_turns > 1)


def test_the_last_words_are_the_answer_a_hand_over_or_nothing() -> None:
    handed = '{"partial": true, "done": ["a"], "open": ["b"], "next": "c"}'
    expected: JsonValue = {"partial": True, "done": ["a"], "open": ["b"], "next": "c"}
    assert final_answer(handed) == Answer(expected, "partial_progress")
    assert final_answer(f"```json\n{handed}\n```") == Answer(expected, "partial_progress")
    for text in ("42", "[1]", '{"partial": false}', '{"partial": true, "n": NaN}', "It is done."):
        assert final_answer(text) == Answer(text, "final_turn")
    assert final_answer(" \n") is None


def test_a_run_without_a_last_word_fails_and_says_how_far_it_got() -> None:
    standing = Standing(turn_count=3, said="Two of three are sent.", tools=("send", "look", "send"))
    stop = after_final(Limits(max_turns=3), standing, "")
    assert isinstance(stop, Stop) and stop.code == "max_turns"
    for part in ("3 turns", "raise max_turns", "look x1, send x2", "Two of three are sent."):
        assert part in stop.message
    assert len(after_final(Limits(), Standing(said="x" * 9_999), "").message) < 700  # type: ignore[union-attr]


# -- the budget of a run ----------------------------------------------------------------------------------


def test_a_turn_is_not_started_when_the_budget_is_used_up() -> None:
    stop = plan_turn(Limits(max_tokens=100), Standing(used=Amount(100)))
    assert isinstance(stop, Stop) and stop.code == "budget_exceeded" and "100 of 100 tokens" in stop.message
    spent = plan_turn(Limits(max_cost=Decimal("0.5")), Standing(used=Amount(7, Decimal("0.50"))), PRICES)
    assert isinstance(spent, Stop) and "$0.5 of $0.5" in spent.message and "max_cost" in spent.message


def test_a_turn_whose_prompt_would_take_what_is_left_is_not_started() -> None:
    last = Usage(input_tokens=600, output_tokens=100)
    stop = plan_turn(Limits(max_tokens=1400), Standing(1, Amount(700), last))
    assert isinstance(stop, Stop) and "700 tokens does not fit in the 700 tokens left" in stop.message
    plan = plan_turn(Limits(max_tokens=1401), Standing(1, Amount(700), last))
    assert isinstance(plan, TurnPlan) and plan.max_output_tokens == 1


def test_the_answer_is_cut_to_what_the_tighter_budget_pays_for() -> None:
    plan = plan_turn(Limits(max_tokens=500, max_cost=Decimal("0.003")), Standing(), PRICES)
    assert isinstance(plan, TurnPlan) and plan.max_output_tokens == 200
    plan = plan_turn(Limits(max_tokens=100, max_cost=Decimal("0.003")), Standing(), PRICES)
    assert isinstance(plan, TurnPlan) and plan.max_output_tokens == 100
    plan = plan_turn(Limits(), Standing(used=Amount(10**9)))
    assert isinstance(plan, TurnPlan) and plan.max_output_tokens is None


def test_what_was_cached_is_expected_to_be_read_and_not_paid_for_as_new() -> None:
    last = Usage(input_tokens=3, cache_creation_input_tokens=12_304, output_tokens=550)
    assert expected_next(last) == Usage(input_tokens=553, cache_read_input_tokens=12_304)
    assert expected_next(None) == Usage()


def test_a_cap_in_dollars_is_never_kept_without_prices() -> None:
    with pytest.raises(ValueError, match="prices"):
        plan_turn(Limits(max_cost=Decimal(1)), Standing())


counts = st.integers(0, 3_000)
dollars = st.decimals("0", "0.1", places=6)


@given(st.integers(1, 40_000), dollars, st.lists(st.tuples(counts, st.booleans()), max_size=12), counts)
@settings(max_examples=80, deadline=None)
def test_a_run_whose_prompts_are_as_expected_never_passes_its_budget(
    most: int, money: Decimal, answers: list[tuple[int, bool]], begin: int
) -> None:
    cap, used, last = Cap(most, money), Amount(), None
    for wanted, caches in answers:
        prompt = expected_next(last)
        if breach(cap, used, prompt, PRICES):
            break
        room = output_room(cap, used, prompt, PRICES)
        assert room is not None and room > 0
        usage = prompt.model_copy(update={"output_tokens": min(wanted, room)})
        used = used + amount(usage, PRICES)
        assert cap.allows(used)
        last = usage.model_copy(update={"cache_creation_input_tokens": begin}) if caches else usage


# -- a budget that many runs share ------------------------------------------------------------------------


def test_a_share_that_does_not_fit_is_cut_waits_or_is_refused() -> None:
    cap, wanted = Cap(tokens=1_000), share(100, 300, None)
    assert smaller_share(Budget("b", cap, spent=Amount(700)), wanted, None) == share(100, 200, None)
    assert smaller_share(Budget("b", cap, spent=Amount(700), held=Amount(250)), wanted, None) is None
    told = smaller_share(Budget("b", cap, spent=Amount(900), held=Amount(50)), wanted, None)
    assert isinstance(told, str) and "'b'" in told and "900 of 1000 tokens" in told, "nobody waits in vain"


def test_a_model_without_known_prices_gets_no_share_of_a_budget_in_dollars() -> None:
    told = smaller_share(Budget("b", Cap(cost=Decimal(5))), share(1, 1, None), None)
    assert isinstance(told, str) and "prices" in told


def test_a_prompt_is_counted_at_a_token_a_byte_of_what_the_model_has_not_seen() -> None:
    assert prompt_at_most(None, 40, 900) == HIDDEN_TOKENS + 900
    assert prompt_at_most(Usage(input_tokens=200, output_tokens=20), 40, 900) == HIDDEN_TOKENS + 260
    assert prompt_at_most(Usage(), 40, 900) == HIDDEN_TOKENS + 900, "a model that counts nothing tells nothing"


@given(st.integers(0, 5_000), dollars, counts, st.integers(0, 500), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_a_smaller_share_fits_and_is_as_large_as_can_be(
    most: int, money: Decimal, taken: int, prompt: int, output: int
) -> None:
    budget, wanted = (
        Budget("b", Cap(most, money), spent=Amount(taken, Decimal(taken) / 1000)),
        share(prompt, output, PRICES),
    )
    smaller = smaller_share(budget, wanted, PRICES)

    def fits(output: int) -> bool:
        one = share(prompt, output, PRICES)
        return budget.cap.allows(budget.spent + Amount(prompt + output, one.cost or Decimal(0)))

    if isinstance(smaller, Share):
        assert 0 < smaller.output <= output and fits(smaller.output)
        assert smaller.output == output or not fits(smaller.output + 1)
    else:
        assert isinstance(smaller, str) and not fits(1)
