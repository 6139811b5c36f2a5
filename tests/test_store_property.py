"""Random histories: memory and SQL give the same answers, and every projection is what a refold of the log gives."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.store.events import (
    Effect,
    Event,
    RunCancelled,
    RunCompleted,
    RunCreated,
    RunFailed,
    Stored,
    TurnStarted,
)
from perdure.store.log import (
    Abandon,
    Accepted,
    Answer,
    Append,
    CallRow,
    Cancel,
    Claim,
    Command,
    Create,
    EventLog,
    Leave,
    Mark,
    Refused,
    Requeue,
    Result,
    Retry,
    RunRow,
    Unsettle,
    Verdict,
)
from perdure.store.memory import MemoryLog
from perdure.store.projections import Fold
from perdure.store.sql import open_log
from perdure.store.states import Status

from .store_kit import (
    LEASE,
    Clock,
    cancel,
    created,
    failed,
    message,
    request,
    requeue,
    result,
    retry,
    started,
    unsettled,
)

RUNS = st.sampled_from(["r1", "r2"])
CALLS = st.sampled_from(["c1", "c2", "c3"])
EFFECTS: st.SearchStrategy[Effect] = st.sampled_from(["read_only", "idempotent_write", "non_idempotent"])
SMALL = st.integers(1, 2)
NONCES = st.sampled_from(["t1", "t2"])
EPOCHS = st.integers(0, 2)
LEASES = st.sampled_from([LEASE.nonce, LEASE.nonce, "old"])


@st.composite
def owners_events(draw: st.DrawFn) -> tuple[Event, ...]:
    """Mostly what an owner sends, at times nonsense."""
    shape = draw(st.integers(0, 6))
    if shape <= 3:
        calls = draw(st.lists(st.tuples(CALLS, EFFECTS), max_size=3))
        return TurnStarted(turn_index=0), message(), *(request(call, effect) for call, effect in calls)
    if shape == 4:
        return (result(draw(CALLS), draw(SMALL)),)
    return draw(
        st.sampled_from(
            [
                (),
                (RunCompleted(output=1, stop_reason="end"),),
                (RunCancelled(reason="user"),),
                (RunFailed(code="x", message="x", phase="turn"), TurnStarted(turn_index=9)),
                (cancel(),),
            ]
        )
    )


@st.composite
def commands(draw: st.DrawFn) -> tuple[Command, int]:
    """A command, and how far its expected_seq is from the truth (filled in when it is sent)."""
    run, call, attempt = draw(RUNS), draw(CALLS), draw(SMALL)
    off = draw(st.sampled_from([0, 0, 0, 0, 1, 2, 5, -1]))
    late = result(call, attempt, is_error=draw(st.booleans()))
    choices: list[Command] = [
        Create(run, created(priority=draw(SMALL), batch=draw(st.sampled_from([None, "b1"])))),
        Claim(run, draw(st.sampled_from(["e1", "e2", "e3"])), draw(LEASES), 0),
        Append(run, draw(EPOCHS), 0, draw(owners_events())),
        Append(run, 1, 0, draw(owners_events())),
        Mark(run, started(call, attempt, draw(NONCES))),
        Leave(run, call, attempt),
        Retry(run, draw(EPOCHS), draw(st.integers(0, 1)), retry(2, call).event),
        Result(run, late),
        Unsettle(run, unsettled(call, attempt)),
        Answer(run, late),
        Cancel(run, cancel()),
        Requeue(run, requeue()),
        Abandon(run, LEASE.nonce, draw(EPOCHS), failed()),
    ]
    weights = [0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 5, 6, 7, 7, 7, 8, 9, 10, 11, 12]
    return choices[draw(st.sampled_from(weights))], off


OPENING: list[tuple[Command, int]] = [(Create("r1", created()), 0), (Claim("r1", "e0", LEASE.nonce, 0), 0)]
GROUPS = st.lists(st.lists(commands(), min_size=1, max_size=4), min_size=4, max_size=14)


def aim(command: Command, off: int, rows: dict[str, RunRow], sent: list[Append]) -> Command:
    """Fill in what a real sender would know, or know wrongly; some appends are sent a second time."""
    row = rows.get(command.run_id)
    if isinstance(command, Claim) and row and off < 2:
        return replace(command, seen_epoch=row.epoch)
    if isinstance(command, Append) and row:
        if off == 5 and sent:
            return sent[-1]
        command = replace(command, expected_seq=max(0, row.seq - off))
        sent.append(command)
    return command


def same(ours: Verdict, theirs: Verdict) -> bool:
    """Whether two logs gave the same answer. Events that a log makes itself have ids of their own."""
    if isinstance(ours, Refused) or isinstance(theirs, Refused):
        return (
            isinstance(ours, Refused)
            and isinstance(theirs, Refused)
            and (ours.reason, ours.message, plain(ours.newer)) == (theirs.reason, theirs.message, plain(theirs.newer))
        )
    rows = [calls_without_ids(verdict.calls) for verdict in (ours, theirs)]
    return (ours.row, plain(ours.events), ours.already, rows[0]) == (
        theirs.row,
        plain(theirs.events),
        theirs.already,
        rows[1],
    )


def plain(events: Sequence[Stored]) -> list[object]:
    return [(s.seq, s.at, s.epoch, s.event.model_dump(exclude={"event_id"})) for s in events]


def calls_without_ids(calls: Sequence[CallRow]) -> list[CallRow]:
    return [replace(call, result_id="") for call in calls]


def refold(run_id: str, stored: Sequence[Stored]) -> tuple[RunRow, list[CallRow]]:
    """The projections of a log from its events alone."""
    first = stored[0].event
    assert isinstance(first, RunCreated)
    row = RunRow(
        run_id, Status.QUEUED, 0, 0, first.agent.ref, first.agent.digest, first.batch, first.sample, first.priority,
        stored[0].at, stored[0].at,
    )  # fmt: skip
    fold = Fold(row, {})
    for item in stored:
        assert fold.add(item.event, item.at) == item
    return fold.row, list(fold.calls.values())


async def check(log: EventLog) -> None:
    """The log's own laws."""
    for row in await log.runs():
        stored = await log.read(row.run_id)
        assert [item.seq for item in stored] == list(range(1, row.seq + 1)), "seq has no gaps"
        assert refold(row.run_id, stored) == (row, await log.calls(row.run_id)), "a refold gives the projections"


async def play(groups: Sequence[Sequence[tuple[Command, int]]], folder: Path) -> None:
    clock = Clock()
    memory, sql = MemoryLog(clock), await open_log(folder / "x.db", clock=clock)
    rows: dict[str, RunRow] = {}
    sent: list[Append] = []
    try:
        for log in (memory, sql):
            await log.take_lease(LEASE, None)
        for group in [OPENING[:1], OPENING[1:], *groups]:
            clock.now += 1
            aimed = [aim(command, off, rows, sent) for command, off in group]
            ours, theirs = await memory.commit(aimed), await sql.commit(aimed)
            for command, mine, other in zip(aimed, ours, theirs, strict=True):
                assert same(mine, other), (command, mine, other)
                if isinstance(mine, Accepted):
                    rows[command.run_id] = mine.row
        assert await memory.runs() == await sql.runs()
        assert await memory.counts() == await sql.counts()
        for log in (memory, sql):
            await check(log)
        for run_id in rows:
            assert plain(await memory.read(run_id)) == plain(await sql.read(run_id))
            assert calls_without_ids(await memory.calls(run_id)) == calls_without_ids(await sql.calls(run_id))
    finally:
        await sql.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(groups=GROUPS)
def test_memory_and_sql_agree_on_any_history_and_a_refold_gives_the_rows(
    groups: list[list[tuple[Command, int]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(groups, Path(folder)))
