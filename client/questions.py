"""What people are asked: the open questions of a run, or of a whole store.

A question is about one call: may it run (an approval), or did an interrupted attempt of it happen (a settlement)? It
is open until it is answered, its time has passed, or its run ends or is being cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import JsonValue

from ..store.errors import CorruptLog, NotFound
from ..store.events import (
    ApprovalDecided,
    ApprovalRequested,
    Decision,
    Stored,
    ToolCallRequested,
    ToolCallUnsettled,
)
from ..store.log import EventLog
from ..store.rows import CallRow, RunRow
from ..store.states import Status

Kind = Literal["approval", "settlement"]
TAIL: Final = 200
"""Events at the end of a log among which questions usually stand."""
PAGE: Final = 100
"""Runs whose questions are read at once."""


@dataclass(frozen=True)
class Question:
    """One open question. Times are seconds on the store's clock."""

    run_id: str
    tool_call_id: str
    question: str
    """Its id: one that is asked anew gets another."""
    kind: Kind
    tool: str
    arguments: str
    """As canonical JSON text: what would run, or what ran."""
    effect: str
    reason: str
    """Why it is asked."""
    asked_at: float
    turn_index: int
    batch: str | None = None
    sample: str | None = None
    digest: str = ""
    """What an approval is bound to."""
    arguments_schema: dict[str, JsonValue] | None = None
    """To which edited arguments are held."""
    due_at: float | None = None
    """When an approval is too late; None: never."""
    default: Decision | None = None
    """What is decided then; None: the run times out."""
    attempt: int = 0
    """The interrupted attempt, with the node and process that it ran in and the time of its start."""
    node: str = ""
    pid: int = 0
    started_at: float | None = None


def kind_of(row: RunRow, call: CallRow) -> Kind | None:
    """Which question about a call is open."""
    if row.status.is_terminal or row.cancel or call.result_seq is not None:
        return None
    if call.unsettled:
        return "settlement"
    return "approval" if call.gate == "asked" else None


def questions_in(row: RunRow, calls: Iterable[CallRow], stored: Sequence[Stored]) -> list[Question]:
    """The open questions of a run, in order of request, from its rows and its log. Raises CorruptLog."""
    asked = {call.question: call for call in calls if kind_of(row, call)}
    arguments: dict[str, str] = {}
    found: dict[str, Question] = {}
    for one in stored:
        match event := one.event:
            case ToolCallRequested() | ApprovalDecided(arguments=str()):
                arguments[event.tool_call_id] = event.arguments or ""
            case ApprovalRequested() if event.event_id in asked:
                found[event.event_id] = _approval(row, asked[event.event_id], event, one.at)
            case ToolCallUnsettled() if event.event_id in asked:
                call = asked[event.event_id]
                found[event.event_id] = _settlement(row, call, event, one.at, arguments.get(call.tool_call_id, ""))
    if missing := asked.keys() - found.keys():
        raise CorruptLog(f"run {row.run_id}: question {min(missing)} is not in its log")
    return [found[question] for question in asked]


def _approval(row: RunRow, call: CallRow, event: ApprovalRequested, at: float) -> Question:
    return Question(
        row.run_id,
        call.tool_call_id,
        event.event_id,
        "approval",
        event.name,
        event.arguments,
        event.effect,
        event.reason,
        at,
        call.turn_index,
        row.batch,
        row.sample,
        event.digest,
        event.arguments_schema,
        call.due_at,
        event.default,
    )


def _settlement(row: RunRow, call: CallRow, event: ToolCallUnsettled, at: float, arguments: str) -> Question:
    return Question(
        row.run_id,
        call.tool_call_id,
        event.event_id,
        "settlement",
        call.name,
        arguments,
        call.effect,
        event.why,
        at,
        call.turn_index,
        row.batch,
        row.sample,
        attempt=event.attempt,
        node=call.node,
        pid=call.pid,
        started_at=call.started_at,
    )


async def questions(event_log: EventLog, run_id: str) -> list[Question]:
    """The open questions of a run, in order of request. Raises NotFound."""
    row = await event_log.run(run_id)
    if row is None:
        raise NotFound(f"no run {run_id} in this store")
    return await _questions(event_log, [row])


async def open_questions(event_log: EventLog, batch: str | None = None, limit: int | None = None) -> list[Question]:
    """The open questions of all runs or of a batch, the oldest first; where there are more than `limit`, those of the
    oldest runs."""
    statuses = Status.AWAITING_APPROVAL, Status.AWAITING_TOOL
    waiting, busy = [
        await event_log.runs(statuses=[status], batch=batch, oldest_first=True, limit=most)
        for status, most in zip(statuses, (limit, None), strict=True)
    ]
    found: list[Question] = []
    rows = sorted((*waiting, *busy), key=lambda row: row.created_at)
    for start in range(0, len(rows), PAGE):
        if limit is not None and len(found) >= limit:
            break
        found += await _questions(event_log, rows[start : start + PAGE])
    return sorted(found[:limit], key=lambda question: question.asked_at)


async def _questions(event_log: EventLog, rows: Sequence[RunRow]) -> list[Question]:
    """The open questions of some runs, run by run: by two requests to the log for all of them, but for those whose
    questions are old in a long log."""
    calls = await event_log.open_calls([row.run_id for row in rows])
    asked = {row.run_id: [call for call in calls.get(row.run_id, ()) if kind_of(row, call)] for row in rows}
    tails = await event_log.read_after({row.run_id: max(0, row.seq - TAIL) for row in rows if asked[row.run_id]})
    found: list[Question] = []
    for row in rows:
        mine, stored = asked[row.run_id], tails.get(row.run_id, [])
        if mine and row.seq > TAIL and not _holds(stored, mine):
            stored = await event_log.read(row.run_id)
        found += questions_in(row, mine, stored)
    return found


def _holds(stored: Sequence[Stored], calls: Iterable[CallRow]) -> bool:
    """Whether the requests of these calls are among the events, and so what was asked about them later."""
    requested = {one.event.tool_call_id for one in stored if isinstance(one.event, ToolCallRequested)}
    return all(call.tool_call_id in requested for call in calls)
