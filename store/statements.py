"""The statements of a commit, for one dialect.

A set of keys is one parameter: a JSON text that the database takes apart. So a statement is the same for a group of
any size, is compiled once, and is joined key by key through an index (`(a, b) IN (VALUES ...)` makes SQLite scan).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CompoundSelect,
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
    select,
)
from sqlalchemy.dialects import sqlite

from .memory import SUPERVISOR
from .schema import budgets, calls, events, leases, runs

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

_RUN_FIXED: Final = frozenset({"agent", "batch", "sample", "priority", "created_at", "budget"})
_BUDGET_FIXED: Final = frozenset({"cap_tokens", "cap_cost"})
_CALL_FIXED: Final = frozenset({"turn_index", "name", "request_seq"})


@dataclass(frozen=True, slots=True)
class Statements:
    """Reads as constructs, writes of many rows as SQL text with the columns in the table's order: building their
    parameters in SQLAlchemy, row by row, costs more than the database does."""

    runs: Select[Any]
    """By `ids`, a JSON list; the rows are locked where a database locks rows."""
    calls: CompoundSelect[Any]
    """The open calls of `ids` and the calls of `keys`, a JSON list of [run_id, tool_call_id]."""
    tails: Select[Any]
    """(run_id, seq, at, epoch, body) of the events behind `after`, a JSON list of [run_id, seq]."""
    places: Select[Any]
    """(run_id, seq, at, epoch, body) of single events, by `places`, a JSON list of [run_id, seq]."""
    supervisor: Select[Any]
    budgets: Select[Any]
    """By `ids`, a JSON list of names; locked as runs are, and after them."""
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
            select(*runs.c).where(runs.c.run_id.in_(_ids(on_sqlite))).order_by(runs.c.run_id).with_for_update(of=runs),
            _calls(unpack, _ids(on_sqlite)),
            _tails(unpack),
            _places(unpack),
            select(leases.c.nonce).where(leases.c.name == SUPERVISOR).with_for_update(read=True),
            select(*budgets.c)
            .where(budgets.c.name.in_(_ids(on_sqlite)))
            .order_by(budgets.c.name)
            .with_for_update(of=budgets),
            _sql(insert(events), events, dialect),
            _sql(_upsert(runs, dialect, _RUN_FIXED), runs, dialect),
            _sql(_upsert(calls, dialect, _CALL_FIXED), calls, dialect),
            _sql(_upsert(budgets, dialect, _BUDGET_FIXED), budgets, dialect),
        )


_Pairs = tuple[FromClause, ColumnElement[Any], ColumnElement[Any]]


def _ids(on_sqlite: bool) -> Select[Any]:
    if on_sqlite:
        return select(func.json_each(bindparam("ids")).table_valued("value").c.value)
    return select(func.jsonb_array_elements_text(_json("ids")))


def _sqlite_pairs(name: str) -> _Pairs:
    pairs = func.json_each(bindparam(name)).table_valued("value", name="pairs")
    return pairs, func.json_extract(pairs.c.value, "$[0]"), func.json_extract(pairs.c.value, "$[1]")


def _postgres_pairs(name: str) -> _Pairs:
    pairs = func.jsonb_array_elements(_json(name)).table_valued("value", name="pairs")
    return pairs, pairs.c.value.op("->>")(0), pairs.c.value.op("->>")(1)


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


def _sql(statement: UpdateBase, table: Table, dialect: Dialect) -> str:
    keys = list(table.c.keys())
    compiled = statement.compile(dialect=dialect, column_keys=keys)
    assert compiled.positiontup == keys
    return str(compiled)
