"""Limits on the command line, without a cluster: what is refused before anything starts, and what `show` tells."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.machine import fold
from perdure.cli import resume as resume_command
from perdure.client.requeue import requeue
from perdure.store.errors import UsageError
from perdure.store.sql import SqlLog, open_log

from .batch_kit import FakeDoor, write_agent
from .command_kit import no_cluster, perdure, refusal, within
from .limit_kit import Play, call, echo, turn

__all__ = ["no_cluster"]

pytestmark = pytest.mark.usefixtures("no_cluster")
SONNET = "anthropic:claude-sonnet-4-20250514"
SPENT = "a" * 20


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A run whose budget of tokens ended, and one that waits for a slot."""
    path = tmp_path / "runs.db"

    async def fill() -> None:
        log = await open_log(path)
        turns = [turn(call(x=n), input_tokens=40, output_tokens=10) for n in range(3)]
        await Play(turns, echo, log, SPENT, price_as=SONNET, max_tokens=100, max_cost=1, max_turns=9).drive()
        play = Play(turns, echo, log, "b" * 20, max_turns=1)
        await play.drive()
        await requeue(log, "b" * 20, "test")
        await log.close()

    asyncio.run(fill())
    return path


def test_show_says_the_limits_and_what_was_spent(db: Path) -> None:
    shown = perdure("show", "aaaa", "--db", db).stdout
    assert "limits      max_turns 9, max_tokens 100, max_cost 1, max_repeats 3, max_empty 3\n" in shown
    assert "cost        $0.00027, at the prices of anthropic:claude-sonnet-4-0\n" in shown
    assert "error       budget_exceeded: the next prompt of about 50 tokens does not fit" in shown
    facts = json.loads(perdure("show", "aaaa", "--db", db, "--json").stdout)
    assert (facts["cost"], facts["limits"]["max_tokens"]) == ("0.00027", 100)
    assert "cost" not in perdure("show", "bbbb", "--db", db).stdout


LOWER = {
    ("--max-tokens", "50"): "max_tokens is 100: a resume can raise a limit or lift it, not lower it to 50",
    ("--max-tool-calls", "7"): "max_tool_calls has no bound",
    ("--max-turns", "none"): "max_turns cannot be None",
    ("--max-repeats", "two"): "max_repeats cannot be 'two'",
    ("--max-cost", "0.99"): "max_cost is 1:",
}


@pytest.mark.parametrize("given", LOWER)
def test_a_resume_that_would_lower_a_limit_is_refused_and_changes_nothing(given: tuple[str, str], db: Path) -> None:
    before = within(db, lambda log: log.run(SPENT))
    assert LOWER[given] in refusal("resume", "aaaa", *given, "--db", db)
    assert within(db, lambda log: log.run(SPENT)) == before


def test_limits_are_raised_for_named_runs_that_have_ended(db: Path) -> None:
    assert "give RUN" in refusal("resume", "--max-turns", "50", "--db", db)
    assert "is queued: its limits can be raised when it has ended" in refusal(
        "resume", "bbbb", "--max-turns", "50", "--db", db
    )


def test_a_resume_records_what_it_raises(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Door(FakeDoor):
        async def nudge(self, run_ids: Iterable[str] = ()) -> None:
            raise UsageError("far enough")

    @contextlib.asynccontextmanager
    async def open_door(*_: Any) -> AsyncIterator[Door]:
        log = await open_log(db)
        try:
            yield Door(log)
        finally:
            await log.close()

    monkeypatch.setattr(resume_command, "open_door", open_door)
    assert "far enough" in refusal("resume", "aaaa", "--max-tokens", "250", "--max-cost", "none", "--db", db)

    async def limits(log: SqlLog) -> Any:
        state = fold(await log.read(SPENT))
        return state.status, state.limits.max_tokens, state.limits.max_cost, state.usage.input_tokens

    assert within(db, limits) == ("queued", 250, None, 40)
    assert "max_tokens is 250 now, max_cost is null now" in perdure("events", "aaaa", "--db", db).stdout


@pytest.mark.parametrize("command", ["run", "batch"])
def test_a_launch_with_a_cost_limit_and_no_prices_is_refused_and_names_the_model(command: str, tmp_path: Path) -> None:
    agent, data = write_agent(tmp_path / "agent"), tmp_path / "data.jsonl"
    data.write_text('"hello"\n')
    about = "hello" if command == "run" else str(data)
    said = refusal(command, agent, about, "--max-cost", "1", "--db", tmp_path / "runs.db")
    assert 'the prices of model "agent echo\'s own" are not known' in said and "price_as" in said
    said = refusal(command, agent, about, "--max-turns", "0", "--db", tmp_path / "runs.db")
    assert "max_turns cannot be '0'" in said
