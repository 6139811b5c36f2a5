"""Budgets that many runs share, for those who launch them: what there is, and changing the caps."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..store.budgets import Budget, Cap
from ..store.errors import NotFound, UsageError
from ..store.sql import SqlLog


class _Caps(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    tokens: int | None = Field(default=None, ge=0, lt=2**63)
    cost: Decimal | None = Field(default=None, ge=0, max_digits=24, decimal_places=12)


Caps = Mapping[str, int | Decimal | None]


def caps_of(changes: Mapping[str, object]) -> Caps:
    """The caps, `tokens` and `cost`, that are to change; None lifts one. Raises UsageError for one that makes no
    sense."""
    try:
        return _Caps.model_validate(dict(changes)).model_dump(include=set(changes))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(f"the cap on {first['loc'][0]} cannot be {first['input']!r}: {first['msg']}") from error


async def find_budget(event_log: SqlLog, name: str) -> Budget:
    """The budget of that name. Raises NotFound."""
    for budget in await event_log.budgets(name):
        return budget
    raise NotFound(f"no budget {name!r} in this store")


async def cap_budget(event_log: SqlLog, name: str, caps: Caps) -> Budget:
    """Change the caps of a budget, which is made if there is none. Raises UsageError for a name that makes none."""
    if not name or not name.isprintable() or len(name) > 200:
        raise UsageError(f"a budget needs a name of 1 to 200 printable characters, not {name[:80]!a}")
    return await event_log.cap_budget(name, caps)


async def cap_after(event_log: SqlLog, name: str, caps: Caps) -> Cap:
    """The caps that a budget is going to have, before anything is changed. Raises NotFound where there is none, and
    none is to be made."""
    budget = Budget(name) if caps else await find_budget(event_log, name)
    for found in await event_log.budgets(name):
        budget = found
    return budget.cap.changed(caps)
