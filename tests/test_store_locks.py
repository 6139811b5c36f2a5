"""A database that others keep busy: commits wait within a bound, readers do not, and nothing stays behind."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from perdure.store import engine, sql
from perdure.store.errors import StoreUnavailable
from perdure.store.log import Append, Create
from perdure.store.sql import SqlLog, open_log

from .store_kit import RUN, Clock, accept, created, message, queued, running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def log(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqlLog]:
    monkeypatch.setattr(engine, "BUSY_SLICE_S", 0.05)
    made = await open_log(path, clock=Clock(), busy_s=20.0)
    yield made
    await made.close()


@pytest.fixture
def other(log: SqlLog, path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's connection."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    yield connection
    connection.close()


@pytest.fixture
def turned_away(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the database has turned a commit away for the first time."""
    event, ask = asyncio.Event(), engine.may_retry

    def asked(error: Exception) -> bool:
        event.set()
        return ask(error)

    monkeypatch.setattr(sql, "may_retry", asked)
    return event


async def test_a_commit_waits_for_a_lock_and_succeeds_after_its_release(
    log: SqlLog, other: sqlite3.Connection, turned_away: asyncio.Event
) -> None:
    other.execute("BEGIN IMMEDIATE")
    commit = asyncio.create_task(queued(log))
    await turned_away.wait()
    assert not commit.done()
    other.execute("ROLLBACK")
    assert (await commit).seq == 1


async def test_past_the_limit_the_store_is_unavailable_and_later_it_is_not(path: Path) -> None:
    log = await open_log(path, busy_s=0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match=r"runs\.db could not be written .*locked.* may be sent again"):
        await log.commit([Create(RUN, created())])
    with pytest.raises(StoreUnavailable):
        await log.drop_lease("supervisor", "nonce")
    other.execute("ROLLBACK")
    other.close()
    await queued(log)
    await log.close()


async def test_a_new_database_that_is_locked_is_unavailable_when_opened(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailable, match=r"runs\.db could not be opened"):
        await open_log(path, busy_s=0.1)
    other.execute("ROLLBACK")
    other.close()
    await (await open_log(path)).close()


async def test_reads_do_not_wait_for_a_writer(log: SqlLog, other: sqlite3.Connection) -> None:
    row = await queued(log)
    other.execute("BEGIN IMMEDIATE")
    other.execute("UPDATE runs SET seq = 99")
    assert await log.run(RUN) == row
    assert len(await log.read(RUN)) == 1
    other.execute("ROLLBACK")


async def test_a_cancelled_caller_leaves_no_transaction_open(
    log: SqlLog, other: sqlite3.Connection, turned_away: asyncio.Event
) -> None:
    other.execute("BEGIN IMMEDIATE")
    commit = asyncio.create_task(log.commit([Create("run-1", created())]))
    await turned_away.wait()
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    other.execute("ROLLBACK")
    await queued(log, "run-2")
    other.execute("BEGIN IMMEDIATE")  # nobody holds the lock
    other.execute("ROLLBACK")
    assert {row.run_id for row in await log.runs()} == {"run-1", "run-2"}, "what was under way went on to its end"


async def test_cancelled_readers_give_their_connections_back(log: SqlLog) -> None:
    await queued(log)
    for _ in range(20):
        readers = [asyncio.create_task(log.read(RUN)) for _ in range(8)]
        await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
        for reader in readers:
            reader.cancel()
    assert len(await log.read(RUN)) == 1


async def test_close_waits_for_what_is_under_way(
    log: SqlLog, other: sqlite3.Connection, turned_away: asyncio.Event
) -> None:
    other.execute("BEGIN IMMEDIATE")
    commit = asyncio.create_task(queued(log))
    await turned_away.wait()
    close = asyncio.create_task(log.close())
    other.execute("ROLLBACK")
    await close
    assert (await commit).seq == 1
    assert other.execute("SELECT count(*) FROM events").fetchone() == (1,)


async def test_the_write_ahead_file_shrinks_after_a_long_reader_has_left(
    log: SqlLog, other: sqlite3.Connection, path: Path
) -> None:
    row = await running(log)
    wal = path.with_name(f"{path.name}-wal")
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM events").fetchall()
    long = message().model_copy(update={"text": "x" * 2**20})
    for number in range(24):
        event = long.model_copy(update={"event_id": f"long-{number}"})
        row = (await accept(log, Append(RUN, 1, row.seq, (event,)))).row
    assert wal.stat().st_size > engine.WAL_BYTES_KEPT
    other.execute("COMMIT")
    for name in ("run-2", "run-3"):  # the first makes the checkpoint, the second starts the file anew
        await queued(log, name)
    assert wal.stat().st_size <= engine.WAL_BYTES_KEPT
