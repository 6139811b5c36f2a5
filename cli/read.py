"""`list`, `show` and `events`: they read the store on a connection of their own and start nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import click

from ..store.rows import RunRow
from ..store.sql import SqlLog, open_log
from ..store.states import Status
from .events import event_json, event_line
from .find import find_run
from .options import asynchronous, db_option, json_option
from .receipts import receipts_json, receipts_lines
from .runs import HEAD, row_cells, row_json, run_json, run_lines
from .terminal import Terminal
from .text import json_line, table

FOLLOW_POLL_S = 0.2
PAGE = 500
"""Events that are read at once."""
STATUSES = [status.value for status in Status]


@contextlib.asynccontextmanager
async def open_reader(db: str) -> AsyncIterator[SqlLog]:
    """A store that is only read, closed at the end of the block."""
    event_log = await open_log(db, read_only=True)
    try:
        yield event_log
    finally:
        await event_log.close()


@click.command("list")
@click.option("--batch", metavar="NAME", help="Only the runs of this batch.")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(STATUSES),
    help="Only runs in this state; repeatable.",
)
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most this many runs.")
@json_option
@db_option
@asynchronous
async def list_runs(db: str, batch: str | None, statuses: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List runs, the newest first."""
    terminal = Terminal()
    async with open_reader(db) as event_log:
        wanted = [Status(status) for status in statuses] or None
        rows = await event_log.runs(statuses=wanted, batch=batch, limit=limit + 1)
        waiting = [row.run_id for row in rows[:limit] if row.status is Status.AWAITING_APPROVAL]
        calls = await event_log.open_calls(waiting)
    if as_json:
        for row in rows[:limit]:
            terminal.put(json_line(row_json(row, calls.get(row.run_id, ()))))
        return
    if not rows:
        terminal.say("no runs here" if wanted is None and batch is None else "no such runs")
        return
    for text in table(HEAD, [row_cells(row, calls.get(row.run_id, ())) for row in rows[:limit]]):
        terminal.put(text)
    if len(rows) > limit:
        terminal.say(f"(the newest {limit}; --limit shows more)")


@click.command()
@click.argument("run")
@click.option("--calls", is_flag=True, help="Also every tool call's receipt: approval, attempts, settlement, result.")
@json_option
@db_option
@asynchronous
async def show(db: str, run: str, calls: bool, as_json: bool) -> None:
    """Show one run, and what it asks people. RUN is its id, or the first characters of it."""
    terminal = Terminal()
    async with open_reader(db) as event_log:
        row = await find_run(event_log, run)
        stored = await event_log.read(row.run_id)
        call_rows = await event_log.calls(row.run_id)
    if as_json:
        shown = run_json(row, stored, call_rows)
        terminal.put(json_line(shown | {"calls": receipts_json(stored, call_rows)} if calls else shown))
        return
    for text in run_lines(row, stored, call_rows, db) + (receipts_lines(stored, call_rows) if calls else []):
        terminal.put(text)


@click.command()
@click.argument("run")
@click.option("--after", type=click.IntRange(0), default=0, metavar="SEQ", help="Only events after this one.")
@click.option("--follow", "-f", is_flag=True, help="Go on with new events until the run ends.")
@json_option
@db_option
@asynchronous
async def events(db: str, run: str, after: int, follow: bool, as_json: bool) -> None:
    """Print the events of a run. RUN is its id, or the first characters of it."""
    terminal = Terminal()
    async with open_reader(db) as event_log:
        row: RunRow | None = await find_run(event_log, run)
        while row:
            while page := await event_log.read(row.run_id, after, PAGE):
                after = page[-1].seq
                for stored in page:
                    terminal.put(json_line(event_json(row.run_id, stored)) if as_json else event_line(stored))
            if not follow or (row.status.is_terminal and after >= row.seq):
                return
            await asyncio.sleep(FOLLOW_POLL_S)
            row = await event_log.run(row.run_id)
