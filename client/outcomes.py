"""Outcomes, read from the store."""

from __future__ import annotations

from ..actors.requests import Ended
from ..store.errors import NotFound
from ..store.log import RunRow
from ..store.sql import SqlLog
from .runtime import Outcome


async def outcome_of(event_log: SqlLog, run_id: str) -> Outcome:
    """How a run ended, or where it stands. Raises NotFound."""
    row = await event_log.run(run_id)
    if row is None:
        raise NotFound(f"no run {run_id} in this store")
    return await outcome_of_row(event_log, row)


async def outcome_of_row(event_log: SqlLog, row: RunRow) -> Outcome:
    """The outcome of a run whose row is at hand."""
    if row.end_seq is None or not row.status.is_terminal:
        return Outcome(row.run_id, row.status)
    end = (await event_log.read(row.run_id, row.end_seq - 1, 1))[0].event
    return Outcome.of(Ended(row.run_id, row.epoch, row.status, "ended", end))
