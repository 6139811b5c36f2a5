"""Shared budgets on the command line, without a cluster: how they are made, joined, raised and shown."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from perdure.cli import batch as batch_command
from perdure.cli import run as run_command
from perdure.store.budgets import Amount, Budget, Cap
from perdure.store.events import AssistantMessage, BudgetReserved, Event, RunFailed, TurnStarted, Usage
from perdure.store.log import Append, Claim
from perdure.store.sql import SqlLog, open_log

from .ask_kit import done
from .batch_kit import LEASE, FakeDoor, write_agent
from .command_kit import create, no_cluster, perdure, refusal, within

__all__ = ["no_cluster"]
pytestmark = pytest.mark.usefixtures("no_cluster")
PRICED = """
from perdure import Agent

agent = Agent(name="priced", model=lambda request: "x", price_as="anthropic:claude-sonnet-4-20250514")
"""


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end as soon as they are created."""

    @contextlib.asynccontextmanager
    async def open_door(db: str, *_: Any, **__: Any) -> AsyncIterator[FakeDoor]:
        log = await open_log(db)
        try:
            yield FakeDoor(log)
        finally:
            await log.close()

    monkeypatch.setattr(batch_command, "open_door", open_door)
    monkeypatch.setattr(run_command, "open_door", open_door)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def agent(tmp_path: Path) -> str:
    reference = write_agent(tmp_path / "code")
    (tmp_path / "code" / "agent.py").write_text(PRICED)
    return reference


def budgets(db: Path) -> list[Budget]:
    found: list[Budget] = within(db, lambda log: log.budgets())
    return found


def spend(db: Path) -> None:
    """A call of budget `b` that was answered, one that was lost, and one under way."""

    async def work(log: SqlLog) -> None:
        await log.cap_budget("b", {"cost": Decimal(5)})
        await log.take_lease(LEASE, None)
        reserves = BudgetReserved(turn_index=0, prompt_tokens=90, output_tokens=10, cost=Decimal("0.001"))
        said = AssistantMessage(
            turn_index=0, text="x", stop_reason="end_turn", usage=Usage(input_tokens=40), cost=Decimal("0.00025")
        )
        ends: tuple[tuple[Event, ...], ...] = ((said,), (RunFailed(code="c", message="m", phase="model"),), ())
        for n, end in enumerate(ends):
            await done(log, create(f"r{n}", budget="b"), Claim(f"r{n}", f"c{n}", LEASE.nonce, 0))
            await done(log, Append(f"r{n}", 1, 2, (TurnStarted(turn_index=0), reserves, *end)))

    within(db, work)


def test_a_budget_tells_what_is_spent_estimated_and_held(db: Path) -> None:
    spend(db)
    head, row = perdure("budget", "--db", db).stdout.splitlines()
    assert head.split() == ["BUDGET", "CAP", "SPENT", "ESTIMATED", "HELD"]
    assert row.split() == [
        "b",
        "$5",
        "$0.00125,",
        "140",
        "tokens",
        "$0.001,",
        "100",
        "tokens",
        "$0.001,",
        "100",
        "tokens",
    ]
    told = json.loads(perdure("budget", "b", "--db", db, "--json").stdout)
    assert told["cap"] == {"tokens": None, "cost": "5"} and told["estimated"] == {"tokens": 100, "cost": "0.001"}
    assert "budget      b\n" in perdure("show", "r0", "--db", db).stdout
    assert json.loads(perdure("show", "r2", "--db", db, "--json").stdout)["held"] == {"tokens": 100, "cost": "0.001"}


def test_caps_are_raised_and_lifted_and_what_is_spent_stays(db: Path) -> None:
    spend(db)
    shown = perdure("budget", "b", "--cost", "7.50", "--tokens", "900", "--db", db).stdout
    assert "$7.5 and 900 tokens" in shown and "$0.00125" in shown
    perdure("budget", "b", "--cost", "none", "--db", db)
    assert budgets(db)[0].cap == Cap(900, None)
    assert "no budget 'c' in this store" in refusal("budget", "c", "--cost", "1", "--db", db)
    assert "the cap on cost cannot be 'much'" in refusal("budget", "b", "--cost", "much", "--db", db)
    assert [budget.name for budget in budgets(db)] == ["b"]


def test_a_batch_makes_a_budget_of_its_name_and_the_next_one_joins_it(
    db: Path, agent: str, tmp_path: Path, door: None
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('"one"\n')
    told = perdure("batch", agent, data, "--name", "nightly", "--budget-cost", "2.50", "--db", db)
    assert told.exit_code == 0 and "budget 'nightly': 0 tokens spent of $2.5\n" in told.stdout
    data.write_text('"one"\n"two"\n')
    perdure("batch", agent, data, "--name", "nightly", "--db", db)
    rows = within(db, lambda log: log.runs(batch="nightly"))
    assert [row.budget for row in rows] == ["nightly"] * 2
    data.write_text('"one"\n"two"\n"three"\n')
    perdure("batch", agent, data, "--name", "nightly", "--budget-tokens", "10", "--db", db)
    assert budgets(db) == [Budget("nightly", Cap(10, Decimal("2.5")))]
    perdure("batch", agent, data, "--name", "other", "--budget", "nightly", "--db", db)
    assert {row.budget for row in within(db, lambda log: log.runs(batch="other"))} == {"nightly"}


def test_a_run_joins_a_named_budget_and_makes_it_with_a_cap(db: Path, agent: str, door: None) -> None:
    assert "no budget 'team' in this store" in refusal("run", agent, "x", "--budget", "team", "--db", db)
    assert "--budget NAME" in refusal("run", agent, "x", "--budget-cost", "1", "--db", db)
    assert perdure("run", agent, "x", "--budget", "team", "--budget-cost", "1", "--db", db).exit_code == 0
    assert perdure("run", agent, "x", "--budget", "team", "--db", db).exit_code == 0
    assert budgets(db) == [Budget("team", Cap(None, Decimal(1)), Amount())]


def test_a_model_without_known_prices_is_named_before_anything_is_launched(db: Path, tmp_path: Path) -> None:
    agent, data = write_agent(tmp_path / "code"), tmp_path / "data.jsonl"
    data.write_text('"one"\n')
    for command in (("run", agent, "x", "--budget", "b"), ("batch", agent, data)):
        told = refusal(*command, "--budget-cost", "2", "--db", db)
        assert "agent echo's own" in told and "prices" in told
    assert budgets(db) == [] == within(db, lambda log: log.runs())
