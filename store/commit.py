"""One transaction of a stored log: load the rows that a group of commands touches, judge, write what changed.

Synchronous over a SQLAlchemy connection, since nothing else may happen in between. What counts here is the number of
statements: a group of any size takes two to four reads and at most three writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection

from .budgets import Budget
from .errors import CorruptLog
from .events import ApprovalRequested, Event, Stored, ToolCallRequested, ToolResult, decode
from .log import Abandon, Append, Cancel, Check, Claim, Command, Create, Expire, Leave, Refused, Requeue, Verdict
from .memory import SUPERVISOR
from .rows import RunRow
from .rules import Book, Key
from .schema import budget_row, budget_values, call_row, call_values, event_values, run_row, run_values
from .statements import Session, Statements


def apply(
    connection: Connection, statements: Statements, commands: Sequence[Command], now: float
) -> tuple[list[Verdict], bool]:
    """Judge and write the commands in the transaction of `connection`; the verdicts and whether anything changed."""
    session = Session(connection)
    run_rows = _load_runs(session, statements, {command.run_id for command in commands})
    book, request_seqs = _load_book(session, statements, commands, run_rows, now)
    tails = _load_tails(session, statements, book, commands)
    verdicts = [_judge(book, command, tails) for command in commands]
    if book.events:
        _save(session, statements, book, request_seqs)
    return verdicts, bool(book.events)


def stored_event(run_id: str, row: Sequence[Any]) -> Stored:
    """An event from (seq, at, epoch, body). Raises CorruptLog naming run and seq."""
    seq, at, epoch, body = row
    try:
        return Stored(seq, at, epoch, decode(body))
    except CorruptLog as error:
        raise CorruptLog(f"run {run_id}, event {seq}: {error.message}") from error


def _load_runs(session: Session, statements: Statements, ids: Iterable[str]) -> dict[str, RunRow]:
    return {row[0]: run_row(row) for row in session.rows(statements.runs, json.dumps(list(ids)))}


def _load_book(
    session: Session,
    statements: Statements,
    commands: Sequence[Command],
    run_rows: dict[str, RunRow],
    now: float,
) -> tuple[Book, dict[Key, int]]:
    """The Book over the loaded runs, and the seq of each loaded call's request."""
    keys = {key for command in commands if command.run_id in run_rows for key in _call_keys(command)}
    found: dict[Key, Sequence[Any]] = {}
    if run_rows:
        wanted = json.dumps(list(run_rows)), json.dumps(list(keys))
        found = {(row[0], row[1]): row for row in session.rows(statements.calls, *wanted)}
    in_order = sorted(found.items(), key=lambda item: item[1][-1])
    supervisor = None
    if any(isinstance(command, (Claim, Abandon, Expire)) for command in commands):
        supervisor = next((row[0] for row in session.rows(statements.holder, SUPERVISOR)), None)
    budgets = _load_budgets(session, statements, commands, run_rows)
    book = Book(run_rows, {key: call_row(row) for key, row in in_order}, supervisor, now, budgets)
    return book, {key: row[-1] for key, row in in_order}


def _load_budgets(
    session: Session, statements: Statements, commands: Sequence[Command], run_rows: dict[str, RunRow]
) -> dict[str, Budget]:
    """The budgets that the runs share, or are to share."""
    names = {row.budget for row in run_rows.values()}
    names |= {command.event.budget for command in commands if isinstance(command, Create)}
    if not any(names):
        return {}
    wanted = json.dumps([name for name in names if name])
    return {row[0]: budget_row(row) for row in session.rows(statements.budgets, wanted)}


def _call_keys(command: Command) -> Iterator[Key]:
    """The calls that judging needs to see even if they are closed."""
    match command:
        case Leave(run_id=run_id, tool_call_id=call_id):
            yield run_id, call_id
        case Append(run_id=run_id, events=appended):
            for event in appended:
                if isinstance(event, (ToolCallRequested, ToolResult, ApprovalRequested)):
                    yield run_id, event.tool_call_id
        case Create() | Claim() | Expire() | Cancel() | Requeue() | Check() | Abandon():
            return
        case _:
            yield command.run_id, command.event.tool_call_id


def _load_tails(
    session: Session, statements: Statements, book: Book, commands: Sequence[Command]
) -> dict[str, list[Sequence[Any]]]:
    """The stored events that the commands have not seen, by run."""
    after: dict[str, int] = {}
    for command in commands:
        if wanted := book.tail_wanted(command):
            run_id, seq = wanted
            after[run_id] = min(seq, after.get(run_id, seq))
    tails: dict[str, list[Sequence[Any]]] = {}
    if after:
        for row in session.rows(statements.newer, json.dumps(list(after.items()))):
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


def _save(session: Session, statements: Statements, book: Book, request_seqs: dict[Key, int]) -> None:
    rows = [event_values(run_id, stored) for run_id, appended in book.events.items() for stored in appended]
    session.write(statements.insert_events, rows)
    session.write(statements.put_runs, [run_values(book.runs[run_id]) for run_id in book.changed_runs])
    if book.changed_calls:
        request_seqs = request_seqs | dict(_requests(book.events))
        changed = [call_values(book.calls[key[0]][key[1]], request_seqs[key]) for key in book.changed_calls]
        session.write(statements.put_calls, changed)
    if book.budgets:
        session.write(statements.put_budgets, [budget_values(one) for one in book.budgets.values()])


def _requests(appended: dict[str, list[Stored]]) -> Iterator[tuple[Key, int]]:
    for run_id, stored_events in appended.items():
        for stored in stored_events:
            event: Event = stored.event
            if isinstance(event, ToolCallRequested):
                yield (run_id, event.tool_call_id), stored.seq
