"""Limits, as the owner of a run keeps them: what is executed, what the model is told, how the run ends."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from perdure.actors.ceilings import GOES_ON, final_notice
from perdure.actors.machine import messages
from perdure.actors.model import ModelReply
from perdure.actors.turn import turn_events
from perdure.store.errors import UsageError
from perdure.store.events import (
    Event,
    NoticeInjected,
    RunCompleted,
    RunFailed,
    ToolCallRequested,
    ToolResult,
    TurnStarted,
    Usage,
)
from perdure.store.log import Append
from perdure.store.states import Status

from .fakes import RUN, accepted, check_messages, claim, created, new_run
from .limit_kit import Play, call, same, turn

SONNET = "anthropic:claude-sonnet-4-20250514"

# -- ceilings -----------------------------------------------------------------------------------------------


async def test_calls_over_the_ceiling_are_refused_in_the_append_of_their_turn_and_never_run() -> None:
    play = Play([turn(*(call(x=n) for n in range(8))), turn(text="done")], max_tool_calls=6)
    assert (await play.drive()).status is Status.COMPLETED
    assert play.executed == [f"t0c{n}" for n in range(6)]
    events = await play.events()
    first = next(n for n, event in enumerate(events) if isinstance(event, ToolCallRequested))
    refused = events[first + 8 : first + 10]
    assert [(e.tool_call_id, e.source) for e in refused if isinstance(e, ToolResult)] == [
        ("t0c6", "limit"),
        ("t0c7", "limit"),
    ]
    results = play.shown[1].messages[-1]["results"]
    assert [result["tool_call_id"] for result in results] == [f"t0c{n}" for n in range(8)]
    assert json.loads(results[6]["content"])["error"] == "LimitReached"


async def test_a_raised_ceiling_counts_on_from_where_the_run_stood() -> None:
    play = Play(
        [turn(call(x=1), call(x=2), call(x=3)), turn(call(x=4)), turn(call(x=5), call(x=6)), turn(text="done")],
        max_tool_calls=2,
        max_turns=2,
    )
    assert (await play.drive()).status is Status.FAILED
    assert await play.sources() == ["tool", "tool", "limit", "limit"]
    assert (await play.resume(max_tool_calls=3, max_turns=9)).status is Status.COMPLETED
    assert await play.sources() == ["tool", "tool", "limit", "limit", "tool", "limit"]


async def test_every_request_says_how_many_turns_remain() -> None:
    play = Play([turn(call(x=1)), turn(call(x=2)), turn(text="42")], max_turns=3)
    await play.drive()
    assert [request.turns_left for request in play.shown] == [
        "3 of 3 turns remain, this one included.",
        "2 of 3 turns remain, this one included.",
        "This is the last turn.",
    ]


async def test_the_last_turn_has_a_recorded_notice_and_no_tools_and_its_text_is_the_answer() -> None:
    play = Play([turn(call(x=1)), turn(call(x=2), text="about 41")], max_turns=2)
    ended = await play.drive()
    assert isinstance(ended.end, RunCompleted)
    assert (ended.end.output, ended.end.stop_reason) == ("about 41", "final_turn")
    first, last = play.shown
    assert (len(first.tools), first.notice) == (2, None)
    assert (last.tools, last.notice) == ([], final_notice(2))
    assert last.messages[-1] == {"role": "user", "content": final_notice(2)}
    assert play.executed == ["t0c0"] and await play.sources() == ["tool", "limit"]
    kinds = [type(event) for event in await play.events()]
    assert kinds.index(NoticeInjected) == len(kinds) - 1 - kinds[::-1].index(TurnStarted) - 1
    check_messages([*messages(await play.state()), {"role": "user", "content": "go on"}])


@pytest.mark.parametrize(
    ("text", "stop_reason"), [('{"partial": true, "open": ["b"]}', "partial_progress"), ("so far", "final_turn")]
)
async def test_a_run_that_hands_over_says_so_in_its_stop_reason(text: str, stop_reason: str) -> None:
    ended = await Play([turn(call(x=1)), turn(text=text)], max_turns=2).drive()
    assert isinstance(ended.end, RunCompleted) and ended.end.stop_reason == stop_reason
    assert ended.end.output == (json.loads(text) if text.startswith("{") else text)


@pytest.mark.parametrize("last", [turn(call(x=2)), turn()], ids=["only calls", "nothing"])
async def test_a_run_that_says_nothing_in_its_last_turn_fails_and_goes_on_with_more_turns(last: ModelReply) -> None:
    play = Play([turn(call(x=1), text="one of two is sent"), last, turn(call(x=3)), turn(text="done")], max_turns=2)
    ended = await play.drive()
    assert isinstance(ended.end, RunFailed) and ended.end.code == "max_turns"
    assert "look x1" in ended.end.message and "one of two is sent" in ended.end.message
    again = await play.resume()
    assert isinstance(again.end, RunFailed) and len(play.shown) == 2, "without a higher limit nothing is asked"
    ended = await play.resume(max_turns=6)
    assert isinstance(ended.end, RunCompleted) and ended.end.output == "done"
    assert [request.notice for request in play.shown] == [None, final_notice(2), GOES_ON, None]
    assert len(play.shown[2].tools) == 2 and "4 of 6" in play.shown[2].turns_left


async def in_its_last_turn(*more: Event) -> Play:
    """A run whose owner died while the model was asked for its last turn; `more` is appended after that."""
    play = Play([turn(call(x=1)), turn(call(x=2), text="done"), turn(text="done")], max_turns=2)
    await new_run(play.log, created(config=play.agent.snapshot()))
    epoch = await claim(play.log)
    answer = await turn_events(RUN, 0, play.turns[0], play.agent)
    result = ToolResult(tool_call_id="t0c0", attempt=1, content="1")
    again = NoticeInjected(turn_index=1, text=final_notice(2)), TurnStarted(turn_index=1)
    await accepted(play.log, Append(RUN, epoch, 2, (TurnStarted(turn_index=0), *answer, result, *again, *more)))
    return play


async def test_a_notice_of_a_turn_that_is_not_the_last_any_more_is_corrected_before_it_is_asked_again() -> None:
    play = await in_its_last_turn(RunFailed(code="model_error", message="no connection", phase="model"))
    assert (await play.resume(max_turns=5)).status is Status.COMPLETED
    said = [message["content"] for message in play.shown[0].messages if message["role"] == "user"]
    assert said == ["hello", GOES_ON], "the newest notice of a turn is the one that the model sees"
    assert len(play.shown[0].tools) == 2 and play.executed == ["t1c0"]


async def test_a_notice_that_was_recorded_before_a_crash_is_not_recorded_again() -> None:
    play = await in_its_last_turn()
    assert (await play.drive()).status is Status.COMPLETED
    notices = [event.text for event in await play.events() if isinstance(event, NoticeInjected)]
    assert notices == [final_notice(2)] == [play.shown[0].notice]
    assert play.executed == [] and await play.sources() == ["tool", "limit"]


# -- budgets ------------------------------------------------------------------------------------------------


async def test_a_turn_beyond_the_budget_is_not_started_and_a_raised_one_goes_on() -> None:
    turns = [turn(call(x=n), input_tokens=40, output_tokens=10) for n in range(3)]
    play = Play([*turns, turn(text="done", input_tokens=1)], max_tokens=120)
    ended = await play.drive()
    assert isinstance(ended.end, RunFailed) and ended.end.code == "budget_exceeded"
    assert (await play.state()).turn_count == len(play.shown) == 2
    assert [request.max_output_tokens for request in play.shown] == [120, 20]
    ended = await play.resume(max_tokens=None)
    assert ended.status is Status.COMPLETED and play.shown[-1].max_output_tokens is None
    assert [message["role"] for message in play.shown[2].messages] == ["user", *["assistant", "tool"] * 2]


async def test_each_kind_of_token_costs_its_own_and_the_sum_is_exact() -> None:
    used = Usage(input_tokens=3, cache_creation_input_tokens=12_304, output_tokens=550)
    turns = [reply.model_copy(update={"usage": used}) for reply in (turn(call(x=1)), turn(text="done"))]
    play = Play(turns, price_as=SONNET, max_cost="1")
    assert (await play.drive()).status is Status.COMPLETED
    one = (3 * Decimal(3) + 12_304 * Decimal("3.75") + 550 * Decimal(15)) / 1_000_000
    assert (await play.state()).cost == 2 * one
    assert play.shown[0].max_output_tokens == 66_666


async def test_a_run_that_has_spent_its_money_fails_and_goes_on_with_more() -> None:
    play = Play([turn(call(x=1), output_tokens=1_000), turn(text="done")], price_as=SONNET, max_cost="0.015")
    ended = await play.drive()
    assert isinstance(ended.end, RunFailed) and ended.end.code == "budget_exceeded"
    assert "$0.015 of $0.015" in ended.end.message
    assert (await play.resume(max_cost="0.1")).status is Status.COMPLETED


@pytest.mark.parametrize("price_as", [None, "nobody:has-it"])
def test_a_cost_limit_without_known_prices_is_refused_at_the_launch(price_as: str | None) -> None:
    agent = Play([], price_as=price_as).agent
    assert agent.snapshot()["prices"] is None
    with pytest.raises(UsageError, match=r"nobody:has-it|agent a's own"):
        agent.snapshot(limits={"max_cost": 1})


def test_the_model_that_is_asked_instead_is_the_one_that_is_priced() -> None:
    agent = Play([], price_as=SONNET).agent
    prices = agent.snapshot("openai:gpt-4o")["prices"]
    assert isinstance(prices, dict) and prices["model"] == "openai:gpt-4o"
    prices = agent.snapshot("script:x.jsonl")["prices"]
    assert isinstance(prices, dict) and prices["model"] == "anthropic:claude-sonnet-4-0"


@pytest.mark.parametrize("limits", [{"max_turns": 0}, {"max_wishes": 3}, {"max_tokens": "many"}])
def test_limits_of_a_launch_that_make_no_sense_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(limits))):
        Play([]).agent.snapshot(limits=limits)


# -- loops --------------------------------------------------------------------------------------------------


async def test_the_third_like_call_is_intercepted_and_the_next_one_ends_the_run() -> None:
    play = Play([turn(call(x=1, y=2)), turn(call(y=2, x=1)), *[turn(call(x=1, y=2))] * 4], same)
    ended = await play.drive()
    assert isinstance(ended.end, RunFailed) and ended.end.code == "loop_detected"
    assert await play.sources() == ["tool", "tool", "loop", "loop"]
    told = json.loads(play.shown[3].messages[-1]["results"][0]["content"])
    assert told["error"] == "LoopDetected" and "2 times in a row" in told["message"]
    ended = await play.resume()
    assert isinstance(ended.end, RunFailed) and await play.sources() == ["tool", "tool", "loop", "loop", "tool", "tool"]


async def test_a_model_that_turns_away_from_a_loop_goes_on() -> None:
    play = Play([*[turn(call(x=1))] * 3, turn(call(x=2)), turn(text="done")], same)
    assert (await play.drive()).status is Status.COMPLETED
    assert await play.sources() == ["tool", "tool", "loop", "tool"]


async def test_a_b_a_b_is_a_loop_and_a_poll_with_news_is_none() -> None:
    pairs = [turn(call("look")), turn(call("poke"))]
    play = Play([*pairs * 2, *pairs, turn(text="done")], same)
    await play.drive()
    assert await play.sources() == ["tool"] * 4 + ["loop"] * 2
    play = Play([*[turn(call())] * 6, turn(text="done")])
    assert (await play.drive()).status is Status.COMPLETED
    assert await play.sources() == ["tool"] * 6


async def test_loops_are_let_be_where_the_limit_is_lifted() -> None:
    play = Play([*[turn(call())] * 6, turn(text="done")], same, max_repeats=None)
    assert (await play.drive()).status is Status.COMPLETED
    assert await play.sources() == ["tool"] * 6
