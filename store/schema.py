"""The tables of a stored log, and the way from a row to a value and back.

`events` is the truth; `runs` and `calls` are projections of it, `budgets` are what runs share, `leases` says who works
here, `blobs` are what results leave out, by digest and part, and `meta` says which version of this file wrote the
database. Everything but blobs is text and numbers; JSON is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

from .budgets import Amount, Budget, Cap
from .events import Stored, Usage, encode
from .rows import CallRow, Lease, RunRow
from .states import Status

SCHEMA_VERSION: Final = 1
VERSION_KEY: Final = "schema_version"

metadata: Final = MetaData()


def _key() -> Text:
    """Text that is compared by code point, so that a prefix is a range of the index on every database."""
    return Text().with_variant(Text(collation="C"), "postgresql")


def _text(name: str, nullable: bool = False) -> Column[Any]:
    return Column(name, Text, nullable=nullable)


def _number(name: str, nullable: bool = False) -> Column[Any]:
    return Column(name, BigInteger, nullable=nullable)


def _seconds(name: str, nullable: bool = False) -> Column[Any]:
    return Column(name, Double, nullable=nullable)


meta: Final = Table("meta", metadata, Column("key", Text, primary_key=True), _text("value"))

events: Final = Table(
    "events",
    metadata,
    Column("run_id", _key(), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    _text("event_id"),
    _seconds("at"),
    _number("epoch"),
    _text("type"),
    _text("body"),
)

_USAGE: Final = tuple(Usage.model_fields)

runs: Final = Table(
    "runs",
    metadata,
    Column("run_id", _key(), primary_key=True),
    _text("status"),
    _number("seq"),
    _number("epoch"),
    _text("agent"),
    _text("digest"),
    _text("batch", nullable=True),
    _text("sample", nullable=True),
    _number("priority"),
    _seconds("created_at"),
    _seconds("updated_at"),
    _number("turns"),
    *(_number(name) for name in _USAGE),
    Column("cancel", Boolean, nullable=False),
    _text("claim_id"),
    _text("charges"),
    _text("decisions"),
    _text("error", nullable=True),
    _number("end_seq", nullable=True),
    _seconds("due_at", nullable=True),
    Column("parked", Boolean, nullable=False),
    _seconds("timeout_s", nullable=True),
    _seconds("deadline_at", nullable=True),
    _text("budget", nullable=True),
    _number("held_tokens", nullable=True),
    _text("held_cost", nullable=True),
)
Index("runs_sweep", runs.c.status, runs.c.priority.desc(), runs.c.created_at, runs.c.run_id)
Index("runs_newest", runs.c.created_at.desc(), runs.c.run_id)
Index("runs_batch", runs.c.batch, runs.c.status)
_is_due = runs.c.due_at.is_not(None)
Index("runs_due", runs.c.due_at, sqlite_where=_is_due, postgresql_where=_is_due)
_has_deadline = runs.c.deadline_at.is_not(None)
Index("runs_deadline", runs.c.deadline_at, sqlite_where=_has_deadline, postgresql_where=_has_deadline)

calls: Final = Table(
    "calls",
    metadata,
    Column("run_id", _key(), primary_key=True),
    Column("tool_call_id", Text, primary_key=True),
    _number("turn_index"),
    _text("name"),
    _text("effect"),
    _number("attempt"),
    _number("started_attempt"),
    _text("nonce"),
    _seconds("started_at"),
    _seconds("hold_s"),
    _text("node"),
    _text("boot_id"),
    _number("pid"),
    _seconds("pid_started"),
    _text("lock"),
    Column("unsettled", Boolean, nullable=False),
    _text("gate"),
    _text("question"),
    _text("digest"),
    _seconds("due_at", nullable=True),
    _text("default", nullable=True),
    _text("decided"),
    _text("decision_text"),
    _number("result_seq", nullable=True),
    _text("result_id"),
    _text("evidence_ids"),
    _number("evidence_seq", nullable=True),
    _number("request_seq"),
)
_is_open = calls.c.result_seq.is_(None)
Index("calls_open", calls.c.run_id, sqlite_where=_is_open, postgresql_where=_is_open)

leases: Final = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    _text("nonce"),
    _text("node"),
    _text("boot_id"),
    Column("pid", Integer, nullable=False),
    _seconds("pid_started"),
    _seconds("expires_at"),
)

budgets: Final = Table(
    "budgets",
    metadata,
    Column("name", Text, primary_key=True),
    _number("cap_tokens", nullable=True),
    _text("cap_cost", nullable=True),
    *(
        column
        for part in ("spent", "held", "estimated")
        for column in (_number(f"{part}_tokens"), _text(f"{part}_cost"))
    ),
)
"""Money is the text of a decimal number, which is exact."""

blobs: Final = Table(
    "blobs",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

_USAGE_AT: Final = list(runs.c.keys()).index(_USAGE[0])
_CALL_FIELDS: Final = CallRow._fields
_UNSETTLED_AT: Final = _CALL_FIELDS.index("unsettled")
_usage_values: Final[Callable[[Usage], tuple[Any, ...]]] = attrgetter(*_USAGE)
_lease_values: Final[Callable[[Lease], tuple[Any, ...]]] = attrgetter(*leases.c.keys())


def run_row(row: Sequence[Any]) -> RunRow:
    """The projection of a run from a row of `runs`; SQLite's driver gives a truth as a number."""
    run_id, status, *plain = row[:_USAGE_AT]
    usage = Usage(**dict(zip(_USAGE, row[_USAGE_AT:], strict=False)))
    cancel, claim_id, charges, decisions, error, end_seq, due_at, parked, *rest = row[_USAGE_AT + len(_USAGE) : -2]
    values: list[Any] = [run_id, Status(status), *plain, usage, bool(cancel), claim_id]
    held = None if row[-2] is None else Amount(row[-2], Decimal(row[-1]))
    values += [_parsed(charges), _parsed(decisions), error, end_seq, due_at, bool(parked), *rest, held]
    return RunRow(*values)


def _parsed(text: str) -> tuple[Any, ...]:
    return tuple(json.loads(text)) if text != "[]" else ()


def run_values(run: RunRow) -> tuple[Any, ...]:
    """The row of `runs` for a projection."""
    return (
        run.run_id,
        run.status.value,
        run.seq,
        run.epoch,
        run.agent,
        run.digest,
        run.batch,
        run.sample,
        run.priority,
        run.created_at,
        run.updated_at,
        run.turns,
        *_usage_values(run.usage),
        run.cancel,
        run.claim_id,
        json.dumps(run.charges) if run.charges else "[]",
        json.dumps(run.decisions) if run.decisions else "[]",
        run.error,
        run.end_seq,
        run.due_at,
        run.parked,
        run.timeout_s,
        run.deadline_at,
        run.budget,
        run.held.tokens if run.held else None,
        f"{run.held.cost:f}" if run.held else None,
    )


def call_row(row: Sequence[Any]) -> CallRow:
    """The projection of a call from a row of `calls`."""
    values = [*row[:-1]]
    values[_UNSETTLED_AT] = bool(values[_UNSETTLED_AT])
    return CallRow(*values)


def call_values(call: CallRow, request_seq: int) -> tuple[Any, ...]:
    """The row of `calls` for a projection; `request_seq` is the seq of the call's request and keeps the order."""
    return (*call, request_seq)


def budget_row(row: Sequence[Any]) -> Budget:
    """A budget from a row of `budgets`."""
    name, tokens, cost, *parts = row
    amounts = [Amount(parts[at], Decimal(parts[at + 1])) for at in (0, 2, 4)]
    return Budget(name, Cap(tokens, None if cost is None else Decimal(cost)), *amounts)


def budget_values(budget: Budget) -> tuple[Any, ...]:
    """The row of `budgets` for a budget."""
    cap = budget.cap
    amounts = [(part.tokens, f"{part.cost:f}") for part in (budget.spent, budget.held, budget.estimated)]
    return (
        budget.name,
        cap.tokens,
        None if cap.cost is None else f"{cap.cost:f}",
        *(v for pair in amounts for v in pair),
    )


def event_values(run_id: str, stored: Stored) -> tuple[Any, ...]:
    """The row of `events` for an event. Raises ValueError for text that is not valid Unicode."""
    event = stored.event
    return run_id, stored.seq, event.event_id, stored.at, stored.epoch, event.type, encode(event)


def lease_values(lease: Lease) -> dict[str, Any]:
    """The row of `leases` for a lease, by column."""
    return dict(zip(leases.c.keys(), _lease_values(lease), strict=True))
