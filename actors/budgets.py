"""Budgets in tokens and dollars, of one run and of a group of runs that share one. Pure arithmetic.

A run's own budget. Tokens of all four kinds count alike. A model call is not started when the budget is used up, or
when the prompt that is to be expected leaves no room for a single token of answer; otherwise the answer is cut to what
remains. What a prompt will take is not known before, so `expected_next` reads it off the call before: nothing of a
conversation goes away, and what was cached stays cached. A run passes its cap by at most what that falls short.

A shared budget. The owner of a run reserves what a model call can take at most (`share`) before it makes it, and the
message settles it; `store.budgets` has the rules. As long as a model keeps to the limit of its output, no call takes
more than its share, and the cap is never passed. Where a share does not fit, its owner waits for what others hold; it
is content with a shorter answer only when nobody holds anything (`smaller_share`).

For the machine: `next_step` asks `guards.plan_turn`, which asks `breach` and `output_room` here with `State.usage`,
`State.cost` and the newest message's usage.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final, NamedTuple

from ..store.budgets import EXACT, ZERO, Amount, Budget, Cap, tokens
from ..store.events import Usage
from .prices import PriceList, cost, in_dollars, output_for, whole_input


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

ANSWER_TOKENS: Final = 8_192
"""The longest answer in a shared budget, where its model has no limit of its own: so much is reserved for each call."""
HIDDEN_TOKENS: Final = 600
"""What a provider may add to a prompt that nobody sees here, to explain the tools for one."""


class Share(NamedTuple):
    """What a model call may take of a shared budget; its prompt takes at most `prompt` tokens."""

    prompt: int
    output: int
    cost: Decimal | None


def prompt_at_most(last: Usage | None, new: int, whole: int) -> int:
    """The most tokens that a prompt can have, of `whole` bytes, of which `new` came after the call before, which took
    `last`. A token is a byte at least."""
    known = last is not None and whole_input(last) > 0
    return HIDDEN_TOKENS + (min(whole, tokens(last) + new) if last and known else whole)


def share(prompt: int, output: int, prices: PriceList | None) -> Share:
    """What a call takes at most, each token of its prompt being of the dearest kind."""
    if prices is None:
        return Share(prompt, output, None)
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return Share(prompt, output, max(cost(prices, Usage(output_tokens=output, **{kind: prompt})) for kind in kinds))


def smaller_share(budget: Budget, wanted: Share, prices: PriceList | None) -> Share | str | None:
    """What to do where a budget, which stands so without the call, has no room for a share: reserve a smaller one;
    None: wait for what others hold of it, of which they may leave some; a text: why there is nothing to wait for."""
    cap, spent = budget.cap, budget.spent
    if cap.cost is not None and prices is None:
        return f"budget {budget.name!r} has a cap in dollars, and the prices of the run's model are not known"
    least = share(wanted.prompt, 0, prices)
    rooms = [wanted.output]
    if cap.tokens is not None:
        rooms.append(cap.tokens - spent.tokens - wanted.prompt)
    if cap.cost is not None and prices is not None and least.cost is not None:
        left = EXACT.subtract(cap.cost, EXACT.add(spent.cost, least.cost))
        paid = output_for(prices, wanted.prompt, left) if left >= 0 else 0
        rooms += [] if paid is None else [paid]
    if min(rooms) <= 0:
        return (
            f"budget {budget.name!r}: {standing(budget)}; the next call takes up to {wanted.prompt} tokens before its "
            f"answer. Raise the cap with `perdure budget` and resume"
        )
    return None if budget.held.tokens else share(wanted.prompt, min(rooms), prices)


def standing(budget: Budget) -> str:
    """Where a budget stands, for people."""
    cap, spent, parts = budget.cap, budget.spent, []
    if cap.cost is not None or spent.cost:
        parts.append(f"{in_dollars(spent.cost)} of {'any' if cap.cost is None else in_dollars(cap.cost)} spent")
    if cap.tokens is not None or not parts:
        parts.append(f"{spent.tokens} of {'any' if cap.tokens is None else cap.tokens} tokens used")
    return " and ".join(parts)
