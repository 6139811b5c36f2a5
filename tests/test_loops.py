"""Repetition: a circle is caught within a bound, whatever it looks like; progress never is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, islice

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perdure.actors.loops import PERIOD_MAX, Loop, Made, call_hash, explanation, looping, outcome_of, went_on, window

World = Callable[[str, int], str]
"""What a call of a tool says the nth time that anything is executed."""


def steady(tool: str, nth: int) -> str:
    return f"{tool} says the same"


def moving(tool: str, nth: int) -> str:
    return f"state {nth}"


def drive(turns: Iterator[Sequence[str]], world: World = steady, repeats: int = 3, limit: int = 60) -> list[Made]:
    """The calls of an agent that makes these turns until it is stopped, or `limit` turns have gone by."""
    past: list[Made] = []
    executed = 0
    for turn, names in enumerate(islice(turns, limit)):
        calls = [call_hash(name, "{}") for name in names]
        loop = looping(past[-window(repeats) - 2 * len(names) :], calls, repeats)
        for n, name in enumerate(names):
            caught = loop is not None and n < loop.calls
            executed += not caught
            said = explanation(loop, repeats) if loop and caught else world(name, executed)
            past.append(Made(turn, name, calls[n], outcome_of(said, caught, "loop" if caught else "tool"), caught))
        if went_on(past):
            break
    return past


def one_by_one(names: str) -> Iterator[Sequence[str]]:
    return cycle(list(names))


def shown(past: list[Made]) -> str:
    """The calls as text, an intercepted one in parentheses."""
    return "".join(f"({made.tool})" if made.intercepted else made.tool for made in past)


def test_the_third_like_call_is_not_executed_and_the_fourth_ends_the_run() -> None:
    past = drive(one_by_one("A"))
    assert shown(past) == "AA(A)(A)" and "(A)" in went_on(past)
    assert shown(drive(one_by_one("A"), repeats=5)) == "AAAA(A)(A)"


def test_two_calls_in_turn_are_a_loop() -> None:
    assert shown(drive(one_by_one("AB"))) == "ABAB(A)(B)"
    assert shown(drive(cycle([["A", "B"]]))) == "ABAB(A)(B)(A)(B)", "side by side as one after the other"
    assert shown(drive(cycle([["A", "B"], ["B", "A"]]))) == "ABBAABBA(A)(B)(B)(A)", "in whatever order"


def test_like_calls_side_by_side_are_no_loop_until_their_results_are_known() -> None:
    assert shown(drive(iter([["A", "A", "A", "A"]]))) == "AAAA"
    assert shown(drive(iter([["A", "A", "A"], ["A", "B"]]))) == "AAA(A)B"


def test_after_a_warning_something_else_may_be_tried_and_then_the_call_again() -> None:
    past = drive(iter([*"AAA", "E", *"AAA", "A"]))
    assert shown(past) == "AA(A)EAA(A)(A)", "the call runs again once something else was done"
    mixed = drive(iter([*"AAA", ["A", "E"], "A"]))
    assert shown(mixed) == "AA(A)(A)EA" and not went_on(mixed), "a turn with something new in it ends nothing"


def test_a_circle_of_warnings_is_a_circle() -> None:
    past = drive(one_by_one("AAAE"))
    assert went_on(past) and len(past) < 20


def test_other_arguments_or_another_result_are_no_loop() -> None:
    past = [Made(n, "look", call_hash("look", f'{{"page":{n}}}'), "same") for n in range(9)]
    assert looping(past, [call_hash("look", '{"page":9}')], 3) is None
    same = call_hash("look", "{}")
    assert looping([Made(0, "look", same, "one"), Made(1, "look", same, "two")], [same], 3) is None
    assert looping([Made(0, "look", same, "one"), Made(1, "look", same, "one")], [same], 3) is not None


def test_a_result_that_goes_back_and_forth_is_a_change() -> None:
    assert not any(made.intercepted for made in drive(one_by_one("A"), lambda tool, nth: f"{nth % 2}"))


def test_crashes_and_timeouts_are_alike_whatever_they_tell_of_their_process() -> None:
    assert outcome_of("pid 1 died", True, "crash") == outcome_of("pid 2 died", True, "crash")
    assert outcome_of("pid 1", False, "tool") != outcome_of("pid 2", False, "tool")
    assert outcome_of("x", True, "tool") != outcome_of("x", False, "tool")
    assert outcome_of("x", False, "probe") == outcome_of("x", False, "tool")


def test_it_can_be_switched_off() -> None:
    assert looping([Made(n, "A", "a", "same") for n in range(50)], ["a"], None) is None


def test_the_explanation_names_the_calls_and_says_what_to_do() -> None:
    past = [Made(n, tool, tool, "same") for n, tool in enumerate(["look", "poke"] * 2)]
    loop = looping(past, ["look"], 3)
    assert loop is not None and loop.cycle == ("look", "poke")
    assert "look, poke" in (text := explanation(loop, 3)) and "2 times in a row" in text and "ends the run" in text


def made(names: str, warned: str = "") -> list[Made]:
    seen = [Made(n, name, name, "same") for n, name in enumerate(names)]
    return seen + [Made(len(seen), name, name, "loop", intercepted=True) for name in warned]


def test_the_shortest_of_several_cycles_is_named() -> None:
    assert looping(made("A" * 8), ["A"], 3) == Loop(1, ("A",))


def test_after_a_warning_only_the_cycle_that_it_was_about_counts() -> None:
    assert looping(made("BAABAA", warned="A"), ["A", "A", "B"], 3) == Loop(2, ("A",))


@given(st.text("ABCD", min_size=1, max_size=PERIOD_MAX), st.integers(3, 5), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_an_endless_circle_is_caught_within_a_bound(names: str, repeats: int, width: int) -> None:
    endless = cycle(names)
    turns = (list(islice(endless, width)) for _ in count())
    past = drive(turns, repeats=repeats)
    assert went_on(past)
    assert len(past) <= len(names) * (repeats - 1) + 3 * width


@given(st.lists(st.lists(st.sampled_from("AB"), min_size=1, max_size=3), max_size=20), st.integers(3, 5))
@settings(max_examples=80, deadline=None)
def test_a_poll_whose_result_changes_is_never_caught(turns: list[list[str]], repeats: int) -> None:
    assert not any(made.intercepted for made in drive(iter(turns), moving, repeats))


@given(st.text("ABC", max_size=30), st.integers(3, 5))
@settings(max_examples=80, deadline=None)
def test_nothing_is_caught_that_has_not_been_seen_often_enough(names: str, repeats: int) -> None:
    past = drive(iter(names), repeats=repeats)
    for n, made in enumerate(past):
        if made.intercepted:
            before = [other for other in past[:n] if other.call == made.call]
            assert len(before) >= repeats - 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def reordered(value: object) -> object:
    if isinstance(value, dict):
        return {key: reordered(inner) for key, inner in reversed(value.items())}
    return [reordered(inner) for inner in value] if isinstance(value, list) else value


@given(json_values, json_values)
@settings(max_examples=80, deadline=None)
def test_reordered_keys_are_equal_and_other_values_are_not(one: object, other: object) -> None:
    assert call_hash("t", json.dumps(one)) == call_hash("t", json.dumps(reordered(one), indent=1))
    assert call_hash("t", json.dumps(one)) != call_hash("u", json.dumps(one))
    assume(json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True))
    assert call_hash("t", json.dumps(one)) != call_hash("t", json.dumps(other))


def test_arguments_that_are_not_json_are_compared_as_they_stand() -> None:
    assert call_hash("t", "{NaN") == call_hash("t", "{NaN") != call_hash("t", "{NaN ")
    assert call_hash("t", "NaN") == call_hash("t", "NaN")
