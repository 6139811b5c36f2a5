"""Runs that wait for people, put into any log without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.store.events import (
    AgentRef,
    ApprovalRequested,
    AssistantMessage,
    Event,
    RunCompleted,
    RunCreated,
    ToolCallRequested,
    ToolCallStarted,
    ToolCallUnsettled,
    TurnStarted,
)
from perdure.store.log import Accepted, Append, Claim, Command, Create, EventLog, Expire, Mark, Unsettle
from perdure.store.rows import RunRow
from perdure.store.states import Status

from .batch_kit import LEASE, FakeDoor

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"order_id": {"type": "string"}, "amount": {"type": "integer"}},
    "required": ["order_id"],
    "additionalProperties": False,
}
ARGUMENTS = '{"order_id":"17"}'


def wants(call_id: str = "c1", arguments: str = ARGUMENTS) -> ToolCallRequested:
    """A call of the model's."""
    return ToolCallRequested(
        turn_index=0,
        tool_call_id=call_id,
        provider_id="call_0",
        name="refund",
        arguments=arguments,
        effect="non_idempotent",
        idempotency_key=f"key-{call_id}",
    )


def asks(call_id: str = "c1", **fields: Any) -> ApprovalRequested:
    """The question whether a call may run."""
    values: dict[str, Any] = {
        "tool_call_id": call_id,
        "name": "refund",
        "arguments": ARGUMENTS,
        "effect": "non_idempotent",
        "digest": f"digest-{call_id}",
        "arguments_schema": SCHEMA,
    }
    return ApprovalRequested(**(values | fields))


async def done(log: EventLog, *commands: Command) -> list[Accepted]:
    """The acceptances of commands that must be accepted, each in a transaction of its own."""
    accepted = []
    for command in commands:
        (verdict,) = await log.commit([command])
        assert isinstance(verdict, Accepted), verdict
        accepted.append(verdict)
    return accepted


async def begin(log: EventLog, create: Create | str, *events: Event) -> RunRow:
    """A run that is claimed, and whose first turn has these events behind its message."""
    if isinstance(create, str):
        create = Create(create, RunCreated(agent=AgentRef(ref="/x/shop.py:agent", digest="d1"), input="refund?"))
    await log.take_lease(LEASE, None)
    run_id = create.run_id
    said = AssistantMessage(turn_index=0, text="Let me see.", stop_reason="tool_use")
    turn = (TurnStarted(turn_index=0), said, *events)
    claim = Claim(run_id, f"claim-{run_id}", LEASE.nonce, 0)
    return (await done(log, create, claim, Append(run_id, 1, 2, turn)))[-1].row


async def gated(log: EventLog, run_id: str, call_ids: Sequence[str] = ("c1",), **fields: Any) -> RunRow:
    """A run that waits for the approval of these calls."""
    questions = [asks(call_id, **fields) for call_id in call_ids]
    return await begin(log, run_id, *[wants(call_id) for call_id in call_ids], *questions)


async def doubtful(log: EventLog, run_id: str, call_id: str = "c1", *others: Event) -> RunRow:
    """A run with a call that was interrupted after it had begun, in process 7 on node-a."""
    await begin(log, run_id, wants(call_id), *others)
    mark = ToolCallStarted(
        event_id=f"mark-{run_id}-{call_id}",
        tool_call_id=call_id,
        attempt=1,
        nonce="task-1",
        node="node-a",
        boot_id="boot-a",
        pid=7,
        pid_started=5.0,
        lock="lock",
        hold_s=60.0,
    )
    why = ToolCallUnsettled(tool_call_id=call_id, attempt=1, why="it has no probe")
    return (await done(log, Mark(run_id, mark), Unsettle(run_id, why)))[-1].row


class ParkingDoor(FakeDoor):
    """A store whose runs ask for approval as soon as they are created; `in_time` is False where nobody decides."""

    in_time = True

    async def create(self, creates: Sequence[Create]) -> None:
        for create in creates:
            if await self.log.run(create.run_id) is None:
                self.launched.append(create.run_id)
                await begin(self.log, create, wants(), asks(timeout_s=None if self.in_time else 1e-6))
                await done(self.log, Expire(create.run_id, LEASE.nonce))


async def finish(log: EventLog) -> None:
    """See the runs of which nothing is open any more through to their end."""
    for row in await log.runs(statuses=[Status.RUNNING]):
        said = AssistantMessage(turn_index=row.turns, text="well", stop_reason="end_turn")
        end = RunCompleted(output="well", stop_reason="end_turn")
        events = (TurnStarted(turn_index=row.turns), said, end)
        await done(log, Append(row.run_id, row.epoch, row.seq, events))
