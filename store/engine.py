"""Opening a database: which one, with which engines, and whether this build may use it.

A log has a writer and readers. The writer begins each transaction with the write lock; the readers are in autocommit
mode, so that no read waits for a write and none holds an old snapshot. Nothing is written before the schema version
has been seen. What can go wrong here is the user's to mend, so each error is one line that says how.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, Connection, Dialect, Engine, create_engine, event, insert, inspect, make_url, select, text
from sqlalchemy.exc import ArgumentError, DataError

from .errors import PerdureError, SchemaMismatch, StoreUnavailable, UsageError
from .schema import SCHEMA_VERSION, VERSION_KEY, meta, metadata

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

DEFAULT_STORE: Final = ".perdure/runs.db"
"""Where runs are kept when nobody says."""
WAL_BYTES_KEPT: Final = 16 * 2**20
"""Size that the write-ahead file is cut to once nobody reads its older part."""
BUSY_SLICE_S: Final = 1.0
"""Longest wait inside SQLite for a lock; between two such waits the bounded retry looks at its clock."""
CONNECTIONS: Final = 4
"""Connections of a pool: reads at once, and on PostgreSQL transactions at once."""
_WRITER_PRAGMAS: Final = (
    "synchronous = FULL",
    f"journal_size_limit = {WAL_BYTES_KEPT}",
    f"wal_autocheckpoint = {WAL_BYTES_KEPT // 4096}",  # in pages: live runs rewrite the same few again and again
    "cache_size = -16384",  # in KiB
)
_CREATE_LOCK: Final = 0x70657264

_PG_DATA: Final = "22"
"""Class of the codes for data that is out of range or malformed."""
_PG_AGAIN: Final = frozenset({"40001", "40P01", "55P03", "23505"})
"""Serialisation failure, deadlock, lock not available, a row that somebody else created in between."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which database: its URL, the name that messages use, and the file if it is one."""

    url: URL
    name: str
    path: Path | None


def target(url_or_path: str | os.PathLike[str]) -> Target:
    """The database that a plain path or a SQLAlchemy URL names. Raises UsageError."""
    given = os.fspath(url_or_path)
    if "://" not in given:
        return _file(given)
    try:
        url = make_url(given)
    except (ArgumentError, ValueError) as error:
        raise UsageError(f"not a database URL: {given.split('@')[-1]!r} ({error})") from error
    backend = url.get_backend_name()
    if backend == "sqlite":
        return _file(url.database or "")
    if backend == "postgresql":
        url = url.set(drivername="postgresql+asyncpg")
        return Target(url, url.render_as_string(hide_password=True), None)
    raise UsageError(f"cannot keep runs in {backend!r}: give a file, sqlite:///FILE or postgresql://...")


def _file(name: str) -> Target:
    if name in ("", ":memory:"):
        raise UsageError("an in-memory database forgets every run: name a file")
    path = Path(name).expanduser().absolute()
    return Target(URL.create("sqlite", database=str(path)), str(path), path)


def prepare_file(path: Path, *, read_only: bool, create: bool) -> bool:
    """Make sure that the file can be opened; whether it has content already. Raises UsageError."""
    folder = path.parent
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder: name a file in it, for example {path / 'perdure.db'}")
        if path.exists():
            if not path.is_file():
                raise UsageError(f"{path} is not a file")
            if not os.access(path, os.R_OK if read_only else os.R_OK | os.W_OK):
                raise UsageError(f"{path} may not be {'read' if read_only else 'written'} by this user")
            _check_folder(folder, read_only)
            if path.stat().st_size or not read_only:
                return path.stat().st_size > 0
        if read_only or (folder.is_dir() and not create):
            raise UsageError(f"no runs here yet: {path} {'is empty' if path.exists() else 'does not exist'}")
        if not folder.is_dir() and not create:
            raise UsageError(f"folder {folder} does not exist: create it first")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use {path}: {error.strerror or error}") from error
    _check_folder(folder, read_only)
    return False


def _check_folder(folder: Path, read_only: bool) -> None:
    if not read_only and not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"folder {folder} may not be written by this user; the database keeps files of its own there")


class Connections(Protocol):
    """Where transactions, or reads, run. `width` of them may run at once."""

    width: int
    dialect: Dialect

    async def run(self, work: Callable[[Connection], T]) -> T: ...

    async def close(self) -> None: ...


class ThreadConnections:
    """SQLite: connections in threads of their own. A transaction is a dozen calls of the driver; going to the thread
    and back for each of them would cost more than the transaction itself. `keeps` a single connection at hand: taking
    one from the pool and giving it back costs a third of a small transaction."""

    def __init__(self, engine: Engine, width: int, keeps: bool = False) -> None:
        self._engine, self.width, self.dialect = engine, width, engine.dialect
        self._threads = ThreadPoolExecutor(width, thread_name_prefix="perdure-log")
        self._keeps = keeps
        self._kept: Connection | None = None

    async def run(self, work: Callable[[Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)

    def _run(self, work: Callable[[Connection], T]) -> T:
        if not self._keeps:
            with self._engine.connect() as connection:
                return work(connection)
        kept = self._kept = self._kept or self._engine.connect()
        try:
            done = work(kept)
        except BaseException:
            self._let_go()  # in whatever state it is
            raise
        if kept.in_transaction():  # SQLAlchemy begins one wherever there is none
            kept.rollback()
        return done

    def _let_go(self) -> None:
        kept, self._kept = self._kept, None
        if kept:
            kept.close()

    def _close(self) -> None:
        self._let_go()
        self._engine.dispose()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._close)
        self._threads.shutdown(wait=False)


class AsyncConnections:
    """Connections of the event loop: PostgreSQL, and SQLite's readers."""

    width = CONNECTIONS

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self.dialect = engine, engine.dialect

    async def run(self, work: Callable[[Connection], T]) -> T:
        async with self._engine.connect() as connection:
            return await connection.run_sync(work)

    async def close(self) -> None:
        await self._engine.dispose()


def open_writer(where: Target, busy_s: float) -> Connections:
    """The connections of the transactions that append."""
    if where.path is None:
        return AsyncConnections(_postgres(where.url, busy_s))
    engine = create_engine(
        where.url,
        pool_size=1,
        max_overflow=0,
        connect_args={"timeout": min(BUSY_SLICE_S, busy_s)},
    )

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; the listener below does
        _pragmas(connection, *_WRITER_PRAGMAS)

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver.execute("BEGIN IMMEDIATE")

    return ThreadConnections(engine, 1, keeps=True)


def open_reader(where: Target, busy_s: float, brief: bool) -> Connections:
    """The connections of everything that only reads.

    SQLite is read through aiosqlite; but a command that reads and ends (`brief`) is done before that is imported.
    """
    if where.path is None:
        return AsyncConnections(_postgres(where.url, busy_s, isolation_level="AUTOCOMMIT"))
    file = where.url.set(database=f"file:{quote(str(where.path))}", query={"mode": "ro", "uri": "true"})
    options: dict[str, Any] = {
        "isolation_level": "AUTOCOMMIT",
        "skip_autocommit_rollback": True,
        "pool_size": CONNECTIONS,
        "max_overflow": 0,
        "connect_args": {"timeout": busy_s},
    }
    if brief:
        return ThreadConnections(create_engine(file, **options), CONNECTIONS)
    from sqlalchemy.ext.asyncio import create_async_engine

    return AsyncConnections(create_async_engine(file.set(drivername="sqlite+aiosqlite"), **options))


def _postgres(url: URL, busy_s: float, **options: Any) -> AsyncEngine:
    from sqlalchemy.ext.asyncio import create_async_engine  # half of what there is to import

    try:
        return create_async_engine(
            url,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=busy_s,
            pool_pre_ping=True,
            connect_args={"timeout": busy_s, "command_timeout": busy_s},
            **options,
        )
    except ImportError as error:
        raise UsageError("PostgreSQL needs the asyncpg package: pip install asyncpg") from error


def _pragmas(connection: Any, *pragmas: str) -> None:
    cursor = connection.cursor()
    for pragma in pragmas:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def check_version(connection: Connection, name: str) -> bool:
    """Whether the tables exist. Raises SchemaMismatch or UsageError for a database that is not this build's."""
    tables = set(inspect(connection).get_table_names())
    if meta.name not in tables:
        strangers = tables if connection.dialect.name == "sqlite" else tables & metadata.tables.keys()
        if strangers:
            raise UsageError(f"{name} belongs to another program (table {min(strangers)!r}): name another database")
        return False
    if set(metadata.tables) - tables:
        raise UsageError(f"{name} belongs to another program: name another database")
    found = connection.scalar(select(meta.c.value).where(meta.c.key == VERSION_KEY))
    if found is None or not found.isdecimal():
        raise UsageError(f"{name} does not say which schema it has: it is damaged or belongs to another program")
    if int(found) > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{name} has schema version {found}, this perdure knows {SCHEMA_VERSION}: "
            "upgrade perdure or name another database (nothing was changed)"
        )
    return True


def create_tables(connection: Connection, name: str) -> None:
    """Bring a database to this build's schema, in the transaction of `connection`."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _CREATE_LOCK})
    if check_version(connection, name):
        return  # a migration from an older version goes here, so that it is one transaction
    metadata.create_all(connection)
    connection.execute(insert(meta), {"key": VERSION_KEY, "value": str(SCHEMA_VERSION)})


def enter_wal(connection: Connection, name: str) -> None:
    """Switch a SQLite file to write-ahead logging; outside a transaction. Raises UsageError where that is refused."""
    driver = connection.connection
    cursor = driver.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    mode = cursor.fetchone()
    cursor.close()
    if mode is None or mode[0] != "wal":
        raise UsageError(f"{name} cannot be kept safely on this file system (no write-ahead log): use a local disk")


def may_retry(error: Exception) -> bool:
    """Whether the database only asks to come back later, with nothing applied."""
    if getattr(_cause(error), "sqlstate", None) in _PG_AGAIN:
        return True
    return _sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def cannot_hold(error: Exception) -> bool:
    """Whether a value of the request is one that this database cannot hold, so that asking again is no use."""
    return isinstance(error, (DataError, sqlite3.DataError)) or str(getattr(_cause(error), "sqlstate", "")).startswith(
        _PG_DATA
    )


def unavailable(name: str, doing: str, error: Exception) -> StoreUnavailable:
    """The error for a database that did not do its work."""
    cause = str(_cause(error)) or type(error).__name__
    return StoreUnavailable(f"{name} could not be {doing} ({cause}); the request may be sent again")


def opening_failed(name: str, error: Exception) -> PerdureError:
    """The error for a database that could not be opened."""
    code = _sqlite_code(error)
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return UsageError(f"{name} is not a database of perdure ({_cause(error)})")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return UsageError(f"{name} cannot be opened ({_cause(error)}): check the folder's permissions")
    return unavailable(name, "opened", error)


def _cause(error: Exception) -> BaseException:
    """The driver's own error."""
    return getattr(error, "orig", None) or error


def _sqlite_code(error: Exception) -> int:
    """SQLite's primary result code, 0 if there is none."""
    code: int = getattr(_cause(error), "sqlite_errorcode", 0)
    return code & 0xFF
