"""Budgets in tokens and dollars, of one run and of a group of runs that share one. Pure arithmetic.

A run's own budget. Tokens of all four kinds count alike. A model call is not started when the budget is used up, or
when the prompt that is to be expected leaves no room for a single token of answer; otherwise the answer is cut to what
remains. What a prompt will take is not known before, so `expected_next` reads it off the call before: nothing of a
conversation goes away, and what was cached stays cached. A run passes its cap by at most what that falls short.

A shared budget. `Totals` is the row of a group, `Entry` the row of one model call in it, keyed by run, turn and epoch.
Whoever calls a model reserves what the call may cost (`reservation`, then `reserve`) and settles it (`settle`) with
what it did cost; both rows change in one transaction. Each step may be sent again. The reservation of a call that died
with its process is charged as it stands and marked as estimated (`lose`); should its answer come after all, that
counts instead. A cap is passed by no more than what settled calls exceed their reservations.

For the machine: `next_step` asks `guards.plan_turn`, which asks `breach` and `output_room` here with `State.usage`,
`State.cost` and the newest message's usage. The shared budget belongs to the journal and the store: the owner of a run
reserves before a model call, in the append of turn_started, and settles in the append of the message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from ..store.events import Usage
from .prices import EXACT, ZERO, PriceList, cost, in_dollars, output_for, whole_input


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens and dollars."""

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


def tokens(usage: Usage) -> int:
    """All four kinds together."""
    return whole_input(usage) + usage.output_tokens


def amount(usage: Usage, prices: PriceList | None) -> Amount:
    """What one model call took. Without prices it costs nothing: a cap in dollars needs them."""
    return Amount(tokens(usage), cost(prices, usage) if prices else ZERO)


def expected_next(last: Usage | None) -> Usage:
    """What the prompt after this call will take at least. Nothing is known of the first one."""
    if last is None:
        return Usage()
    return Usage(
        input_tokens=last.input_tokens + last.output_tokens,
        cache_read_input_tokens=last.cache_creation_input_tokens + last.cache_read_input_tokens,
    )


# -- one run ----------------------------------------------------------------------------------------------


def output_room(cap: Cap, used: Amount, prompt: Usage, prices: PriceList | None) -> int | None:
    """How many tokens of answer the budget has room for after this prompt; None: any number. Never negative."""
    if cap.cost is not None and prices is None:
        raise ValueError("a cap in dollars needs prices")
    after = used + amount(prompt, prices)
    rooms = []
    if cap.tokens is not None:
        rooms.append(max(0, cap.tokens - after.tokens))
    if cap.cost is not None and prices is not None:
        left = EXACT.subtract(cap.cost, after.cost)
        paid = output_for(prices, whole_input(prompt), left) if left >= 0 else 0
        rooms += [] if paid is None else [paid]
    return min(rooms, default=None)


def breach(cap: Cap, used: Amount, prompt: Usage, prices: PriceList | None) -> str:
    """Why the next model call is not started; empty where it may be."""
    if cap.tokens is not None and used.tokens >= cap.tokens:
        return f"{used.tokens} of {cap.tokens} tokens are used; raise max_tokens and resume"
    if cap.cost is not None and used.cost >= cap.cost:
        return f"{in_dollars(used.cost)} of {in_dollars(cap.cost)} are spent; raise max_cost and resume"
    if output_room(cap, used, prompt, prices) == 0:
        left = []
        if cap.tokens is not None:
            left.append(f"{cap.tokens - used.tokens} tokens")
        if cap.cost is not None:
            left.append(in_dollars(EXACT.subtract(cap.cost, used.cost)))
        return f"the next prompt of about {whole_input(prompt)} tokens does not fit in the {' and '.join(left)} left"
    return ""


# -- many runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Totals:
    """Where a shared budget stands. `estimated` is the part of `spent` that was charged without an answer."""

    spent: Amount = Amount()
    held: Amount = Amount()
    estimated: Amount = Amount()

    @property
    def taken(self) -> Amount:
        return self.spent + self.held


@dataclass(frozen=True, slots=True)
class Entry:
    """One model call in a shared budget: what is reserved for it, and what it was charged once that is known."""

    reserved: Amount
    charged: Amount | None = None
    estimated: bool = False


Refusal = Literal["wait", "exhausted"]
"""`wait`: others may settle for less than they hold. `exhausted`: what is spent leaves no room, whatever they do."""


def reservation(
    cap: Cap, totals: Totals, prompt: Usage, most_output: int, prices: PriceList | None
) -> tuple[Amount, int] | Refusal:
    """What to reserve for a model call, and the limit of its output: `most_output`, or less where less is left."""
    room = output_room(cap, totals.taken, prompt, prices)
    if room == 0:
        return "exhausted" if output_room(cap, totals.spent, prompt, prices) == 0 else "wait"
    output = most_output if room is None else min(most_output, room)
    return amount(prompt.model_copy(update={"output_tokens": output}), prices), output


def reserve(cap: Cap, totals: Totals, entry: Entry | None, wanted: Amount) -> tuple[Totals, Entry] | Refusal:
    """Hold so much for a call, all or nothing. A call that holds already keeps what it has. Raises ValueError for one
    that was charged: its reservation is used up."""
    if entry is not None:
        if entry.charged is not None:
            raise ValueError("this call was charged already: a reservation is used once")
        return totals, entry
    if not cap.allows(totals.taken + wanted):
        return "wait" if cap.allows(totals.spent + wanted) else "exhausted"
    return replace(totals, held=totals.held + wanted), Entry(wanted)


def settle(totals: Totals, entry: Entry, actual: Amount) -> tuple[Totals, Entry]:
    """Charge a call with what it took, in the place of its reservation or of its estimate; the first answer counts. A
    call that was not sent after all took nothing."""
    if entry.charged is not None and not entry.estimated:
        return totals, entry
    if entry.charged is None:
        totals = replace(totals, held=totals.held - entry.reserved)
    else:
        totals = replace(totals, spent=totals.spent - entry.charged, estimated=totals.estimated - entry.charged)
    return replace(totals, spent=totals.spent + actual), Entry(entry.reserved, actual)


def lose(totals: Totals, entry: Entry) -> tuple[Totals, Entry]:
    """Charge a call whose process died before its answer with its whole reservation, as an estimate."""
    if entry.charged is not None:
        return totals, entry
    reserved = entry.reserved
    totals = Totals(totals.spent + reserved, totals.held - reserved, totals.estimated + reserved)
    return totals, Entry(reserved, reserved, estimated=True)
