"""What the SQL log promises beyond the contract: durable settings, versions, honest errors, nothing read twice over."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
from sqlalchemy import Connection
from sqlalchemy.dialects import sqlite
from sqlalchemy.event import listens_for

from perdure.store.errors import CorruptLog, SchemaMismatch, StoreUnavailable, UsageError
from perdure.store.events import Event, TurnStarted, decode, encode
from perdure.store.log import Accepted, Append, Create, Refused
from perdure.store.sql import SqlLog, open_log
from perdure.store.statements import Statements

from .store_kit import RUN, Clock, accept, created, message, queued, request, running, with_calls

GOLDEN = Path(__file__).parent / "golden" / "events_v1.jsonl"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def log(path: Path) -> AsyncIterator[SqlLog]:
    made = await open_log(path, clock=Clock())
    yield made
    await made.close()


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def fill(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# -- what is on disk ------------------------------------------------------------------------------------------


async def test_an_append_is_on_disk_when_it_is_acknowledged(log: SqlLog, path: Path) -> None:
    def pragmas(connection: Connection) -> list[object]:
        names = "synchronous", "journal_size_limit", "busy_timeout"
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    assert log._writer is not None
    assert await log._writer.run(pragmas) == [2, 16 * 2**20, 1000]
    other = sqlite3.connect(path)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await queued(log)
    assert other.execute("SELECT run_id, seq, type FROM events").fetchall() == [(RUN, 1, "run_created")]
    other.close()


async def test_a_log_is_there_after_it_was_closed_and_opened_again(log: SqlLog, path: Path) -> None:
    await with_calls(log)
    before = await log.read(RUN), await log.run(RUN), await log.calls(RUN)
    await log.close()
    await log.close()
    with pytest.raises(StoreUnavailable, match=r"runs\.db is closed"):
        await log.commit([Create("late", created())])
    again = await open_log(f"sqlite+aiosqlite:///{path}")
    assert (await again.read(RUN), await again.run(RUN), await again.calls(RUN)) == before
    await again.close()


def test_a_stored_event_of_version_1_is_read_as_it_was_written() -> None:
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    events = [decode(line) for line in lines]
    assert {type(event) for event in events} == set(get_args(Event)), "every kind of event is in the golden file"
    for event, line in zip(events, map(json.loads, lines), strict=True):
        again = json.loads(encode(event))
        assert again | line == again, "what was written is kept; what is new since then has a default"


async def test_no_statement_of_a_commit_reads_a_whole_table(log: SqlLog, path: Path) -> None:
    await with_calls(log)
    statements, connection = Statements.of(sqlite.dialect()), sqlite3.connect(path)
    for sql in (statements.runs, statements.calls, statements.newer):
        plan = connection.execute(f"EXPLAIN QUERY PLAN {sql}", ["[]"] * sql.count("?")).fetchall()
        steps = [step[-1] for step in plan]
        assert not [step for step in steps if re.match(r"SCAN (runs|calls|events)", step)], steps
    connection.close()


async def test_the_sweep_and_the_listing_use_an_index(log: SqlLog, path: Path) -> None:
    connection = sqlite3.connect(path)
    for question in (
        "SELECT * FROM runs WHERE status = 'queued' ORDER BY priority DESC, created_at, run_id LIMIT 5",
        "SELECT * FROM runs ORDER BY created_at DESC, run_id LIMIT 5",
    ):
        steps = [step[-1] for step in connection.execute(f"EXPLAIN QUERY PLAN {question}")]
        assert not any("TEMP B-TREE" in step for step in steps), steps
    connection.close()


@pytest.mark.parametrize("oldest_first", [False, True])
async def test_what_is_due_is_found_without_reading_all_runs(log: SqlLog, path: Path, oldest_first: bool) -> None:
    asked: list[str] = []

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    engine = log._reader._engine.sync_engine  # type: ignore[attr-defined]
    listens_for(engine, "before_cursor_execute")(listen)
    assert await log.runs(due_before=5.0, oldest_first=oldest_first) == []
    connection = sqlite3.connect(path)
    parameters = [0.0] * asked[-1].count("?")
    steps = [step[-1] for step in connection.execute(f"EXPLAIN QUERY PLAN {asked[-1]}", parameters)]
    connection.close()
    assert "SEARCH runs USING INDEX runs_due (due_at<?)" in steps
    assert "SEARCH runs USING INDEX runs_deadline (deadline_at<?)" in steps


# -- versions and strangers -----------------------------------------------------------------------------------


async def test_a_newer_schema_is_refused_and_left_untouched(log: SqlLog, path: Path) -> None:
    await queued(log)
    await log.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE meta SET value = '2'")
    connection.commit()
    connection.close()
    before = content(path)
    for read_only in (False, True):
        with pytest.raises(SchemaMismatch, match=r"has schema version 2, this perdure knows 1: upgrade perdure"):
            await open_log(path, read_only=read_only)
    assert content(path) == before


async def test_two_may_open_a_new_database_at_once(path: Path) -> None:
    logs = await asyncio.gather(*(open_log(path) for _ in range(4)))
    await queued(logs[0])
    assert all([await log.run(RUN) for log in logs])
    await asyncio.gather(*(log.close() for log in logs))


async def test_a_database_of_another_program_is_not_touched(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customers (id INTEGER)")
    connection.close()
    before = content(path)
    with pytest.raises(UsageError, match="belongs to another program"):
        await open_log(path)
    assert content(path) == before


async def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    fill(path, b"these are my notes\n" * 100)
    with pytest.raises(UsageError, match=r"runs\.db is not a database of perdure"):
        await open_log(path)
    assert content(path) == b"these are my notes\n" * 100


# -- where the database is ------------------------------------------------------------------------------------


async def test_a_missing_folder_is_made_or_named(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "runs.db"
    with pytest.raises(UsageError, match=rf"folder {path.parent} does not exist"):
        await open_log(path, create=False)
    log = await open_log(path)
    await queued(log)
    await log.close()


async def test_a_missing_database_has_no_runs_yet(path: Path) -> None:
    for read_only in (True, False):
        with pytest.raises(UsageError, match=r"no runs here yet: .*runs\.db does not exist"):
            await open_log(path, read_only=read_only, create=False)
    assert content(path) is None


async def test_an_empty_file_has_no_runs_yet_and_may_be_filled(path: Path) -> None:
    fill(path, b"")
    with pytest.raises(UsageError, match=r"no runs here yet: .*runs\.db is empty"):
        await open_log(path, read_only=True)
    log = await open_log(path)
    await queued(log)
    await log.close()


async def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{tmp_path} is a folder: name a file in it"):
        await open_log(tmp_path)


async def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot use .*runs\.db: (Not a directory|File exists)"):
        await open_log(tmp_path / "file" / "runs.db")


async def test_a_folder_or_file_that_may_not_be_written_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    with pytest.raises(UsageError, match="may not be written by this user"):
        await open_log(path)
    fill(path, b"")
    with pytest.raises(UsageError, match=r"runs\.db may not be written by this user"):
        await open_log(path)


@pytest.mark.parametrize("bad", ["", ":memory:", "sqlite://", "mysql://u:secret@h/db", "nonsense://", "no/such://x"])
async def test_a_url_that_cannot_keep_runs_is_refused_without_its_password(bad: str) -> None:
    with pytest.raises(UsageError) as caught:
        await open_log(bad)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_path_may_have_any_characters(tmp_path: Path) -> None:
    for name in ("a b.db", "100%.db", "what?.db", "a#b.db", "ü&x=1.db", "file:x.db"):
        log = await open_log(tmp_path / name)
        await queued(log)
        assert await log.run(RUN), name
        await log.close()
        assert (tmp_path / name).is_file()


async def test_a_read_only_log_reads_beside_its_writer_and_writes_nothing(log: SqlLog, path: Path) -> None:
    await queued(log)
    reader = await open_log(path, read_only=True)
    row = await running(log, "run-2")
    assert await reader.run("run-2") == row
    with pytest.raises(UsageError, match="open for reading only"):
        await reader.commit([Create("run-3", created())])
    await reader.close()


# -- damage ---------------------------------------------------------------------------------------------------


def damage(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


async def test_a_gap_in_a_log_is_found_wherever_it_is(log: SqlLog, path: Path) -> None:
    await with_calls(log)
    damage(path, "DELETE FROM events WHERE seq = 3")
    with pytest.raises(CorruptLog, match="run run-1, event 3 is missing"):
        await log.read(RUN)
    with pytest.raises(CorruptLog, match="event 3 is missing"):
        await log.read(RUN, after=2)
    assert [stored.seq for stored in await log.read(RUN, after=3)] == [4, 5]


async def test_an_event_that_cannot_be_read_is_named_and_hurts_nobody_else(log: SqlLog, path: Path) -> None:
    row = await with_calls(log)
    damage(path, """UPDATE events SET body = '{"type":"no_such_event"}' WHERE seq = 4""")
    with pytest.raises(CorruptLog, match="run run-1, event 4: an event cannot be read"):
        await log.read(RUN)
    stale = Append(RUN, 1, row.seq - 3, (TurnStarted(turn_index=7),))
    broken, fine = await log.commit([stale, Create("run-2", created())])
    assert isinstance(broken, Refused)
    assert "event 4" in broken.message
    assert isinstance(fine, Accepted)


async def test_a_value_that_cannot_be_stored_is_refused_alone(log: SqlLog) -> None:
    verdicts = await log.commit(
        [
            Create("run-1", created()),
            Create("run-\ud800", created()),
            Create("run-3", created(priority=2**70)),
            Create("run-4", created()),
        ]
    )
    assert [getattr(verdict, "reason", "accepted") for verdict in verdicts] == [
        "accepted",
        "illegal",
        "illegal",
        "accepted",
    ]
    assert {row.run_id for row in await log.runs()} == {"run-1", "run-4"}


# -- many writers ---------------------------------------------------------------------------------------------


async def test_two_logs_on_one_file_never_give_a_seq_twice(log: SqlLog, path: Path) -> None:
    row = await running(log)
    other = await open_log(path)
    conflicts = 0

    async def owner(mine: SqlLog, name: int) -> None:
        nonlocal conflicts
        seq, index = row.seq, 0
        while index < 15:
            (verdict,) = await mine.commit([Append(RUN, 1, seq, (TurnStarted(turn_index=100 * name + index),))])
            if isinstance(verdict, Refused):
                assert verdict.reason == "conflict"
                assert [stored.seq for stored in verdict.newer] == list(range(seq + 1, seq + 1 + len(verdict.newer)))
                seq, conflicts = verdict.newer[-1].seq, conflicts + 1
            else:
                seq, index = verdict.row.seq, index + 1

    await asyncio.gather(owner(log, 1), owner(other, 2))
    stored = await other.read(RUN)
    assert [item.seq for item in stored] == list(range(1, 33))
    turns = [item.event.turn_index for item in stored if isinstance(item.event, TurnStarted)]
    assert [turn for turn in turns if turn < 200] == list(range(100, 115))
    assert [turn for turn in turns if turn >= 200] == list(range(200, 215))
    assert conflicts, "they did meet"
    await other.close()


async def test_a_long_run_is_appended_to_and_read_like_a_short_one(log: SqlLog) -> None:
    row = await running(log)
    for index in range(100):
        events: tuple[Event, ...] = (TurnStarted(turn_index=index), *(message(index) for _ in range(9)))
        row = (await accept(log, Append(RUN, 1, row.seq, events))).row
    assert len(await log.read(RUN)) == 1002
    stale = Append(RUN, 1, 2, (request(),))
    (refused,) = await log.commit([stale])
    assert isinstance(refused, Refused)
    assert len(refused.newer) == 1000
    assert json.loads(encode(refused.newer[0].event))["type"] == "turn_started"
