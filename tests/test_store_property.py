"""Random histories: memory and SQL give the same answers, and every projection is what a refold of the log gives."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.store.events import (
    ApprovalRequested,
    CodeChanged,
    Decision,
    Effect,
    Event,
    ProcessesChecked,
    Raised,
    RunCancelled,
    RunCompleted,
    RunCreated,
    RunFailed,
    Settlement,
    Stored,
    TurnStarted,
)
from perdure.store.log import (
    Abandon,
    Accepted,
    Answer,
    Append,
    Cancel,
    Check,
    Claim,
    Command,
    Create,
    Decide,
    EventLog,
    Expire,
    Leave,
    Mark,
    Refused,
    Requeue,
    Result,
    Retry,
    Settle,
    Unsettle,
    Verdict,
)
from perdure.store.memory import MemoryLog
from perdure.store.projections import Fold
from perdure.store.rows import CallRow, RunRow
from perdure.store.sql import open_log
from perdure.store.states import Status

from .store_kit import (
    LEASE,
    Clock,
    asks,
    cancel,
    created,
    decides,
    failed,
    message,
    request,
    requeue,
    result,
    retry,
    settles,
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
DECISIONS: st.SearchStrategy[Decision] = st.sampled_from(["approve", "reject"])
SETTLEMENTS: st.SearchStrategy[Settlement] = st.sampled_from(["happened", "not_happened", "abandon"])


@st.composite
def questions(draw: st.DrawFn, call: str) -> ApprovalRequested:
    """A question with an id of its own; most have a deadline that the clock of a history reaches."""
    default = draw(st.sampled_from([None, None, "approve", "reject"]))
    return asks(call, uuid4().hex, timeout_s=draw(st.sampled_from([None, 1.0, 3.0, 9.0])), default=default)


@st.composite
def turns(draw: st.DrawFn) -> tuple[Event, ...]:
    """A turn of which some calls need an approval."""
    calls = draw(st.lists(st.tuples(CALLS, EFFECTS, st.booleans()), min_size=1, max_size=3))
    requests = [request(call, effect) for call, effect, _ in calls]
    asked = [draw(questions(call)) for call, _, gated in calls if gated]
    return TurnStarted(turn_index=0), message(), *requests, *asked


@st.composite
def owners_events(draw: st.DrawFn) -> tuple[Event, ...]:
    """Mostly what an owner sends, at times nonsense."""
    shape = draw(st.integers(0, 9))
    if shape <= 4:
        return draw(turns())
    if shape == 9:
        raised = draw(st.dictionaries(CALLS, st.builds(Raised, effect=EFFECTS, hold_s=st.just(9.0)), max_size=2))
        return (CodeChanged(was="d1", digest=draw(st.sampled_from(["d1", "d2"])), tools={}, raised=raised),)
    if shape <= 6:
        return tuple(draw(questions(call)) for call in draw(st.lists(CALLS, min_size=1, max_size=3, unique=True)))
    if shape == 7:
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
        Retry(run, draw(EPOCHS), draw(st.integers(0, 1)), retry(attempt, call).event),
        Result(run, late),
        Unsettle(run, unsettled(call, attempt).model_copy(update={"event_id": uuid4().hex})),
        Answer(run, late),
        Cancel(run, cancel()),
        Requeue(run, requeue()),
        Abandon(run, LEASE.nonce, draw(EPOCHS), failed()),
        replace(decides(draw(DECISIONS), call), run_id=run),
        replace(settles(draw(SETTLEMENTS), call, attempt=attempt, content="1"), run_id=run),
        Expire(run, draw(LEASES)),
        Check(run, ProcessesChecked(asked=1, machines=())),
    ]
    weights = [0, 1, 1, 2, 3, 3, 3, 4, 4, 5, 6, 6, 7, 7, 7, 8, 8, 9, 10, 11, 11, 12, 13, 13, 13, 14, 14, 14, 15, 15, 16]
    return choices[draw(st.sampled_from(weights))], off


GROUPS = st.lists(st.lists(commands(), min_size=1, max_size=4), min_size=8, max_size=20)


@dataclass
class Known:
    """What the senders of a history know."""

    rows: dict[str, RunRow] = field(default_factory=dict)
    calls: dict[tuple[str, str], CallRow] = field(default_factory=dict)
    sent: list[Append] = field(default_factory=list)
    decisions: list[Decide | Settle] = field(default_factory=list)

    def learn(self, accepted: Accepted) -> None:
        run_id = accepted.row.run_id
        self.rows[run_id] = accepted.row
        self.calls.update(((run_id, call.tool_call_id), call) for call in accepted.calls)


def aim(command: Command, off: int, known: Known) -> Command:
    """Fill in what a real sender would know, or know wrongly; some commands are sent a second time."""
    row = known.rows.get(command.run_id)
    if isinstance(command, Decide | Settle) and off == 5 and known.decisions:
        return known.decisions[-1]
    if isinstance(command, Append) and off == 5 and known.sent:
        return known.sent[-1]
    if off < 2:
        command = fitted(command, row, known.calls)
    if isinstance(command, Append) and row:
        command = replace(command, expected_seq=max(0, row.seq - off))
        known.sent.append(command)
    if isinstance(command, Decide | Settle):
        known.decisions.append(command)
    return command


def fitted(command: Command, row: RunRow | None, calls: Mapping[tuple[str, str], CallRow]) -> Command:
    """A command with what the rows say filled in."""
    event: Any = getattr(command, "event", None)
    mine = [call for (run_id, _), call in calls.items() if run_id == command.run_id]
    named = [call for call in mine if call.tool_call_id == getattr(event, "tool_call_id", "")]
    call = next(iter(named or mine), None)
    about: dict[str, Any] = {"tool_call_id": call.tool_call_id, "attempt": call.attempt} if call else {}
    match command:
        case Claim() | Abandon() if row:
            return replace(command, seen_epoch=row.epoch)
        case Append() if row:
            return replace(command, epoch=row.epoch)
        case Retry() if row and call:
            event = event.model_copy(update=about | {"attempt": call.attempt + 1})
            return replace(command, epoch=row.epoch, seen_started=call.started_attempt, event=event)
        case Mark() | Result() | Unsettle() | Answer() if call:
            return replace(command, event=event.model_copy(update=about))
        case Decide() if call:
            about = {"tool_call_id": call.tool_call_id, "question": call.question, "digest": call.digest}
            return replace(command, event=event.model_copy(update=about))
        case Settle() if call:
            return replace(command, event=event.model_copy(update=about | {"question": call.question}))
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
    return [call._replace(result_id="", decided=str(len(call.decided.split()))) for call in calls]


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
        calls = await log.calls(row.run_id)
        assert refold(row.run_id, stored) == (row, calls), "a refold gives the projections"
        check_waiting(row, [call for call in calls if call.result_seq is None])


def check_waiting(row: RunRow, open_calls: Sequence[CallRow]) -> None:
    """Where a run stands by its open calls, said in another way than the log does."""
    waiting = [call for call in open_calls if call.unsettled or call.gate in ("asked", "expired")]
    alive = row.status in (Status.RUNNING, Status.AWAITING_TOOL, Status.AWAITING_APPROVAL)
    if alive:
        assert (row.status is Status.AWAITING_APPROVAL) == (bool(open_calls) and len(waiting) == len(open_calls))
        assert (row.status is Status.RUNNING) == (not open_calls)
    if row.status is Status.AWAITING_APPROVAL:
        assert row.parked
        assert not row.cancel, "a cancelled run that nobody drives has to end"
        assert all(call.gate != "expired" for call in waiting), "a question that has expired ends what only waits"
    due = [call.due_at for call in open_calls if call.due_at is not None]
    if row.status is Status.CANCELLED:
        assert row.due_at is None or (row.turns and not due), "its processes are to be looked for"
    else:
        assert row.due_at == (min(due, default=None) if alive and not row.cancel else None)
    assert all(call.due_at is None or call.gate == "asked" for call in open_calls)
    assert all((call.attempt == 0) <= (call.gate != "") for call in open_calls), "without a gate there is an attempt"
    assert all(call.attempt == 0 for call in open_calls if call.gate in ("due", "asked", "expired"))


def opening(run_id: str, turn: tuple[Event, ...]) -> list[tuple[Command, int]]:
    """A run in its first turn."""
    claim, first = Claim(run_id, "e0", LEASE.nonce, 0), Append(run_id, 1, 2, turn)
    return [(Create(run_id, created()), 0), (claim, 0), (first, 0)]


async def play(first: list[tuple[Event, ...]], groups: Sequence[Sequence[tuple[Command, int]]], folder: Path) -> None:
    clock = Clock()
    memory, sql = MemoryLog(clock), await open_log(folder / "x.db", clock=clock)
    known = Known()
    try:
        for log in (memory, sql):
            await log.take_lease(LEASE, None)
        for group in [opening("r1", first[0]), opening("r2", first[1]), *groups]:
            clock.now += 1
            aimed = [aim(command, off, known) for command, off in group]
            ours, theirs = await memory.commit(aimed), await sql.commit(aimed)
            for command, mine, other in zip(aimed, ours, theirs, strict=True):
                assert same(mine, other), (command, mine, other)
                if isinstance(mine, Accepted):
                    known.learn(mine)
        assert await memory.runs() == await sql.runs()
        assert await memory.counts() == await sql.counts()
        for log in (memory, sql):
            await check(log)
        for run_id in known.rows:
            assert plain(await memory.read(run_id)) == plain(await sql.read(run_id))
            assert calls_without_ids(await memory.calls(run_id)) == calls_without_ids(await sql.calls(run_id))
    finally:
        await sql.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(first=st.lists(turns(), min_size=2, max_size=2), groups=GROUPS)
def test_memory_and_sql_agree_on_any_history_and_a_refold_gives_the_rows(
    first: list[tuple[Event, ...]],
    groups: list[list[tuple[Command, int]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(first, groups, Path(folder)))
