"""The durable log: an EventLog in SQLite or PostgreSQL.

An append is acknowledged after its transaction is on disk. Transactions run in tasks of their own, so a caller that is
cancelled leaves nothing half done. A database that is locked is asked again for at most `busy_s` seconds; then, and on
any other failure of the database, StoreUnavailable says what happened. Nothing is kept in memory between commits.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from decimal import Decimal
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, delete, func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from .budgets import Budget
from .commit import apply, stored_event
from .engine import (
    Connections,
    Target,
    cannot_hold,
    check_version,
    create_tables,
    enter_wal,
    may_retry,
    open_reader,
    open_writer,
    opening_failed,
    prepare_file,
    target,
    unavailable,
)
from .errors import CorruptLog, StoreUnavailable, UsageError
from .events import Stored
from .log import Command, Refused, Verdict
from .rows import CallRow, Clock, Lease, RunRow
from .schema import (
    blobs,
    budget_row,
    budget_values,
    budgets,
    call_row,
    calls,
    events,
    lease_values,
    leases,
    run_row,
    runs,
)
from .secrets import masked_command
from .statements import Statements, insert_for
from .states import Status

T = TypeVar("T")

FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.5
IDS_AT_ONCE: Final = 500
"""Values in one IN list; far below the number of variables that any database allows."""


async def open_log(
    url_or_path: str | os.PathLike[str],
    *,
    clock: Clock = time.time,
    read_only: bool = False,
    create: bool = True,
    busy_s: float = 30.0,
) -> SqlLog:
    """Open the log in a file or at a SQLAlchemy URL.

    `create` makes a missing file and its folder; `busy_s` bounds how long one request waits for a locked database.
    Raises UsageError, SchemaMismatch (the database is left untouched) or StoreUnavailable.
    """
    where = target(url_or_path)
    filled = prepare_file(where.path, read_only=read_only, create=create) if where.path else True
    log = SqlLog(where, clock=clock, read_only=read_only, busy_s=busy_s)
    try:
        await log.prepare(filled)
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        await log.close()
        raise opening_failed(where.name, error) from error
    except BaseException:
        await log.close()
        raise
    return log


class SqlLog:
    """An EventLog in a database; `open_log` makes one. It belongs to the event loop that opened it."""

    def __init__(self, where: Target, *, clock: Clock, read_only: bool, busy_s: float) -> None:
        self._where, self._clock, self._busy_s = where, clock, busy_s
        self._reader = open_reader(where, busy_s, brief=read_only)
        self._writer: Connections | None = None if read_only else open_writer(where, busy_s)
        self._statements = Statements.of(self._reader.dialect)
        self._gate = asyncio.Semaphore(self._writer.width if self._writer else 1)
        self._working: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def prepare(self, filled: bool) -> None:
        """Check the version of what is there, create what is not."""
        name = self._where.name
        ready = False
        if filled:
            ready = await self._reader.run(lambda connection: check_version(connection, name))
        if self._writer is None:
            if not ready:
                raise UsageError(f"no runs here yet: {name} is empty")
            return
        if self._where.path:
            await self._write(lambda connection: enter_wal(connection, name), "opened")
        if not ready:
            await self._write(lambda connection: _in_transaction(connection, create_tables, name), "opened")

    # -- writing ------------------------------------------------------------------------------------------

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        return await self._apart(self._commit([*map(masked_command, commands)])) if commands else []

    async def _commit(self, commands: list[Command]) -> list[Verdict]:
        def work(connection: Connection) -> list[Verdict]:
            with connection.begin() as transaction:
                verdicts, changed = apply(connection, self._statements, commands, self._clock())
                if not changed:
                    transaction.rollback()
            return verdicts

        try:
            return await self._write(work, "written")
        except (
            ValueError,
            OverflowError,
            SQLAlchemyError,
            sqlite3.DataError,
        ) as error:  # a value that the database cannot hold
            if len(commands) == 1:
                what = getattr(error, "orig", error)
                return [Refused("illegal", f"run {commands[0].run_id!a}: a value cannot be stored: {what}")]
        return [verdict for command in commands for verdict in await self._commit([command])]

    async def take_lease(self, lease: Lease, instead_of: str | None) -> bool:
        def work(connection: Connection) -> bool:
            with connection.begin():
                if instead_of is None:
                    fresh = insert_for(leases, connection.dialect).on_conflict_do_nothing()
                    return connection.execute(fresh, lease_values(lease)).rowcount == 1
                held = update(leases).where(leases.c.name == lease.name, leases.c.nonce == instead_of)
                return connection.execute(held.values(lease_values(lease))).rowcount == 1

        return await self._apart(self._write(work, "written"))

    async def drop_lease(self, name: str, nonce: str) -> None:
        def work(connection: Connection) -> None:
            with connection.begin():
                connection.execute(delete(leases).where(leases.c.name == name, leases.c.nonce == nonce))

        await self._apart(self._write(work, "written"))

    async def cap_budget(self, name: str, caps: Mapping[str, int | Decimal | None]) -> Budget:
        changes = {f"cap_{kind}": f"{cap:f}" if isinstance(cap, Decimal) else cap for kind, cap in caps.items()}

        def work(connection: Connection) -> Budget:
            with connection.begin():
                new = dict(zip(budgets.c.keys(), budget_values(Budget(name)), strict=True))
                connection.execute(insert_for(budgets, connection.dialect).on_conflict_do_nothing(), new)
                if changes:
                    connection.execute(update(budgets).where(budgets.c.name == name).values(changes))
                return budget_row(connection.execute(select(*budgets.c).where(budgets.c.name == name)).one())

        return await self._apart(self._write(work, "written"))

    async def keep(self, digest: str, part: int, data: bytes) -> None:
        def work(connection: Connection) -> None:
            with connection.begin():
                fresh = insert_for(blobs, connection.dialect).on_conflict_do_nothing()
                connection.execute(fresh, {"digest": digest, "part": part, "data": data})

        await self._apart(self._write(work, "written"))

    async def _write(self, work: Callable[[Connection], T], doing: str) -> T:
        """Run `work` on the writer's connection, again while the database is busy. Raises StoreUnavailable."""
        if self._writer is None:
            raise UsageError(f"{self._where.name} is open for reading only")
        deadline, pause_s = time.monotonic() + self._busy_s, FIRST_PAUSE_S
        try:
            async with asyncio.timeout(self._busy_s):
                await self._gate.acquire()
        except TimeoutError as error:
            raise unavailable(self._where.name, doing, error) from error
        try:
            while True:
                try:
                    return await self._writer.run(work)
                except (SQLAlchemyError, sqlite3.Error, OSError) as error:
                    if cannot_hold(error):
                        raise
                    if not may_retry(error) or time.monotonic() >= deadline:
                        raise unavailable(self._where.name, doing, error) from error
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._gate.release()

    async def _apart(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that goes on to its end even if the caller is cancelled."""
        if self._closed:
            work.close()
            raise StoreUnavailable(f"{self._where.name} is closed")
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone; nobody has to be told then

    # -- reading ------------------------------------------------------------------------------------------

    async def read(self, run_id: str, after: int = 0, limit: int | None = None) -> list[Stored]:
        columns = events.c.seq, events.c.at, events.c.epoch, events.c.body
        statement = select(*columns).where(events.c.run_id == run_id, events.c.seq > after).order_by(events.c.seq)
        return _in_order(run_id, after, await self._rows(statement.limit(limit)))

    async def read_after(self, places: Mapping[str, int]) -> dict[str, list[Stored]]:
        found: dict[str, list[Stored]] = {}
        wanted = list(places.items())
        for start in range(0, len(wanted), IDS_AT_ONCE):
            some = json.dumps(wanted[start : start + IDS_AT_ONCE])
            rows = await self._rows(self._statements.tails, {"after": some})
            for run_id, mine in groupby(rows, itemgetter(0)):
                found[run_id] = _in_order(run_id, places[run_id], [row[1:] for row in mine])
        return found

    async def read_at(self, places: Mapping[str, int]) -> dict[str, Stored]:
        """One event of each of many runs: that with the seq given for it. What does not exist is left out."""
        found: dict[str, Stored] = {}
        wanted = list(places.items())
        for start in range(0, len(wanted), IDS_AT_ONCE):
            some = json.dumps(wanted[start : start + IDS_AT_ONCE])
            for row in await self._rows(self._statements.places, {"places": some}):
                found[row[0]] = stored_event(row[0], row[1:])
        return found

    async def run(self, run_id: str) -> RunRow | None:
        rows = await self._rows(select(*runs.c).where(runs.c.run_id == run_id))
        return run_row(rows[0]) if rows else None

    async def runs(
        self,
        *,
        statuses: Sequence[Status] | None = None,
        batch: str | None = None,
        ids: Sequence[str] | None = None,
        prefix: str | None = None,
        due_before: float | None = None,
        oldest_first: bool = False,
        limit: int | None = None,
    ) -> list[RunRow]:
        statement = select(*runs.c)
        if statuses is not None:
            statement = statement.where(runs.c.status.in_([status.value for status in statuses]))
        if batch is not None:
            statement = statement.where(runs.c.batch == batch)
        if prefix:
            statement = statement.where(runs.c.run_id >= prefix)
            if end := prefix_end(prefix):
                statement = statement.where(runs.c.run_id < end)
        created_at: ColumnElement[float] = runs.c.created_at
        if due_before is not None:
            statement = statement.where(or_(runs.c.due_at <= due_before, runs.c.deadline_at <= due_before))
            created_at = runs.c.created_at + 0.0  # no column of an index: SQLite would read all runs in order of age
        if oldest_first:
            statement = statement.order_by(runs.c.priority.desc(), created_at, runs.c.run_id)
        else:
            statement = statement.order_by(created_at.desc(), runs.c.run_id)
        statement = statement.limit(limit)
        if ids is None:
            return [run_row(row) for row in await self._rows(statement)]
        found: list[RunRow] = []
        unique = list(dict.fromkeys(ids))
        for start in range(0, len(unique), IDS_AT_ONCE):
            some = statement.where(runs.c.run_id.in_(unique[start : start + IDS_AT_ONCE]))
            found += [run_row(row) for row in await self._rows(some)]
        found.sort(key=_by_age if oldest_first else _newest)
        return found[:limit]

    async def counts(self, batch: str | None = None) -> dict[Status, int]:
        statement = select(runs.c.status, func.count()).group_by(runs.c.status)
        if batch is not None:
            statement = statement.where(runs.c.batch == batch)
        return {Status(status): count for status, count in await self._rows(statement)}

    async def calls(self, run_id: str) -> list[CallRow]:
        statement = select(*calls.c).where(calls.c.run_id == run_id).order_by(calls.c.request_seq)
        return [call_row(row) for row in await self._rows(statement)]

    async def budgets(self, name: str | None = None) -> list[Budget]:
        statement = select(*budgets.c).order_by(budgets.c.name)
        if name is not None:
            statement = statement.where(budgets.c.name == name)
        return [budget_row(row) for row in await self._rows(statement)]

    async def kept(self, digest: str, part: int) -> bytes | None:
        rows = await self._rows(select(blobs.c.data).where(blobs.c.digest == digest, blobs.c.part == part))
        return rows[0][0] if rows else None

    async def open_calls(self, ids: Sequence[str]) -> dict[str, list[CallRow]]:
        found: dict[str, list[CallRow]] = {}
        statement = select(*calls.c).where(calls.c.result_seq.is_(None)).order_by(calls.c.request_seq)
        for start in range(0, len(ids), IDS_AT_ONCE):
            for row in await self._rows(statement.where(calls.c.run_id.in_(ids[start : start + IDS_AT_ONCE]))):
                found.setdefault(row[0], []).append(call_row(row))
        return found

    async def lease(self, name: str) -> Lease | None:
        rows = await self._rows(select(*leases.c).where(leases.c.name == name))
        return Lease(*rows[0]) if rows else None

    async def _rows(
        self, statement: Select[Any], parameters: Mapping[str, Any] | None = None
    ) -> Sequence[Sequence[Any]]:
        return await self._apart(self._fetch(statement, parameters))

    async def _fetch(self, statement: Select[Any], parameters: Mapping[str, Any] | None) -> Sequence[Sequence[Any]]:
        try:
            return await self._reader.run(lambda connection: connection.execute(statement, parameters).all())
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise unavailable(self._where.name, "read", error) from error

    async def close(self) -> None:
        """Finish what is under way and close the connections. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        while self._working:
            await asyncio.wait(set(self._working))
        await self._reader.close()
        if self._writer is not None:  # last, so that the database tidies its files
            await self._writer.close()


def _in_order(run_id: str, after: int, rows: Sequence[Sequence[Any]]) -> list[Stored]:
    """The events of these rows, which follow `after`. Raises CorruptLog."""
    for expected, row in enumerate(rows, start=after + 1):
        if row[0] != expected:
            raise CorruptLog(f"run {run_id}, event {expected} is missing: the next one is {row[0]}")
    return [stored_event(run_id, row) for row in rows]


def prefix_end(prefix: str) -> str | None:
    """The first text after all texts with this prefix, by code point; None if there is none."""
    while prefix:
        following = ord(prefix[-1]) + 1
        following = 0xE000 if following == 0xD800 else following  # surrogates are no characters
        if following < 0x110000:
            return prefix[:-1] + chr(following)
        prefix = prefix[:-1]
    return None


def _by_age(row: RunRow) -> tuple[int, float, str]:
    return -row.priority, row.created_at, row.run_id


def _newest(row: RunRow) -> tuple[float, str]:
    return -row.created_at, row.run_id


def _in_transaction(connection: Connection, work: Callable[[Connection, str], None], name: str) -> None:
    with connection.begin():
        work(connection, name)
