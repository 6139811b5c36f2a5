"""Budgets that many runs share: the row of one, and what the events of its runs do to it. Pure.

A run holds at most one reservation, that of the model call which it makes: `budget_reserved` holds it, the message
settles it for what the call did cost, `budget_released` gives it back where the call cost nothing. Whatever else ends
the call (another owner, the end of the run, another call) charges the reservation as it stands and marks it as
estimated: nobody knows what the call did cost. All of it happens in the transaction of the event, so that an append
that is sent again charges nothing twice.

Money is Decimal and exact; it is text in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final, cast

from .events import (
    AssistantMessage,
    BudgetReleased,
    BudgetReserved,
    Event,
    RunCancelled,
    RunClaimed,
    RunCompleted,
    RunFailed,
    RunTimedOut,
    Usage,
)

EXACT: Final = Context(prec=200, traps=[Inexact, InvalidOperation])
"""Arithmetic that fails rather than rounds, whatever context the user's code has set."""
ZERO: Final = Decimal(0)


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens and US dollars."""

    tokens: int = 0
    cost: Decimal = ZERO

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, EXACT.add(self.cost, other.cost))

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, EXACT.subtract(self.cost, other.cost))


@dataclass(frozen=True, slots=True)
class Cap:
    """The most that may be spent; None: without bound."""

    tokens: int | None = None
    cost: Decimal | None = None

    def allows(self, amount: Amount) -> bool:
        """Whether so much may be spent in all."""
        return (self.tokens is None or amount.tokens <= self.tokens) and (self.cost is None or amount.cost <= self.cost)

    def changed(self, caps: Mapping[str, int | Decimal | None]) -> Cap:
        """With other values for `tokens` and `cost`, as far as they are given."""
        return replace(self, **cast(Any, caps))


@dataclass(frozen=True, slots=True)
class Budget:
    """Where a shared budget stands. `estimated` is the part of `spent` that was charged without an answer."""

    name: str
    cap: Cap = Cap()
    spent: Amount = Amount()
    held: Amount = Amount()
    """Reserved for model calls under way."""
    estimated: Amount = Amount()

    @property
    def taken(self) -> Amount:
        return self.spent + self.held


def tokens(usage: Usage) -> int:
    """All four kinds together."""
    return usage.input_tokens + usage.output_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def reserved(event: BudgetReserved) -> Amount:
    """What a reservation holds."""
    return Amount(event.prompt_tokens + event.output_tokens, event.cost or ZERO)


def entered(budget: Budget, held: Amount | None, event: Event) -> tuple[Budget, Amount | None]:
    """The budget after an event of one of its runs, and what that run holds of it; `held` is what it held before."""
    match event:
        case BudgetReserved():
            budget = _lost(budget, held) if held else budget
            amount = reserved(event)
            return replace(budget, held=budget.held + amount), amount
        case AssistantMessage() if held:
            return _settled(budget, held, event), None
        case BudgetReleased() if held:
            return replace(budget, held=budget.held - held), None
        case RunClaimed() | RunCompleted() | RunFailed() | RunCancelled() | RunTimedOut() if held:
            return _lost(budget, held), None
    return budget, held


def _settled(budget: Budget, held: Amount, message: AssistantMessage) -> Budget:
    """A call is charged with what it took; where its message does not say what that cost, with the money reserved."""
    cost = held.cost if message.cost is None else message.cost
    guessed = Amount(0, held.cost) if message.cost is None else Amount()
    return replace(
        budget,
        spent=budget.spent + Amount(tokens(message.usage), cost),
        held=budget.held - held,
        estimated=budget.estimated + guessed,
    )


def _lost(budget: Budget, held: Amount) -> Budget:
    return replace(budget, spent=budget.spent + held, held=budget.held - held, estimated=budget.estimated + held)
