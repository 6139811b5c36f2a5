"""Limits that are replayed over stored runs: by the pure replay, and by the command."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.replay import Replayed, replay
from perdure.store.errors import UsageError
from perdure.store.events import AssistantDelta, AssistantInterrupted, Stored, TurnStarted, Usage
from perdure.store.sql import open_log
from perdure.store.states import Status

from .command_kit import no_cluster, perdure, refusal
from .limit_kit import Answer, Play, call, echo, same, turn

__all__ = ["no_cluster"]

SONNET = "anthropic:claude-sonnet-4-20250514"
FIVE = [*(turn(call(x=n), input_tokens=10, output_tokens=5) for n in range(4)), turn(text="done", input_tokens=20)]


async def replayed(changes: dict[str, Any], turns: Any = FIVE, results: Answer = echo, **fields: Any) -> Replayed:
    play = Play(turns, results, **fields)
    await play.drive()
    return replay(await play.log.read(play.run_id), changes)


@pytest.mark.parametrize(
    "changes", [{"max_turns": 50}, {"max_tokens": 10_000}, {"max_tool_calls": 4}, {"max_turns": 5}]
)
async def test_a_run_within_the_limits_is_left_as_it_is(changes: dict[str, Any]) -> None:
    found = await replayed(changes)
    assert (found.status, found.turns, found.cut, found.refused) == (Status.COMPLETED, 5, None, {})


async def test_a_budget_stops_a_run_before_a_turn_and_saves_the_rest() -> None:
    found = await replayed({"max_tokens": 40})
    assert found.cut and (found.cut.turns, found.cut.code) == (2, "budget_exceeded")
    assert (found.cut.turns_saved, found.cut.saved.tokens) == (3, 15 + 15 + 20)


async def test_a_call_that_came_to_nothing_counts_as_it_did() -> None:
    play = Play(FIVE)
    await play.drive()
    stored = await play.log.read(play.run_id)
    at = next(n for n, one in enumerate(stored) if isinstance(one.event, TurnStarted)) + 1
    lost = (
        AssistantDelta(turn_index=0, offset=0, text="I thi"),
        AssistantInterrupted(turn_index=0, usage=Usage(input_tokens=30), estimated=True),
    )
    events = [*(one.event for one in stored[:at]), *lost, *(one.event for one in stored[at:])]
    found = replay((Stored(n, 0.0, 1, event) for n, event in enumerate(events, 1)), {"max_tokens": 60})
    assert found.cut and (found.cut.turns, found.cut.saved.tokens) == (1, 15 + 15 + 15 + 20)


async def test_a_limit_of_turns_stops_a_run_after_its_last_one_whose_calls_are_refused() -> None:
    found = await replayed({"max_turns": 3})
    assert found.cut and (found.cut.turns, found.cut.code, found.cut.turns_saved) == (3, "max_turns", 2)
    assert (found.refused, found.first_refused) == ({"limit": 1}, 2)
    alone = await replayed({"max_turns": 1})
    assert alone.cut and (alone.cut.turns, alone.refused) == (1, {})


async def test_a_ceiling_of_calls_refuses_and_does_not_stop() -> None:
    found = await replayed({"max_tool_calls": 3})
    assert (found.cut, found.refused, found.first_refused) == (None, {"limit": 1}, 3)


async def test_a_loop_that_was_let_be_is_intercepted_and_then_stopped() -> None:
    turns = [*[turn(call(), output_tokens=1)] * 6, turn(text="done", output_tokens=1)]
    found = await replayed({"max_repeats": 3}, turns, same, max_repeats=None)
    assert (found.refused, found.first_refused) == ({"loop": 2}, 2)
    assert found.cut and (found.cut.turns, found.cut.code, found.cut.saved.tokens) == (4, "loop_detected", 3)
    assert (await replayed({"max_repeats": 3}, turns, echo, max_repeats=None)).cut is None


async def test_dollars_are_tested_where_prices_are_known() -> None:
    changes = {"max_cost": "0.0002"}
    assert not (await replayed(changes)).priced and (await replayed(changes)).cut is None
    found = await replayed(changes, price_as=SONNET)
    turn_cost = (10 * Decimal(3) + 5 * Decimal(15)) / 1_000_000
    assert found.priced and found.cut and found.cut.turns == 2
    assert found.cut.saved.cost == 2 * turn_cost + 20 * Decimal(3) / 1_000_000


async def test_what_the_guards_did_is_what_their_replay_does() -> None:
    fields: tuple[dict[str, Any], ...] = ({"max_turns": 2}, {"max_tokens": 31}, {"max_tool_calls": 2})
    for limits in fields:
        assert (await replayed({}, **limits)).cut is None, "a run that kept its own limits has nothing to save"


async def test_a_resumed_run_is_measured_by_its_newest_limits() -> None:
    play = Play(FIVE, max_tokens=31)
    await play.drive()
    assert (await play.resume(max_tokens=500)).status is Status.COMPLETED
    events = await play.log.read(play.run_id)
    assert replay(events, {"max_turns": 9}).cut is None
    assert replay(events, {"max_tokens": 31}).cut is not None


async def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="max_turns"):
        await replayed({"max_turns": 0})


# -- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Three runs of a batch: one completed in five turns, one of two, one in a loop."""
    path = tmp_path / "runs.db"

    async def fill() -> None:
        log = await open_log(path)
        loop = Play([*[turn(call(), output_tokens=7)] * 9], same, log, "c" * 20, max_repeats=4)
        long = Play(FIVE, echo, log, "a" * 20, price_as=SONNET)
        short = Play([turn(call()), turn(text="ok")], echo, log, "b" * 20)
        for play in (long, short, loop):
            play.fields = {"batch": "b1", "sample": play.run_id[0]}
            await play.drive()
        await log.close()

    asyncio.run(fill())
    return path


@pytest.mark.usefixtures("no_cluster")
def test_the_command_says_which_runs_would_have_been_stopped_and_which_of_them_had_completed(db: Path) -> None:
    shown = perdure("guard-test", '{"max_turns": 3}', "--batch", "b1", "--db", db)
    assert shown.exit_code == 0
    head, first, second, *summary = shown.stdout.splitlines()
    assert head.split()[:3] == ["RUN", "SAMPLE", "STATUS"]
    assert first.split()[:7] == ["a" * 20, "a", "completed", "5", "3", "35", "$0.000165"]
    assert second.split()[:7] == ["c" * 20, "c", "failed", "5", "3", "14", "?"]
    assert summary[0].startswith("2 of 3 runs would have been stopped, which would have saved 4 turns, 49 tokens")
    assert summary[1] == f"1 of them completed and would have been cut: {'a' * 20}"


@pytest.mark.usefixtures("no_cluster")
def test_the_command_tells_programs_the_same(db: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text('{"max_tool_calls": 1, "max_cost": "9"}')
    shown = perdure("guard-test", f"@{limits}", "--batch", "b1", "--db", db, "--json")
    *runs, summary = map(json.loads, shown.stdout.splitlines())
    assert {run["run_id"][0]: (run["stopped"], run["refused_calls"]) for run in runs} == {
        "a": (None, {"limit": 3}),
        "c": (None, {"limit": 3, "loop": 1}),
    }
    assert summary == {
        "type": "summary",
        "runs": 3,
        "stopped": 0,
        "completed_cut": [],
        "only_refused": 2,
        "not_priced": 2,
        "saved": {"turns": 0, "tokens": 0, "cost": None},
    }


def test_what_cannot_be_tested_is_refused(db: Path) -> None:
    there = ("--batch", "b1", "--db", db)
    assert "LIMITS is not JSON" in refusal("guard-test", "max_turns", *there)
    assert "names no limit" in refusal("guard-test", "{}", *there)
    assert "max_wishes" in refusal("guard-test", '{"max_wishes": 3}', *there)
    assert "no runs in batch 'b2'" in refusal("guard-test", '{"max_turns": 3}', "--batch", "b2", "--db", db)
