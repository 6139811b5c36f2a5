"""What the tests of the logs share: a clock that is moved by hand, short ways to say events, runs in a given state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from perdure.store.events import (
    AgentRef,
    AssistantMessage,
    CancelRequested,
    Effect,
    Event,
    RunCreated,
    RunFailed,
    RunRequeued,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolResult,
    TurnStarted,
)
from perdure.store.log import Accepted, Append, Claim, Command, Create, EventLog, Lease, Mark, Refused, Retry, RunRow
from perdure.store.memory import MemoryLog
from perdure.store.schema import metadata
from perdure.store.sql import open_log

RUN = "run-1"
LEASE = Lease("supervisor", "super-1", "node-a", "boot-a", 100, 50.0, 1e9)


class Clock:
    """Seconds, moved by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def created(**fields: Any) -> RunCreated:
    return RunCreated(agent=AgentRef(ref="shop:agent", digest="d1"), input={"ask": "refund?"}, **fields)


def message(index: int = 0) -> AssistantMessage:
    return AssistantMessage(turn_index=index, text="Let me see.", stop_reason="tool_use")


def request(call_id: str = "c1", effect: Effect = "non_idempotent", index: int = 0) -> ToolCallRequested:
    return ToolCallRequested(
        turn_index=index,
        tool_call_id=call_id,
        provider_id="call_0",
        name="refund",
        arguments="{}",
        effect=effect,
        idempotency_key=f"key-{call_id}",
    )


def started(call_id: str = "c1", attempt: int = 1, nonce: str = "task-1") -> ToolCallStarted:
    return ToolCallStarted(
        event_id=f"{call_id}-{attempt}-{nonce}",
        tool_call_id=call_id,
        attempt=attempt,
        nonce=nonce,
        node="node-a",
        boot_id="boot-a",
        pid=7,
        pid_started=5.0,
        lock="lock",
        hold_s=60.0,
    )


def result(call_id: str = "c1", attempt: int = 1, *, is_error: bool = False, **fields: Any) -> ToolResult:
    return ToolResult(tool_call_id=call_id, attempt=attempt, content='"done"', is_error=is_error, **fields)


def mark(call_id: str = "c1", attempt: int = 1, nonce: str = "task-1") -> Mark:
    return Mark(RUN, started(call_id, attempt, nonce))


def retry(attempt: int = 2, call_id: str = "c1", epoch: int = 1, seen_started: int = 0) -> Retry:
    event = ToolCallRetried(tool_call_id=call_id, attempt=attempt, reason="lost")
    return Retry(RUN, epoch, seen_started, event)


def unsettled(call_id: str = "c1", attempt: int = 1) -> ToolCallUnsettled:
    return ToolCallUnsettled(tool_call_id=call_id, attempt=attempt, why="no probe")


def cancel(reason: str = "") -> CancelRequested:
    return CancelRequested(by="user", reason=reason)


def requeue() -> RunRequeued:
    return RunRequeued(by="user")


def failed(code: str = "crash_loop") -> RunFailed:
    return RunFailed(code=code, message="gave up", phase="start")


async def open_kind(kind: str, folder: Path, clock: Clock) -> EventLog:
    """An empty log of a kind. PostgreSQL is tried where PERDURE_TEST_POSTGRES names a database that may be emptied."""
    if kind == "memory":
        return MemoryLog(clock)
    if kind == "sqlite":
        return await open_log(folder / "x.db", clock=clock)
    url = os.environ.get("PERDURE_TEST_POSTGRES")
    if not url:
        pytest.skip("PERDURE_TEST_POSTGRES is not set")
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
    await engine.dispose()
    return await open_log(url, clock=clock)


KINDS = ["memory", "sqlite", "postgres"]


async def accept(log: EventLog, command: Command) -> Accepted:
    """The acceptance of a command that must be accepted."""
    (verdict,) = await log.commit([command])
    assert isinstance(verdict, Accepted), verdict
    return verdict


async def refuse(log: EventLog, command: Command) -> Refused:
    """The refusal of a command that must be refused, and that must leave no trace."""
    before = await log.run(command.run_id), await log.read(command.run_id), await log.calls(command.run_id)
    (verdict,) = await log.commit([command])
    assert isinstance(verdict, Refused), verdict
    after = await log.run(command.run_id), await log.read(command.run_id), await log.calls(command.run_id)
    assert before == after, "a refused command must change nothing"
    return verdict


async def queued(log: EventLog, run_id: str = RUN, **fields: Any) -> RunRow:
    return (await accept(log, Create(run_id, created(**fields)))).row


async def running(log: EventLog, run_id: str = RUN) -> RunRow:
    """A run with events 1 and 2, claimed with epoch 1."""
    await queued(log, run_id)
    await log.take_lease(LEASE, None)
    return (await accept(log, Claim(run_id, f"claim-{run_id}", LEASE.nonce, 0))).row


async def with_calls(log: EventLog, *requests: ToolCallRequested) -> RunRow:
    """A run in its first turn with these calls open (one non_idempotent one if none are given)."""
    row = await running(log)
    events: tuple[Event, ...] = (TurnStarted(turn_index=0), message(), *(requests or (request(),)))
    return (await accept(log, Append(RUN, row.epoch, row.seq, events))).row
