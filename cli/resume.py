"""`resume`: go on with runs that exist already."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click

from ..client.door import Door, Size, open_door
from ..client.outcomes import Outcome
from ..client.questions import Question
from ..client.requeue import raised_limits, requeue
from ..store.errors import UsageError
from ..store.rows import RunRow
from ..store.sql import SqlLog, open_log
from ..store.states import LIVE, Status
from .exits import Exit, exit_of
from .find import find_run
from .interrupts import Interrupts
from .options import (
    actors_option,
    address_option,
    at_store,
    chosen_limits,
    concurrency_option,
    db_option,
    json_option,
    limit_options,
)
from .progress import Counts, shown
from .run import outcome_and_questions, stream, tell, watched
from .terminal import Terminal
from .text import line

POLL_S: Final = 0.2
POLL_COST: Final = 10


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--batch", metavar="NAME", help="Everything interrupted in this batch.")
@limit_options
@concurrency_option
@actors_option
@address_option
@json_option
@db_option
def resume(db: str, runs: tuple[str, ...], batch: str | None, **options: Any) -> None:
    """Go on with what was interrupted, and wait for it.

    Without RUN: everything in this store, or in --batch, that has not ended. With RUN (ids, or the first characters
    of them): these; runs that failed, were cancelled or timed out are put back into the queue, with the limits that
    are given raised or lifted. The exit code is that of the worst run, as for `perdure run`.
    """
    if runs and batch is not None:
        raise UsageError("give runs or --batch, not both")
    if chosen_limits(options) and not runs:
        raise UsageError("limits are raised for runs that are named: give RUN")
    sys.exit(asyncio.run(_Resume(db, options).run(runs, batch)))


class _Resume:
    def __init__(self, db: str, options: dict[str, Any]) -> None:
        self._db, self._options = db, options
        self._limits = chosen_limits(options)
        self._terminal, self._interrupts = Terminal(), Interrupts()

    async def run(self, texts: Sequence[str], batch: str | None) -> int:
        """The whole command; its exit code."""
        which = ["--batch", batch] if batch is not None else texts
        again = f"perdure {at_store(self._db)}resume {shlex.join(which)}".strip()
        self._interrupts.say = lambda: self._terminal.say(f"\ninterrupted; the runs stay resumable: {again}")
        event_log = await open_log(self._db, create=False)
        try:
            rows = await self._chosen(event_log, texts, batch)
            waiting = (await event_log.counts(batch)).get(Status.AWAITING_APPROVAL, 0)
        finally:
            await event_log.close()
        if not rows:
            others = f"; {waiting} waiting for a person: perdure {at_store(self._db)}questions" if waiting else ""
            self._terminal.say(f"nothing to resume{others}")
            return Exit.COMPLETED
        with self._terminal.alone():
            found = await self._interrupts.run(self._work(rows))
            for outcome, asked in found:
                tell(outcome, asked, self._terminal, self._options["as_json"], self._db, alone=len(rows) == 1)
        return exit_of(outcome.status for outcome, _ in found)

    async def _chosen(self, event_log: SqlLog, texts: Sequence[str], batch: str | None) -> list[RunRow]:
        if not texts:
            return await event_log.runs(statuses=sorted(LIVE), batch=batch, oldest_first=True)
        rows = {row.run_id: row for row in [await find_run(event_log, text) for text in texts]}
        for row in rows.values():
            if row.status is Status.COMPLETED:
                raise UsageError(f"run {line(row.run_id)} is completed; there is nothing to resume")
            if self._limits:
                await raised_limits(event_log, row.run_id, self._limits)
        return list(rows.values())

    async def _work(self, rows: Sequence[RunRow]) -> list[tuple[Outcome, list[Question]]]:
        ids = [row.run_id for row in rows]
        size = Size(self._options["actors"], self._options["concurrency"])
        async with open_door(self._db, self._options["address"], size, self._interrupts.hold) as door:
            ended = [row.run_id for row in rows if row.status.is_terminal]
            for run_id in ended:
                await requeue(door.log, run_id, "cli", self._limits)
            await door.nudge(ended)
            if len(ids) == 1:
                seen = rows[0].seq
                await watched(door, stream(door.log, ids[0], self._terminal, self._options["as_json"], seen))
            else:
                await watched(door, self._wait(door, ids))
            return [await outcome_and_questions(door.log, run_id) for run_id in ids]

    async def _wait(self, door: Door, ids: list[str]) -> None:
        left, ended = ids, dict.fromkeys(Status, 0)
        with shown(self._terminal, len(ids)) as progress:
            while left:
                looked_at = time.monotonic()
                rows = await door.log.runs(ids=left)
                for row in rows:
                    ended[row.status] += row.status not in LIVE
                left = [row.run_id for row in rows if row.status in LIVE]
                live: Counts = {status: sum(row.status is status for row in rows) for status in LIVE}
                progress(ended | live)
                await asyncio.sleep(max(POLL_S, POLL_COST * (time.monotonic() - looked_at)) if left else 0)
