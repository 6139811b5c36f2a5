"""What has become of a run, as its caller is told: its events as they come, and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pydantic import JsonValue

from ..actors.requests import Ended
from ..store.errors import NotFound
from ..store.events import RunCancelled, RunCompleted, RunFailed, RunTimedOut, Stored
from ..store.rows import RunRow
from ..store.sql import SqlLog
from ..store.states import Status

POLL_S = 0.1
PAGE = 500
"""Events that are read at once."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, or that it waits for a person."""

    run_id: str
    status: Status
    output: JsonValue = None
    error: str | None = None
    message: str | None = None

    @classmethod
    def of(cls, ended: Ended) -> Outcome:
        """The outcome that a terminal event tells."""
        match ended.end:
            case RunCompleted(output=output):
                return cls(ended.run_id, ended.status, output=output)
            case RunFailed(code=code, message=message):
                return cls(ended.run_id, ended.status, error=code, message=message)
            case RunCancelled(reason=reason) | RunTimedOut(reason=reason):
                return cls(ended.run_id, ended.status, message=reason)
        return cls(ended.run_id, ended.status)


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


async def follow(event_log: SqlLog, run_id: str, after: int = 0) -> AsyncIterator[Stored]:
    """The events of a run as they become durable, until it ends or waits for a person. Raises NotFound."""
    while True:
        row = await event_log.run(run_id)
        if row is None:
            raise NotFound(f"no run {run_id} in this store")
        while page := await event_log.read(run_id, after, PAGE):
            after = page[-1].seq
            for stored in page:
                yield stored
        if after >= row.seq and (row.status.is_terminal or row.status is Status.AWAITING_APPROVAL):
            return
        await asyncio.sleep(POLL_S)
