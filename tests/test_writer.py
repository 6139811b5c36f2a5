"""Group commit: groups form, failures stay where they belong, nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from perdure.store.errors import StoreUnavailable
from perdure.store.events import TurnStarted
from perdure.store.log import Accepted, Append, Command, Create, Refused, Verdict
from perdure.store.memory import MemoryLog
from perdure.store.sql import open_log
from perdure.store.writer import GroupWriter

from .store_kit import RUN, created, running


class GatedLog(MemoryLog):
    """A log whose commits wait at a gate, are counted, and fail on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[str]] = []
        self.entered, self.gate = asyncio.Event(), asyncio.Event()
        self.failure: BaseException | None = None

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        self.groups.append([command.run_id for command in commands])
        self.entered.set()
        await self.gate.wait()
        if self.failure:
            raise self.failure
        return await super().commit(commands)


def create(name: str) -> Create:
    return Create(name, created())


async def held(log: GatedLog, writer: GroupWriter) -> asyncio.Task[Accepted]:
    """A first request that is inside its commit."""
    first = asyncio.create_task(writer.submit(create("first")))
    await log.entered.wait()
    return first


async def sent(writer: GroupWriter, *names: str) -> list[asyncio.Task[Accepted]]:
    """Requests that wait for the next group."""
    tasks = [asyncio.create_task(writer.submit(create(name))) for name in names]
    await asyncio.sleep(0)  # a turn of the loop: each of them begins
    assert len(writer._pending) == len(names)
    return tasks


async def test_everything_that_arrives_during_a_commit_goes_into_the_next_one() -> None:
    log = GatedLog()
    writer = GroupWriter(log)
    first = await held(log, writer)
    names = [f"r{number}" for number in range(50)]
    waiting = await sent(writer, *names)
    log.gate.set()
    await asyncio.gather(first, *waiting)
    assert log.groups == [["first"], names]


async def test_a_group_has_a_limit_and_a_request_is_never_split() -> None:
    log = GatedLog()
    writer = GroupWriter(log, max_group=3)
    first = await held(log, writer)
    waiting = await sent(writer, "a", "b", "c", "d")
    whole = asyncio.create_task(writer.submit_all([create(name) for name in "efghi"]))
    log.gate.set()
    await asyncio.gather(first, *waiting, whole)
    assert log.groups == [["first"], ["a", "b", "c"], ["d"], ["e", "f", "g", "h", "i"]]


async def test_a_refused_command_leaves_the_rest_of_its_group_in() -> None:
    log = GatedLog()
    writer = GroupWriter(log)
    first = await held(log, writer)
    waiting = await sent(writer, "a", "first", "b")
    log.gate.set()
    await first
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[1], Refused)
    assert outcomes[1].reason == "exists"
    assert [isinstance(outcome, Accepted) for outcome in outcomes] == [True, False, True]
    assert len(log.groups) == 2


async def test_commands_of_one_request_get_a_verdict_each_in_order() -> None:
    writer = GroupWriter(MemoryLog())
    verdicts = await writer.submit_all([create("a"), create("a"), create("b")])
    assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted]
    assert await writer.submit_all([]) == []


async def test_an_unavailable_store_fails_its_group_and_not_the_next() -> None:
    log = GatedLog()
    writer = GroupWriter(log)
    log.failure = StoreUnavailable("locked")
    first = await held(log, writer)
    log.gate.set()
    with pytest.raises(StoreUnavailable, match="locked"):
        await first
    outcomes = await asyncio.gather(*(await sent(writer, "a", "b")), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["locked", "locked"]
    log.failure = None
    await writer.submit(create("a"))


async def test_an_unexpected_error_reaches_every_caller_of_its_group() -> None:
    log = GatedLog()
    writer = GroupWriter(log)
    log.failure = RuntimeError("a bug")
    log.gate.set()
    outcomes = await asyncio.gather(*(writer.submit(create(name)) for name in "ab"), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["a bug", "a bug"]


async def test_a_cancelled_caller_does_not_harm_its_group() -> None:
    log = GatedLog()
    writer = GroupWriter(log)
    first = await held(log, writer)
    waiting = await sent(writer, "a", "b")
    first.cancel()
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    log.gate.set()
    assert (await waiting[1]).row.run_id == "b"
    assert {row.run_id for row in await log.runs()} == {"first", "a", "b"}


async def test_close_finishes_what_is_pending_and_refuses_what_comes_later() -> None:
    log = GatedLog()
    writer = GroupWriter(log)
    first = await held(log, writer)
    waiting = await sent(writer, "a", "b")
    closing = asyncio.create_task(writer.close())
    log.gate.set()
    await closing
    assert [task.done() for task in (first, *waiting)] == [True, True, True]
    with pytest.raises(StoreUnavailable, match="closed"):
        await writer.submit(create("late"))
    await writer.close()


async def test_many_owners_append_through_one_writer_and_every_log_is_whole(tmp_path: Path) -> None:
    log = await open_log(tmp_path / "runs.db")
    writer = GroupWriter(log)
    names = [f"run-{number}" for number in range(16)]
    for name in names:
        await running(log, name)

    async def owner(name: str) -> None:
        seq = 2
        for index in range(10):
            seq = (await writer.submit(Append(name, 1, seq, (TurnStarted(turn_index=index),)))).row.seq

    await asyncio.gather(*(owner(name) for name in names))
    await writer.close()
    for name in names:
        assert [stored.seq for stored in await log.read(name)] == list(range(1, 13))
    assert await log.run(RUN) is None or RUN in names
    await log.close()
