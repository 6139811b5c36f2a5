"""The statements of a commit, for one dialect.

A set of keys is one parameter: a JSON text that the database takes apart. So a statement is the same for a group of
any size, is compiled once, and is joined key by key through an index (`(a, b) IN (VALUES ...)` makes SQLite scan).

A commit hands the compiled texts to the driver itself: what SQLAlchemy does around each execution costs several times
what SQLite does in it, and every step of every run waits for a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    CompoundSelect,
    Connection,
    Dialect,
    FromClause,
    Select,
    Table,
    Text,
    UpdateBase,
    bindparam,
    cast,
    func,
    insert,
    literal_column,
    select,
)
from sqlalchemy.dialects import sqlite

from .schema import budgets, calls, events, leases, runs

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

_RUN_FIXED: Final = frozenset({"agent", "batch", "sample", "priority", "created_at", "budget"})
_BUDGET_FIXED: Final = frozenset({"cap_tokens", "cap_cost"})
_CALL_FIXED: Final = frozenset({"turn_index", "name", "request_seq"})


class Session:
    """Statements by their text, within a transaction of `connection`; parameters are in the order of the text."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        on_sqlite = connection.dialect.name == "sqlite"
        self._sqlite: Any = connection.connection.driver_connection if on_sqlite else None

    def rows(self, sql: str, *parameters: str) -> Sequence[Sequence[Any]]:
        """What a statement reads."""
        if self._sqlite is not None:
            found: list[Sequence[Any]] = self._sqlite.execute(sql, parameters).fetchall()
            return found
        return self._connection.exec_driver_sql(sql, parameters).all()

    def write(self, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Carry a statement out for each row."""
        if self._sqlite is not None:
            self._sqlite.executemany(sql, rows)
        else:
            self._connection.exec_driver_sql(sql, [*rows])


@dataclass(frozen=True, slots=True)
class Statements:
    """Reads outside of commits as constructs, all others as SQL text. The rows that are written have the columns in
    the table's order."""

    runs: str
    """By a JSON list of ids; the rows are locked where a database locks rows."""
    calls: str
    """The open calls of a JSON list of run ids, and the calls of a JSON list of [run_id, tool_call_id]."""
    newer: str
    """`tails` as text."""
    tails: Select[Any]
    """(run_id, seq, at, epoch, body) of the events behind `after`, a JSON list of [run_id, seq]."""
    places: Select[Any]
    """(run_id, seq, at, epoch, body) of single events, by `places`, a JSON list of [run_id, seq]."""
    holder: str
    """The nonce of the lease of this name."""
    budgets: str
    """By a JSON list of names; locked as runs are, and after them."""
    insert_events: str
    put_runs: str
    put_calls: str
    put_budgets: str

    @classmethod
    def of(cls, dialect: Dialect) -> Statements:
        on_sqlite = dialect.name == "sqlite"
        unpack = _sqlite_pairs if on_sqlite else _postgres_pairs
        return cls(
            # in one order, so that two writers cannot wait for each other's rows
            _read(_locked(runs, runs.c.run_id, _ids(on_sqlite)), dialect, "ids"),
            _read(_calls(unpack, _ids(on_sqlite)), dialect, "ids", "keys"),
            _read(_tails(unpack), dialect, "after"),
            _tails(unpack),
            _places(unpack),
            _read(_holder(), dialect, "name"),
            _read(_locked(budgets, budgets.c.name, _ids(on_sqlite)), dialect, "ids"),
            _write(insert(events), events, dialect),
            _write(_upsert(runs, dialect, _RUN_FIXED), runs, dialect),
            _write(_upsert(calls, dialect, _CALL_FIXED), calls, dialect),
            _write(_upsert(budgets, dialect, _BUDGET_FIXED), budgets, dialect),
        )


def _locked(table: Table, key: Column[Any], ids: Select[Any]) -> Select[Any]:
    return select(*table.c).where(key.in_(ids)).order_by(key).with_for_update(of=table)


def _holder() -> Select[Any]:
    return select(leases.c.nonce).where(leases.c.name == bindparam("name")).with_for_update(read=True)


_Pairs = tuple[FromClause, ColumnElement[Any], ColumnElement[Any]]


def _ids(on_sqlite: bool) -> Select[Any]:
    if on_sqlite:
        return select(func.json_each(bindparam("ids")).table_valued("value").c.value)
    return select(func.jsonb_array_elements_text(_json("ids")))


def _sqlite_pairs(name: str) -> _Pairs:
    pairs = func.json_each(bindparam(name)).table_valued("value", name="pairs")
    first, second = (func.json_extract(pairs.c.value, literal_column(f"'$[{n}]'")) for n in (0, 1))
    return pairs, first, second


def _postgres_pairs(name: str) -> _Pairs:
    pairs = func.jsonb_array_elements(_json(name)).table_valued("value", name="pairs")
    first, second = (pairs.c.value.op("->>")(literal_column(str(n))) for n in (0, 1))
    return pairs, first, second


def _json(name: str) -> ColumnElement[Any]:
    from sqlalchemy.dialects import postgresql

    return cast(bindparam(name, type_=Text), postgresql.JSONB)  # text, or SQLAlchemy would encode it once more


def _calls(unpack: Callable[[str], _Pairs], ids: Select[Any]) -> CompoundSelect[Any]:
    pairs, run_id, call_id = unpack("keys")
    by_key = pairs.join(calls, (calls.c.run_id == run_id) & (calls.c.tool_call_id == call_id))
    is_open = select(*calls.c).where(calls.c.run_id.in_(ids), calls.c.result_seq.is_(None))
    return is_open.union_all(select(*calls.c).select_from(by_key))


def _tails(unpack: Callable[[str], _Pairs]) -> Select[Any]:
    pairs, run_id, seq = unpack("after")
    behind = pairs.join(events, (events.c.run_id == run_id) & (events.c.seq > cast(seq, BigInteger)))
    columns = events.c.run_id, events.c.seq, events.c.at, events.c.epoch, events.c.body
    return select(*columns).select_from(behind).order_by(events.c.run_id, events.c.seq)


def _places(unpack: Callable[[str], _Pairs]) -> Select[Any]:
    pairs, run_id, seq = unpack("places")
    there = pairs.join(events, (events.c.run_id == run_id) & (events.c.seq == cast(seq, BigInteger)))
    return select(events.c.run_id, events.c.seq, events.c.at, events.c.epoch, events.c.body).select_from(there)


def insert_for(table: Table, dialect: Dialect) -> sqlite.Insert | postgresql.Insert:
    """The insert that knows ON CONFLICT."""
    if dialect.name == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


def _upsert(table: Table, dialect: Dialect, fixed: frozenset[str]) -> UpdateBase:
    statement = insert_for(table, dialect)
    mutable = [column.name for column in table.c if not column.primary_key and column.name not in fixed]
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key), set_={name: statement.excluded[name] for name in mutable}
    )


def _read(statement: Select[Any] | CompoundSelect[Any], dialect: Dialect, *names: str) -> str:
    compiled = statement.compile(dialect=dialect)
    assert tuple(compiled.positiontup or ()) == names
    return str(compiled)


def _write(statement: UpdateBase, table: Table, dialect: Dialect) -> str:
    keys = list(table.c.keys())
    compiled = statement.compile(dialect=dialect, column_keys=keys)
    assert compiled.positiontup == keys
    return str(compiled)
