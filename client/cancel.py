"""Cancelling runs: durable when the call returns, and what became of each run and its calls, as the log tells it.

A run that is queued or waits for a person is over at once. One that is driven gets a request, from which on none of
its calls can begin; its owner ends it. No Ray is needed: a supervisor reads the request in the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..actors.machine import Call, State, evolve, fold
from ..store.errors import NotFound
from ..store.events import (
    CancelRequested,
    Fate,
    ProcessesChecked,
    RunRequeued,
    Stored,
    ToolEvidence,
    ToolResult,
)
from ..store.log import Accepted, Cancel, EventLog, Verdict
from ..store.rows import RunRow
from ..store.states import Status
from .decisions import who

AT_ONCE: Final = 500
"""Cancels in one transaction."""

NEVER_BEGAN: Final = frozenset({"validation", "limit", "loop", "policy", "rejection"})
"""Sources of results of calls that had no attempt."""

Answer = Literal["cancelled", "cancelling", "ended"]


@dataclass(frozen=True)
class Cancelled:
    """What a cancel came to: the run is "cancelled", is being cancelled, or had "ended" otherwise before."""

    answer: Answer
    again: bool
    """It had been cancelled before: nothing was changed."""
    row: RunRow
    """The run's, right afterwards."""

    @property
    def run_id(self) -> str:
        return self.row.run_id


@dataclass(frozen=True)
class CallEnd:
    """What became of one call of a cancelled run."""

    tool_call_id: str
    name: str
    effect: str
    attempt: int
    fate: Fate | Literal["open"]
    """What became of it; "open" while it is still being stopped."""
    text: str
    """What the model is told of it; of a call that finished its result, as JSON text. Empty while the call is open."""


@dataclass(frozen=True)
class Certificate:
    """What became of a cancelled run."""

    calls: tuple[CallEnd, ...]
    """Those that were open when it was cancelled, in order of request."""
    checked: Stored | None
    """The record, a processes_checked, of where and when processes of the run were looked for, and which are left; None
    as long as nobody has looked."""
    may_have_begun: bool
    """Whether any tool call of it may have begun; if not, there can be no process of it."""


async def cancel(
    event_log: EventLog, run_ids: Iterable[str], *, reason: str = "", by: str | None = None
) -> list[Cancelled]:
    """Cancel runs, and say of each what that came to; `by` defaults to USER@HOST.

    Raises NotFound for an id that no run has, then nothing is cancelled, and UsageError for a `by` that is no name.
    """
    ids, name = list(dict.fromkeys(run_ids)), who(by)
    known = {row.run_id for row in await event_log.runs(ids=ids)}
    if missing := next((run_id for run_id in ids if run_id not in known), None):
        raise NotFound(f"no run {missing} in this store")
    told: list[Cancelled] = []
    for start in range(0, len(ids), AT_ONCE):
        some = ids[start : start + AT_ONCE]
        commands = [Cancel(run_id, CancelRequested(by=name, reason=reason)) for run_id in some]
        for run_id, verdict in zip(some, await event_log.commit(commands), strict=True):
            told.append(await _told(event_log, run_id, verdict))
    return told


async def _told(event_log: EventLog, run_id: str, verdict: Verdict) -> Cancelled:
    if isinstance(verdict, Accepted):
        answer: Answer = "cancelled" if verdict.row.status is Status.CANCELLED else "cancelling"
        return Cancelled(answer, verdict.already, verdict.row)
    row = await event_log.run(run_id)
    if verdict.reason != "ended" or row is None:
        raise verdict
    return standing(row, again=True)


def standing(row: RunRow, again: bool = False) -> Cancelled:
    """What a cancel has come to by now."""
    if row.status is Status.CANCELLED:
        return Cancelled("cancelled", again, row)
    return Cancelled("ended" if row.status.is_terminal else "cancelling", again, row)


async def certificate(event_log: EventLog, run_id: str) -> Certificate:
    """What a log says of the run's newest cancel. Raises NotFound."""
    events = await event_log.read(run_id)
    if not events:
        raise NotFound(f"no run {run_id} in this store")
    return certified(events)


def certified(events: Sequence[Stored]) -> Certificate:
    """The certificate that these events of a run are. Pure."""
    checks = [stored for stored in events if isinstance(stored.event, ProcessesChecked | RunRequeued)]
    newest = checks[-1] if checks else None
    looked = newest and isinstance(newest.event, ProcessesChecked)
    calls = [call for turn in fold(events).turns for call in turn.calls]
    return Certificate(call_ends(events), newest if looked else None, any(map(_may_have_begun, calls)))


def call_ends(events: Sequence[Stored]) -> tuple[CallEnd, ...]:
    """What a log says about the calls that were open when its newest cancel was requested. Pure."""
    at = max((n for n, stored in enumerate(events) if isinstance(stored.event, CancelRequested)), default=None)
    if at is None:
        return ()
    before = fold(events[:at])
    after: list[Stored] = []
    for stored in events[at:]:
        if isinstance(stored.event, RunRequeued):
            break
        after.append(stored)
    return tuple(_call_end(before, call_id, after) for call_id in [call.tool_call_id for call in before.open_calls])


def _call_end(before: State, call_id: str, after: Sequence[Stored]) -> CallEnd:
    state, result, happened = before, None, False
    for stored in after:
        event = stored.event
        state = evolve(state, event)
        if isinstance(event, ToolResult) and event.tool_call_id == call_id:
            result = event
        elif isinstance(event, ToolEvidence) and event.tool_call_id == call_id:
            happened = happened or not event.is_error
    call = next(call for turn in state.turns for call in turn.calls if call.tool_call_id == call_id)
    fate: Fate | Literal["open"] = "open"
    if result:
        fate = "finished" if happened else result.fate or _fate(result, call.effect)
    return CallEnd(call_id, call.request.name, call.effect, call.attempt, fate, _said(result) if result else "")


def _may_have_begun(call: Call) -> bool:
    closed = call.result and (call.result.source in NEVER_BEGAN or call.result.fate == "never started")
    return call.attempt > 0 and not closed


def _said(result: ToolResult) -> str:
    """The text of a closing result, and any other as it is."""
    if result.source != "cancel":
        return result.content
    said = json.loads(result.content)
    return str(said["message"] if isinstance(said, dict) else said).removeprefix("cancelled: ")


def _fate(result: ToolResult, effect: str) -> Fate:
    """What became of a call that nobody closed for the cancel: its attempt ended of its own, one way or the other."""
    if result.source not in ("crash", "timeout"):
        return "finished"
    return "stopped" if effect == "read_only" else "unknown"


__all__ = ["CallEnd", "Cancelled", "Certificate", "call_ends", "cancel", "certificate", "certified", "standing"]
