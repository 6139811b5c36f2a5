"""Shared stand-ins and checkers. Everything here is outside the product: what it says can be held against it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from perdure.actors.agent import Agent
from perdure.actors.children import Named
from perdure.actors.loading import LoadedAgent
from perdure.actors.machine import Call, State, fold
from perdure.actors.model import ModelReply, ModelRequest
from perdure.actors.proof import Looked
from perdure.store.events import AgentRef, RunCreated, Stored
from perdure.store.log import Accepted, Claim, Command, Create, EventLog, Verdict
from perdure.store.memory import SUPERVISOR
from perdure.store.projections import Fold
from perdure.store.rows import CallRow, Lease, RunRow
from perdure.store.states import Status

RUN = "r" * 20
STORE = uuid4().hex[:8]
"""A store of this test process alone: what has a mark of it belongs to no other test, on the same machine or not."""
LEASE = "the supervisor"
AGENT = AgentRef(ref="agents.py:agent", digest="d")


@dataclass
class ManualClock:
    """Time that only moves when a test or a sleeper moves it."""

    now: float = 1_000.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """To be passed as a sleep function: the time is over at once."""
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Tape:
    """A model that plays fixed turns, checks every request, and remembers what it was shown."""

    def __init__(self, turns: Sequence[ModelReply]) -> None:
        self._turns = turns
        self.asked: list[tuple[int, list[dict[str, Any]]]] = []

    async def __call__(self, request: ModelRequest) -> ModelReply:
        check_messages(request.messages)
        self.asked.append((request.turn_index, copy.deepcopy(request.messages)))
        return self._turns[request.turn_index]


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """What every strict provider demands of a conversation: each call has exactly one result, in the next message."""
    assert messages, "a request without messages"
    assert messages[0]["role"] == "user", "a conversation begins with the user"
    seen: set[str] = set()
    for number, message in enumerate(messages):
        following = messages[number + 1] if number + 1 < len(messages) else None
        if message["role"] == "assistant":
            ids = [call["id"] for call in message["tool_calls"]]
            assert ids or message["text"], f"message {number} is empty"
            assert len(set(ids)) == len(ids) and not seen & set(ids), f"message {number} repeats a call id: {ids}"
            seen |= set(ids)
            for call in message["tool_calls"]:
                json.loads(call["arguments"])
            if ids:
                assert following and following["role"] == "tool", f"the calls of message {number} have no results"
                answered = [result["tool_call_id"] for result in following["results"]]
                assert answered == ids, f"message {number} asked {ids}, {answered} were answered"
        elif message["role"] == "tool":
            assert messages[number - 1]["role"] == "assistant", f"message {number} answers nobody"
            assert message["results"], f"message {number} is an empty answer"
            for result in message["results"]:
                json.loads(result["content"])
        else:
            assert message["role"] == "user", f"message {number} has role {message['role']}"
            told = number == 0 or (messages[number - 1]["role"] != "assistant" and message["content"])
            assert told, f"message {number} is no notice before a turn"
    assert messages[-1]["role"] != "assistant", "the model is asked to answer itself"


# -- logs -------------------------------------------------------------------------------------------------


def created(**changes: Any) -> RunCreated:
    """A run_created event."""
    values: dict[str, Any] = {"agent": AGENT, "input": "hello"} | changes
    return RunCreated(**values)


async def give_lease(log: EventLog) -> None:
    """Make LEASE the supervisor of a log."""
    holder = await log.lease(SUPERVISOR)
    lease = Lease(SUPERVISOR, LEASE, "node", "boot", 1, 1.0, 1e12)
    assert await log.take_lease(lease, holder.nonce if holder else None)


async def new_run(log: EventLog, event: RunCreated | None = None, run_id: str = RUN) -> None:
    """A supervisor's lease and a queued run."""
    await give_lease(log)
    await accepted(log, Create(run_id, event or created()))


async def claim(log: EventLog, run_id: str = RUN) -> int:
    """Claim a run for a new owner; its epoch."""
    row = await log.run(run_id)
    assert row is not None
    done = await accepted(log, Claim(run_id, f"claim {row.epoch + 1}", LEASE, row.epoch))
    return done.row.epoch


async def verdict(log: EventLog, command: Command) -> Verdict:
    """The verdict on one command."""
    return (await log.commit([command]))[0]


async def accepted(log: EventLog, command: Command) -> Accepted:
    """Commit a command that must be accepted."""
    answer = await verdict(log, command)
    assert isinstance(answer, Accepted), answer
    return answer


async def refused(log: EventLog, command: Command) -> str:
    """Commit a command that must be refused; the reason."""
    answer = await verdict(log, command)
    assert not isinstance(answer, Accepted), f"accepted: {command}"
    return answer.reason


def check_projection(events: Sequence[Stored], row: RunRow, calls: Iterable[CallRow]) -> State:
    """The log has no gap, folds, and at every prefix says the same as the projections; the last equals the rows."""
    assert [stored.seq for stored in events] == list(range(1, len(events) + 1)), "the log has a gap"
    assert len({stored.event.event_id for stored in events}) == len(events), "an event is in the log twice"
    fields = ("run_id", "agent", "digest", "batch", "sample", "priority", "created_at", "budget")
    empty = RunRow(
        **{name: getattr(row, name) for name in fields},
        status=Status.QUEUED,
        seq=0,
        epoch=0,
        updated_at=row.created_at,
    )
    folded = Fold(empty, {})
    state: State | None = None
    for stored in events:
        assert folded.add(stored.event, stored.at) == stored
        state = fold([stored], state)
        _same(state, folded.row, folded.calls)
    assert state is not None
    assert folded.row == row
    assert folded.calls == {call.tool_call_id: call for call in calls}
    return state


def _same(state: State, row: RunRow, rows: dict[str, CallRow]) -> None:
    folded = state.status, state.seq, state.epoch, state.turn_count, state.usage, state.cancel is not None
    assert folded == (row.status, row.seq, row.epoch, row.turns, row.usage, row.cancel)
    machine = {name: _facts(call, rows[name]) for name, call in named(state).items()}
    assert machine == {
        name: (
            call.attempt,
            call.started_attempt,
            call.unsettled and call.result_seq is None,
            call.gate,
            call.question,
            call.waits,
            call.result_seq,
        )
        for name, call in rows.items()
    }


def named(state: State) -> dict[str, Call]:
    """All calls of a run by id."""
    return {call.tool_call_id: call for turn in state.turns for call in turn.calls}


def _facts(call: Call, row: CallRow) -> tuple[int, int, bool, str, str, bool, int | None]:
    """What a call is in the machine, in the terms of its row."""
    unsettled = call.unsettled is not None and call.result is None
    same_result = call.result is not None and call.result.event_id == row.result_id
    seq = row.result_seq if same_result else None
    return call.attempt, call.started_attempt, unsettled, call.gate, call.question, call.waits, seq


# -- agents and journals ----------------------------------------------------------------------------------


def loader(agent: Agent) -> Callable[[str, str], LoadedAgent]:
    """A `load` for an owner that knows one agent."""
    return lambda ref, digest: LoadedAgent(agent, AGENT, Path("."))


async def until(true: Callable[[], bool], turns_max: int = 10_000) -> None:
    """Let other tasks go on until something is true; an error if it never becomes so."""
    for _ in range(turns_max):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


async def settle_down(turns: int = 50) -> None:
    """Give every task that can go on the chance to do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def held(waiting: Awaitable[Any]) -> Any:
    """The value of something that should come at once; an error instead of a test that hangs."""
    async with asyncio.timeout(20):
        return await waiting


class NoProcesses:
    """The part of `Tasks` that is about processes, for tests whose attempts have none: each is over when it is asked
    about, and there is nothing to signal, to end or to kill."""

    async def prove_dead(self, call: CallRow) -> bool:
        return True

    def begun(self, run_id: str, tool_call_id: str, attempt: int, node: str, pid: int) -> None:
        return None

    async def stop(self, run_id: str, tool_call_id: str) -> None:
        return None

    async def end_children(self, wanted: str, nodes: Collection[str]) -> None:
        return None

    def kill(self, run_id: str, tool_call_id: str) -> None:
        return None

    async def look(self, store: str, everywhere: bool = True) -> list[Looked]:
        return [Looked("here", ("node",), ())]

    async def end(self, node: str, processes: Sequence[Named]) -> None:
        raise AssertionError("nothing was found")
