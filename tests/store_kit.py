"""What the tests of the logs share: a clock that is moved by hand, short ways to say events, runs in a given state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from perdure.store.events import (
    AgentRef,
    ApprovalDecided,
    ApprovalRequested,
    AssistantMessage,
    CancelRequested,
    Decision,
    Effect,
    Event,
    RunCreated,
    RunFailed,
    RunRequeued,
    Settlement,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolResult,
    TurnStarted,
)
from perdure.store.log import (
    Accepted,
    Answer,
    Append,
    Claim,
    Command,
    Create,
    Decide,
    EventLog,
    Expire,
    Leave,
    Mark,
    Refused,
    Result,
    Retry,
    Settle,
    Unsettle,
)
from perdure.store.memory import MemoryLog
from perdure.store.rows import CallRow, Lease, RunRow
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
    """A question whether an attempt happened; its id is `what-CALL-ATTEMPT`."""
    return ToolCallUnsettled(
        event_id=f"what-{call_id}-{attempt}", tool_call_id=call_id, attempt=attempt, why="no probe"
    )


def asks(call_id: str = "c1", question: str = "", **fields: Any) -> ApprovalRequested:
    """A question whether a call may run; its id is `ask-CALL` if none is given."""
    values: dict[str, Any] = {
        "event_id": question or f"ask-{call_id}",
        "tool_call_id": call_id,
        "name": "refund",
        "arguments": "{}",
        "effect": "non_idempotent",
        "digest": f"digest-{call_id}",
        "arguments_schema": {"type": "object"},
    }
    return ApprovalRequested(**(values | fields))


def decides(decision: Decision = "approve", call_id: str = "c1", *, by: str = "ann", **fields: Any) -> Decide:
    """An answer to what `asks` asks."""
    values: dict[str, Any] = {"question": f"ask-{call_id}", "digest": f"digest-{call_id}"} | fields
    return Decide(RUN, ApprovalDecided(tool_call_id=call_id, decision=decision, by=by, **values))


def settles(outcome: Settlement, call_id: str = "c1", *, by: str = "ann", content: str = "", **fields: Any) -> Settle:
    """An answer to what `unsettled` asks."""
    values: dict[str, Any] = {"question": f"what-{call_id}-1", "attempt": 1} | fields
    return Settle(RUN, ToolCallSettled(tool_call_id=call_id, outcome=outcome, by=by, **values), content)


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
    return await with_events(log, *(requests or (request(),)))


async def gated(log: EventLog, *events: Event, **fields: Any) -> RunRow:
    """A run whose first turn has one call that a person is asked about, and `events`."""
    requests = [event for event in events if isinstance(event, ToolCallRequested)]
    others = [event for event in events if event not in requests]
    return await with_events(log, request(), *requests, asks(**fields), *others)


async def with_events(log: EventLog, *events: Event, run_id: str = RUN) -> RunRow:
    """A run whose first turn has these events behind its message."""
    row = await running(log, run_id)
    start: tuple[Event, ...] = (TurnStarted(turn_index=0), message())
    return (await accept(log, Append(run_id, row.epoch, row.seq, (*start, *events)))).row


async def doubtful(log: EventLog, *others: ToolCallRequested) -> RunRow:
    """A run with a call that has begun, and of which a person is asked whether it happened."""
    await with_calls(log, request(), *others)
    await accept(log, mark())
    return (await accept(log, Unsettle(RUN, unsettled()))).row


async def call_of(log: EventLog, call_id: str = "c1") -> CallRow:
    """The row of one call."""
    (call,) = [call for call in await log.calls(RUN) if call.tool_call_id == call_id]
    return call


def kinds(accepted: Accepted) -> list[str]:
    """What an accepted command has appended."""
    return [stored.event.type for stored in accepted.events]


def expire_at(clock: Clock, now: float) -> Expire:
    """The supervisor's timer, at a time to which the clock is set."""
    clock.now = now
    return Expire(RUN, LEASE.nonce)


async def refusals(log: EventLog, attempt: int) -> set[str]:
    """The reasons for which all that could let the call act, or say that it has, is refused."""
    commands = (
        mark(attempt=attempt),
        Leave(RUN, "c1", attempt),
        retry(attempt + 1),
        Answer(RUN, result(attempt=attempt, source="probe")),
        Unsettle(RUN, unsettled(attempt=attempt)),
        Result(RUN, result(attempt=attempt)),
    )
    return {(await refuse(log, command)).reason for command in commands}


BESIDE = request("c2", "read_only")
"""A call that needs no approval."""
