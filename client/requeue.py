"""Putting runs that have ended back into the queue, with higher limits if their resumer wants it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from ..actors.guards import raised
from ..actors.machine import fold
from ..store.errors import UsageError
from ..store.events import RunRequeued
from ..store.log import Refused, Requeue
from ..store.rows import RunRow
from ..store.sql import SqlLog
from ..store.states import TERMINAL
from ..store.writer import GroupWriter


async def requeue(event_log: SqlLog, run_id: str, by: str, limits: Mapping[str, object] | None = None) -> RunRow:
    """Requeue a run that ended without completing; one that is live is left alone. `limits` replace some of the run's
    from here on; None as a value lifts one.

    Raises UsageError; also for a limit that would be lower than it is, or that is to change for a run that is live.
    """
    changes = await raised_limits(event_log, run_id, limits) if limits else None
    try:
        return (await GroupWriter(event_log).submit(Requeue(run_id, RunRequeued(by=by, limits=changes)))).row
    except Refused as refusal:
        if refusal.reason == "not_ended" and not changes and (row := await event_log.run(run_id)):
            return row
        raise UsageError(refusal.message) from refusal


async def raised_limits(event_log: SqlLog, run_id: str, limits: Mapping[str, object]) -> dict[str, JsonValue]:
    """What a resume changes of a run's limits. Raises UsageError as `requeue` does."""
    row = await event_log.run(run_id)
    if row is None:
        raise UsageError(f"no run {run_id} in this store")
    if row.status not in TERMINAL:
        raise UsageError(f"run {run_id} is {row.status}: its limits can be raised when it has ended")
    try:
        return raised(fold(await event_log.read(run_id)).limits, limits)
    except UsageError as error:
        raise UsageError(f"run {run_id}: {error.message}") from error
