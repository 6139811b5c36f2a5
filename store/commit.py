"""One transaction of a stored log: load the rows that a group of commands touches, judge, write what changed.

Synchronous over a SQLAlchemy connection, since nothing else may happen in between. What counts here is the number of
statements: a group of any size takes two to five reads and up to three writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, bindparam, select, tuple_

from .errors import CorruptLog
from .events import Event, Stored, ToolCallRequested, ToolResult, decode
from .log import Abandon, Append, Cancel, Claim, Command, Create, Leave, Refused, Requeue, RunRow, Verdict
from .memory import SUPERVISOR
from .rules import Book, Key
from .schema import Bulk, call_row, call_values, calls, event_values, events, leases, run_row, run_values, runs

T = TypeVar("T")

CHUNK: Final = 400
"""Values in one IN list; far below the number of variables that any database allows."""

_runs_by_id: Final = (
    select(*runs.c)
    .where(runs.c.run_id.in_(bindparam("ids", expanding=True)))
    .order_by(runs.c.run_id)  # rows are locked in one order, so that two writers cannot wait for each other
    .with_for_update()
)
_open_calls: Final = select(*calls.c).where(
    calls.c.run_id.in_(bindparam("ids", expanding=True)), calls.c.result_seq.is_(None)
)
_calls_by_key: Final = select(*calls.c).where(
    tuple_(calls.c.run_id, calls.c.tool_call_id).in_(bindparam("keys", expanding=True))
)
_open_calls_or_by_key: Final = _open_calls.union_all(_calls_by_key)
_events_by_key: Final = (
    select(events.c.run_id, events.c.seq, events.c.at, events.c.epoch, events.c.body)
    .where(tuple_(events.c.run_id, events.c.seq).in_(bindparam("keys", expanding=True)))
    .order_by(events.c.run_id, events.c.seq)
)
_supervisor: Final = select(leases.c.nonce).where(leases.c.name == SUPERVISOR).with_for_update(read=True)


def apply(connection: Connection, bulk: Bulk, commands: Sequence[Command], now: float) -> tuple[list[Verdict], bool]:
    """Judge and write the commands in the transaction of `connection`; the verdicts and whether anything changed."""
    run_rows = _load_runs(connection, {command.run_id for command in commands})
    book, request_seqs = _load_book(connection, commands, run_rows, now)
    tails = _load_tails(connection, book, commands)
    verdicts = [_judge(book, command, tails) for command in commands]
    if book.events:
        _save(connection, bulk, book, request_seqs)
    return verdicts, bool(book.events)


def stored_event(run_id: str, row: Sequence[Any]) -> Stored:
    """An event from (seq, at, epoch, body). Raises CorruptLog naming run and seq."""
    seq, at, epoch, body = row
    try:
        return Stored(seq, at, epoch, decode(body))
    except CorruptLog as error:
        raise CorruptLog(f"run {run_id}, event {seq}: {error.message}") from error


def chunks(values: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """The values in lists of at most `size`."""
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


def _load_runs(connection: Connection, ids: Iterable[str]) -> dict[str, RunRow]:
    rows: dict[str, RunRow] = {}
    for chunk in chunks(sorted(ids)):
        rows.update((row[0], run_row(row)) for row in connection.execute(_runs_by_id, {"ids": chunk}))
    return rows


def _load_book(
    connection: Connection, commands: Sequence[Command], run_rows: dict[str, RunRow], now: float
) -> tuple[Book, dict[Key, int]]:
    """The Book over the loaded runs, and the seq of each loaded call's request."""
    found: dict[Key, Sequence[Any]] = {}
    keys = list({key for command in commands if command.run_id in run_rows for key in _call_keys(command)})
    ids = list(run_rows)
    while ids or keys:
        some_ids, some_keys = ids[:CHUNK], keys[:CHUNK]
        ids, keys = ids[CHUNK:], keys[CHUNK:]
        if some_keys:
            rows = connection.execute(_open_calls_or_by_key, {"ids": some_ids, "keys": some_keys})
        else:
            rows = connection.execute(_open_calls, {"ids": some_ids})
        found.update(((row[0], row[1]), row) for row in rows)
    in_order = sorted(found.items(), key=lambda item: item[1][-1])
    supervisor = None
    if any(isinstance(command, (Claim, Abandon)) for command in commands):
        supervisor = connection.scalar(_supervisor)
    book = Book(run_rows, {key: call_row(row) for key, row in in_order}, supervisor, now)
    return book, {key: row[-1] for key, row in in_order}


def _call_keys(command: Command) -> Iterator[Key]:
    """The calls that judging needs to see even if they are closed."""
    match command:
        case Leave(run_id=run_id, tool_call_id=call_id):
            yield run_id, call_id
        case Append(run_id=run_id, events=appended):
            for event in appended:
                if isinstance(event, (ToolCallRequested, ToolResult)):
                    yield run_id, event.tool_call_id
        case Create() | Claim() | Cancel() | Requeue() | Abandon():
            return
        case _:
            yield command.run_id, command.event.tool_call_id


def _load_tails(connection: Connection, book: Book, commands: Sequence[Command]) -> dict[str, list[Sequence[Any]]]:
    """The stored events that the commands have not seen, by run. seq has no gaps, so their keys are known."""
    after: dict[str, int] = {}
    for command in commands:
        if wanted := book.tail_wanted(command):
            run_id, seq = wanted
            after[run_id] = min(seq, after.get(run_id, seq))
    keys = ((run_id, seq) for run_id, first in after.items() for seq in range(first + 1, book.runs[run_id].seq + 1))
    tails: dict[str, list[Sequence[Any]]] = {}
    for chunk in chunks(keys):
        for row in connection.execute(_events_by_key, {"keys": chunk}):
            tails.setdefault(row[0], []).append(row)
    return tails


def _judge(book: Book, command: Command, tails: dict[str, list[Sequence[Any]]]) -> Verdict:
    tail: list[Stored] = []
    if (wanted := book.tail_wanted(command)) and (rows := tails.get(command.run_id)):
        try:
            tail = [stored_event(command.run_id, row[1:]) for row in rows if row[1] > wanted[1]]
        except CorruptLog as error:
            return Refused("illegal", error.message)
    return book.judge(command, tail)


def _save(connection: Connection, bulk: Bulk, book: Book, request_seqs: dict[Key, int]) -> None:
    rows = [event_values(run_id, stored) for run_id, appended in book.events.items() for stored in appended]
    connection.exec_driver_sql(bulk.insert_events, rows)
    connection.exec_driver_sql(bulk.put_runs, [run_values(book.runs[run_id]) for run_id in book.changed_runs])
    if book.changed_calls:
        request_seqs = request_seqs | dict(_requests(book.events))
        changed = [call_values(book.calls[key[0]][key[1]], request_seqs[key]) for key in book.changed_calls]
        connection.exec_driver_sql(bulk.put_calls, changed)


def _requests(appended: dict[str, list[Stored]]) -> Iterator[tuple[Key, int]]:
    for run_id, stored_events in appended.items():
        for stored in stored_events:
            event: Event = stored.event
            if isinstance(event, ToolCallRequested):
                yield (run_id, event.tool_call_id), stored.seq
