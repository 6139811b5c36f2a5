"""`cancel`: have runs end, wait for it, and say of each of their calls what became of it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click

from ..client.cancel import Cancelled, cancel, certificate, standing
from ..client.lease import nobody_works
from ..client.nudge import nudge
from ..store.errors import NotFound, UsageError
from ..store.sql import SqlLog, open_log
from ..store.states import LIVE, Status
from .certified import certificate_json, certificate_lines
from .exits import Exit, say_error
from .find import find_run
from .interrupts import Interrupts
from .options import asynchronous, at_store, by_option, db_option, json_option, reason_option
from .run import plain_text
from .terminal import Terminal
from .text import json_line, line

POLL_S: Final = 0.1
POLL_COST: Final = 10
CHECK_S: Final = 2.0
CANCELLABLE: Final = sorted(LIVE | {Status.AWAITING_APPROVAL})
CHECKED_S: Final = 15.0
"""How long it is waited for that somebody looks for what a run has left, once it has ended."""


@click.command("cancel")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--batch", metavar="NAME", help="All runs of this batch that have not ended.")
@click.option("--wait/--no-wait", default=True, help="Wait until the runs have ended. Default: wait.")
@by_option
@reason_option
@json_option
@db_option
@asynchronous
async def cancel_runs(db: str, runs: tuple[str, ...], batch: str | None, **options: Any) -> None:
    """Cancel runs. RUN is an id, or the first characters of it.

    The request is durable at once, and from then on none of the run's calls can begin. A run that is queued or waits
    for a person is cancelled by it; one that is driven is ended by its owner, for which this command waits, unless
    nobody works on the store. It then says of each call that was open what became of it: never started, stopped before
    it took effect, finished all the same, or unknown; and whether a process of the run is left, on any machine.

    Exit codes: 0 cancelled or being cancelled, 1 a run ended otherwise meanwhile, 2 a run is unknown or had ended.
    """
    if bool(runs) == (batch is not None):
        raise UsageError("give runs or --batch NAME")
    sys.exit(await _Command(db, options).run(runs, batch))


class _Command:
    def __init__(self, db: str, options: dict[str, Any]) -> None:
        self._db, self._options = db, options
        self._terminal, self._interrupts = Terminal(), Interrupts()

    async def run(self, texts: Sequence[str], batch: str | None) -> int:
        """The whole command; its exit code."""
        event_log = await open_log(self._db, create=False)
        try:
            ids = await self._chosen(event_log, texts, batch)
            if not ids:
                self._terminal.say("nothing to cancel: every run of the batch has ended")
                return Exit.COMPLETED
            reason, by = plain_text(self._options["reason"]) or "", plain_text(self._options["by"])
            told = await cancel(event_log, ids, reason=reason, by=by)
            nudge(self._db)
            return await self._interrupts.run(self._see_through(event_log, told))
        finally:
            await event_log.close()

    async def _chosen(self, event_log: SqlLog, texts: Sequence[str], batch: str | None) -> list[str]:
        if batch is None:
            return [(await find_run(event_log, text)).run_id for text in texts]
        if not await event_log.counts(batch):
            raise NotFound(f"no batch {line(batch)!r} in this store")
        return [row.run_id for row in await event_log.runs(statuses=CANCELLABLE, batch=batch, oldest_first=True)]

    async def _see_through(self, event_log: SqlLog, told: Sequence[Cancelled]) -> int:
        """Tell what has become of the runs, and wait for those that are driven."""
        idle = await nobody_works(event_log)
        driven = {one.run_id: one for one in told if one.answer == "cancelling" or _is_owed(one)}
        waits = bool(driven) and self._options["wait"] and not idle
        for one in told:
            if not (waits and one.run_id in driven):
                await self._tell(event_log, one, idle)
        codes = {_code(one) for one in told}
        if waits:
            codes |= await self._wait(event_log, driven)
        return max(codes)

    async def _wait(self, event_log: SqlLog, driven: dict[str, Cancelled]) -> set[int]:
        """Wait for the end of driven runs, as long as somebody works on the store; the codes of how they ended."""
        self._interrupts.say = lambda: self._terminal.say(f"\ninterrupted; the cancel stands: {self._look(driven)}")
        self._terminal.say(f"being cancelled: {_some(list(driven))}")
        left, codes = dict(driven), set[int]()
        began = checked_at = time.monotonic()
        while left:
            looked_at = time.monotonic()
            for row in await event_log.runs(ids=list(left)):
                if row.status.is_terminal and not (row.due_at and time.monotonic() - began < CHECKED_S):
                    one = standing(row, left.pop(row.run_id).again)
                    codes.add(Exit.COMPLETED if one.answer == "cancelled" else Exit.FAILED)
                    await self._tell(event_log, one, idle=False)
            if left and time.monotonic() - checked_at > CHECK_S:
                checked_at = time.monotonic()
                if await nobody_works(event_log):
                    for one in left.values():
                        await self._tell(event_log, one, idle=True)
                    return codes
            await asyncio.sleep(max(POLL_S, POLL_COST * (time.monotonic() - looked_at)) if left else 0)
        return codes

    def _look(self, driven: dict[str, Cancelled]) -> str:
        return f"perdure {at_store(self._db)}" + (f"show {next(iter(driven))}" if len(driven) == 1 else "list")

    async def _tell(self, event_log: SqlLog, one: Cancelled, idle: bool) -> None:
        """One run and its calls, on standard output; a run that ended otherwise before is an error."""
        if self._options["as_json"]:
            ends = await certificate(event_log, one.run_id)
            told = {"run_id": one.run_id, "answer": one.answer, "again": one.again, "status": one.row.status.value}
            told |= {"reason": one.row.error, "supervised": not idle} | certificate_json(ends)
            self._terminal.put(json_line(told))
        elif one.answer == "ended" and one.again:
            say_error(UsageError(f"run {one.run_id} has already ended as {one.row.status}; nothing was cancelled"))
        else:
            self._terminal.put(f"run {line(one.run_id)}: {_words(one, idle)}")
            if one.row.status is Status.CANCELLED and one.row.turns:
                for text in certificate_lines(await certificate(event_log, one.run_id)):
                    self._terminal.put(f"  {text}")


def _is_owed(one: Cancelled) -> bool:
    """Whether the run is over and its processes were not looked for yet."""
    return one.answer == "cancelled" and one.row.due_at is not None


def _code(one: Cancelled) -> int:
    return Exit.USAGE if one.answer == "ended" else Exit.COMPLETED


def _words(one: Cancelled, idle: bool) -> str:
    if one.answer == "ended":
        return f"ended as {one.row.status}" + (f": {line(one.row.error)}" if one.row.error else "")
    if one.answer == "cancelled":
        return "was cancelled before" if one.again and one.row.status is Status.CANCELLED else "cancelled"
    before = "a cancel was requested before" if one.again else "a cancel is requested"
    return f"{before}; " + (
        "nobody works on this store now: it takes effect when the run goes on" if idle else "its owner acts on it"
    )


def _some(ids: Sequence[str]) -> str:
    return f"run {ids[0]}" if len(ids) == 1 else f"{len(ids)} runs"
