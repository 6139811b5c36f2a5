"""Two that recover the same runs, and a store that is out of reach for a while: one history, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.actors import supervision
from perdure.actors.agent import Agent
from perdure.actors.attempt import Outcome, Work
from perdure.actors.journal import Journal, serve
from perdure.actors.pool import MemberDied
from perdure.actors.requests import Launch, Start
from perdure.actors.run import Owner
from perdure.actors.tools import Tool, ToolOptions
from perdure.client.requeue import requeue
from perdure.store import engine
from perdure.store.errors import LeaseHeld
from perdure.store.events import RunFailed, RunRequeued
from perdure.store.log import Abandon, Accepted, Append, Create, Refused, Requeue
from perdure.store.sql import SqlLog, open_log
from perdure.store.states import Status
from perdure.store.writer import GroupWriter
from perdure.supervisor import SUPERVISOR

from .fakes import (
    LEASE,
    RUN,
    ManualClock,
    NoProcesses,
    accepted,
    check_projection,
    claim,
    created,
    held,
    loader,
    new_run,
)
from .store_kit import message
from .watch_kit import Watch, lease_of

ROUNDS = 50
RUNS = 30


async def come(condition: Any) -> None:
    """Wait for what other threads and connections bring about."""
    async with asyncio.timeout(20):
        while not (await condition() if asyncio.iscoroutinefunction(condition) else condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def log(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqlLog]:
    """A log that gives up soon."""
    monkeypatch.setattr(engine, "BUSY_SLICE_S", 0.02)
    made = await open_log(path, busy_s=0.05)
    yield made
    await made.close()


@pytest.fixture
def other(log: SqlLog, path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's connection."""
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


# -- two at once --------------------------------------------------------------------------------------------


async def test_of_two_resumes_at_once_one_requeues_and_the_other_finds_the_run_going_on(path: Path) -> None:
    logs = [await open_log(path), await open_log(path)]
    writers = [GroupWriter(log) for log in logs]
    await new_run(logs[0])
    for number in range(ROUNDS):
        epoch = await claim(logs[0])
        event = RunFailed(code="for_a_test", message="", phase="model")
        await accepted(logs[0], Abandon(RUN, LEASE, epoch, event))
        if number % 2:
            rows = await asyncio.gather(*(requeue(log, RUN, "test") for log in logs))
            assert {row.status for row in rows} == {Status.QUEUED}
            continue
        answers = await asyncio.gather(
            *(writer.submit_all([Requeue(RUN, RunRequeued(by="test"))]) for writer in writers)
        )
        verdicts = [verdict for (verdict,) in answers]
        assert sum(isinstance(verdict, Accepted) for verdict in verdicts) == 1
        (told,) = [verdict for verdict in verdicts if isinstance(verdict, Refused)]
        assert told.reason == "not_ended"
    events = await logs[0].read(RUN)
    assert Counter(stored.event.type for stored in events)["run_requeued"] == ROUNDS
    row = await logs[0].run(RUN)
    assert row
    check_projection(events, row, [])
    for log in logs:
        await log.close()


async def test_a_supervisor_that_was_frozen_beyond_its_lease_claims_nothing_and_ends_itself(path: Path) -> None:
    clock = ManualClock()
    logs = [await open_log(path), await open_log(path)]
    one, two = lease_of("one", clock.now + 10), lease_of("two", clock.now + 30)
    assert await logs[0].take_lease(one, None)
    frozen, successor = Watch(logs[0], one, clock), Watch(logs[1], two, clock)
    await accepted(logs[0], Create("first", created()))
    await frozen.supervision.sweep()
    await come(lambda: frozen.epoch("first") == 1)
    old_drive = frozen.pool.members["first"]

    clock.now += 20
    assert await logs[1].take_lease(two, "one")
    await successor.supervision.sweep()
    await come(lambda: successor.epoch("first") == 2)
    await accepted(logs[1], Create("second", created()))

    await frozen.supervision.sweep()
    old_drive.end.set_exception(MemberDied("respawn", 1))
    await come(lambda: "first" not in frozen.pool.members)
    with pytest.raises(LeaseHeld, match="another supervisor has taken over"):
        await held(frozen.supervision.run())
    assert not frozen.pool.members
    assert {row.run_id: row.epoch for row in await logs[0].runs()} == {"first": 2, "second": 0}

    await successor.supervision.sweep()
    await come(lambda: successor.epoch("second") == 1)
    assert {row.run_id: row.epoch for row in await logs[0].runs()} == {"first": 2, "second": 1}
    for log in logs:
        await log.close()


async def test_a_run_that_another_client_has_just_created_is_driven_at_once_by_the_one_claim(log: SqlLog) -> None:
    clock = ManualClock()
    lease = lease_of("one", clock.now + 10)
    await log.take_lease(lease, None)
    watch = Watch(log, lease, clock)
    await watch.supervision.sweep()  # finds nothing, so there is room
    await accepted(log, Create(RUN, created()))
    (verdict,) = await watch.supervision.serve(Launch((Create(RUN, created()),)))
    assert isinstance(verdict, Refused) and verdict.reason == "exists"
    await come(lambda: watch.epoch(RUN) == 1)
    await watch.supervision.sweep()
    row = await log.run(RUN)
    assert row and row.epoch == 1


# -- out of reach -------------------------------------------------------------------------------------------


class CountedTools(NoProcesses):
    """Tools whose effects are counted, and which begin only with leave."""

    def __init__(self) -> None:
        self.journal: Journal
        self.dispatched, self.effects = Counter[str](), Counter[str]()

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        self.dispatched[work.run_id] += 1
        assert await self.journal.begin(work.run_id, work.tool_call_id, work.attempt, "node", None) is None
        self.effects[work.run_id] += 1
        return Outcome(kind="result", content=json.dumps("done"))


async def test_while_the_store_is_locked_no_tool_starts_and_afterwards_every_run_goes_on(
    log: SqlLog, other: sqlite3.Connection
) -> None:
    tools, pauses, thinking, think = CountedTools(), 0, 0, asyncio.Event()

    async def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        await asyncio.sleep(0.01)

    async def model(request: Any) -> dict[str, Any]:
        nonlocal thinking
        thinking += 1
        await think.wait()
        return {"text": "bye"} if request.turn_index else {"tool_calls": [{"name": "put"}]}

    journal = tools.journal = Journal(log, tools, "store", sleep=pause)
    agent = Agent(name="a", model=model, tools=(Tool(lambda: None, ToolOptions("idempotent_write"), "put"),))
    ids = [f"run-{number:016}" for number in range(RUNS)]
    drives = []
    for run_id in ids:
        await new_run(log, created(config=agent.snapshot()), run_id)
        start = Start(run_id, await claim(log, run_id))
        drives.append(asyncio.create_task(Owner(start, lambda ask: serve(journal, ask), loader(agent)).drive()))
    await come(lambda: thinking == RUNS)

    other.execute("BEGIN IMMEDIATE")
    think.set()
    await come(lambda: pauses >= 2 * RUNS)
    assert not tools.dispatched, "a tool was started before its intent was durable"
    assert not any(drive.done() for drive in drives)
    assert {row.status for row in await log.runs()} == {Status.RUNNING}, "who reads is not held up"
    other.execute("ROLLBACK")

    assert {ended.status for ended in await held(asyncio.gather(*drives))} == {Status.COMPLETED}
    assert tools.effects == tools.dispatched == Counter(ids)
    for row in await log.runs():
        check_projection(await log.read(row.run_id), row, await log.calls(row.run_id))


async def test_a_supervisor_outlasts_a_locked_store_and_then_goes_on(
    log: SqlLog, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "SWEEP_S", 0.01)
    clock = ManualClock()
    lease = lease_of("one", clock.now + 10)
    await log.take_lease(lease, None)
    watch = Watch(log, lease, clock)
    await accepted(log, Create(RUN, created()))
    other.execute("BEGIN IMMEDIATE")
    clock.now += 60  # its lease has run out too, and nobody else wants it
    work = asyncio.create_task(watch.supervision.run())
    await come(lambda: caplog.text.count("a sweep failed") >= 3)
    assert not watch.pool.members and not work.done()
    other.execute("ROLLBACK")
    await come(lambda: watch.epoch(RUN) == 1)
    renewed = await log.lease(SUPERVISOR)
    assert renewed and (renewed.nonce, renewed.expires_at) == ("one", clock.now + 10)
    work.cancel()


async def test_an_actor_that_dies_while_the_store_is_locked_is_buried_and_its_run_claimed_later(
    log: SqlLog, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "SWEEP_S", 0.01)
    clock = ManualClock()
    lease = lease_of("one", clock.now + 10)
    await log.take_lease(lease, None)
    watch = Watch(log, lease, clock)
    await accepted(log, Create(RUN, created()))
    work = asyncio.create_task(watch.supervision.run())
    await come(lambda: watch.epoch(RUN) == 1)
    other.execute("BEGIN IMMEDIATE")
    dead = watch.pool.members[RUN]
    dead.end.set_exception(MemberDied("hung", 1))
    await come(lambda: watch.pool.buried == [dead])
    other.execute("ROLLBACK")
    await come(lambda: watch.epoch(RUN) == 2)
    work.cancel()


async def test_readers_of_ours_hold_no_snapshot_so_the_write_ahead_file_stays_bounded(log: SqlLog, path: Path) -> None:
    wal, long = path.with_name(f"{path.name}-wal"), "x" * 2**20
    await new_run(log)
    epoch, seq = await claim(log), 2
    reader = await open_log(path, read_only=True)
    for number in range(40):
        event = message(0).model_copy(update={"text": long, "event_id": f"long-{number}"})
        seq = (await accepted(log, Append(RUN, epoch, seq, (event,)))).row.seq
        await asyncio.gather(*(reader.read(RUN, seq - 1) for _ in range(4)))
    assert wal.stat().st_size < 1.5 * engine.WAL_BYTES_KEPT
    await reader.close()
