"""Commands in this process, on stores that are filled without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from perdure.cli.app import root
from perdure.client.cluster import Cluster
from perdure.store.events import AgentRef, RunCreated
from perdure.store.log import Command, Create
from perdure.store.sql import SqlLog, open_log

from .ask_kit import done
from .batch_kit import LEASE, fails, play


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the commands may start or join a cluster."""

    def start(self: Cluster) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(Cluster, "start", start)


def create(run_id: str, **fields: Any) -> Create:
    agent = AgentRef(ref="/somewhere/shop.py:agent", digest="d1")
    return Create(run_id, RunCreated(agent=agent, input=fields.pop("input", "refund?"), **fields))


def within(path: Path, work: Callable[[SqlLog], Awaitable[Any]], **options: Any) -> Any:
    """What `work` returns on an open store; `options` as for `open_log`."""

    async def open_and_work() -> Any:
        event_log = await open_log(path, **options)
        try:
            return await work(event_log)
        finally:
            await event_log.close()

    return asyncio.run(open_and_work())


def fill(path: Path, creates: Sequence[Create], *more: Command, failing: bool = False) -> Path:
    """A store where runs are created, completed (or failed), and where `more` has happened."""

    async def work(event_log: SqlLog) -> None:
        for start in range(0, len(creates), 500):
            some = creates[start : start + 500]
            await (play(event_log, some, fails) if failing else play(event_log, some))
        await event_log.take_lease(LEASE, None)
        await done(event_log, *more)

    within(path, work)
    return path


def perdure(*args: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(root, [str(arg) for arg in args], env=env, catch_exceptions=False)


def refusal(*args: str | Path) -> str:
    """The one line on stderr of a command that is refused."""
    done = perdure(*args)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("perdure: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr
