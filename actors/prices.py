"""What a model's tokens cost, in US dollars, exact: Decimal throughout, and nothing is ever rounded.

`price_list` looks the prices of a model up once, when a run is launched. The list is plain JSON, is kept in the run's
configuration, and prices the run from then on: after a respawn, on another machine, or with a newer price table the
same tokens cost the same to the last digit. Prices that depend on the date or the time of day are those of the launch.

`input_tokens` of a usage are the uncached ones; the four kinds do not overlap, and each is priced on its own. A table
without a price for cached tokens charges them as input. Some models are dearer for long prompts: then the whole call
is charged at the rate of its prompt, so a sum over calls is not the price of the summed usage. Price each call.

For the machine: `run_created.config["prices"]` holds `PriceList.model_dump(mode="json")`, or null where the model has
no known prices; `State.cost` is the sum of `cost(prices, message.usage)` over the assistant messages, added in
`evolve`; a launch with `max_cost` and without prices is refused with the UsageError of `price_list`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..store.budgets import EXACT, ZERO
from ..store.errors import UsageError
from ..store.events import Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelPrice, TieredPrices

MILLION: Final = 1_000_000

Price = Annotated[Decimal, Field(ge=0, max_digits=24, decimal_places=12)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tier(_Model):
    """The price where the call's whole input is more than `above` tokens."""

    above: int = Field(ge=0)
    price: Price


class Rate(_Model):
    """Dollars per million tokens of one kind."""

    base: Price
    tiers: tuple[Tier, ...] = ()

    @model_validator(mode="after")
    def _tiers_ascend(self) -> Rate:
        starts = [tier.above for tier in self.tiers]
        if starts != sorted(set(starts)):
            raise ValueError("the tiers of a rate are not in ascending order")
        return self

    def of(self, input_tokens: int) -> Decimal:
        """The rate for a call whose whole input, cached or not, is this long."""
        reached = [tier.price for tier in self.tiers if input_tokens > tier.above]
        return reached[-1] if reached else self.base


class PriceList(_Model):
    """The prices of one model. `model` is the entry of the price table that was found."""

    model: str
    input: Rate
    output: Rate
    cache_creation_input: Rate
    cache_read_input: Rate
    thousand_requests: Rate = Rate(base=ZERO)


class Parts(NamedTuple):
    """What one model call costs, kind by kind."""

    input: Decimal
    output: Decimal
    cache_creation_input: Decimal
    cache_read_input: Decimal
    request: Decimal = ZERO


# -- arithmetic -------------------------------------------------------------------------------------------


def total(amounts: Iterable[Decimal]) -> Decimal:
    """The exact sum."""
    return reduce(EXACT.add, amounts, ZERO)


def whole_input(usage: Usage) -> int:
    """Tokens of a call's prompt, cached or not."""
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def parts(prices: PriceList, usage: Usage) -> Parts:
    """What one model call costs, each kind of tokens on its own."""
    length = whole_input(usage)
    return Parts(
        _priced(prices.input.of(length), usage.input_tokens),
        _priced(prices.output.of(length), usage.output_tokens),
        _priced(prices.cache_creation_input.of(length), usage.cache_creation_input_tokens),
        _priced(prices.cache_read_input.of(length), usage.cache_read_input_tokens),
        EXACT.scaleb(prices.thousand_requests.of(length), -3),
    )


def cost(prices: PriceList, usage: Usage) -> Decimal:
    """What one model call costs."""
    return total(parts(prices, usage))


def output_for(prices: PriceList, length: int, dollars: Decimal) -> int | None:
    """How many output tokens that much pays for after a prompt of `length` tokens; None: any number, they are free."""
    rate = prices.output.of(length)
    if not rate:
        return None
    return max(0, int(EXACT.divide_int(EXACT.multiply(dollars, Decimal(MILLION)), rate)))


def in_dollars(amount: Decimal) -> str:
    """An amount as text: every digit of it, no exponent, no trailing zeros."""
    return f"${amount.normalize(EXACT):f}"


def _priced(rate: Decimal, tokens: int) -> Decimal:
    return EXACT.scaleb(EXACT.multiply(rate, Decimal(tokens)), -6)


# -- the table --------------------------------------------------------------------------------------------


def price_list(model: str, at: datetime) -> PriceList:
    """The prices of a model, `provider:model`, at a time. Reads the table that comes with genai-prices, no network.

    Raises UsageError naming the model where the table does not know it, or has no price for its input or output: such
    a model is never free.
    """
    provider, _, name = model.partition(":")
    if not provider or not name:
        raise UsageError(_unknown(model, "it is not of the form provider:model"))
    from genai_prices import Usage as Counted  # 0.1 s and 10 MB, needed once in a run's life
    from genai_prices import calc_price

    try:
        found = calc_price(Counted(), name, provider_id=provider, genai_request_timestamp=at)
    except LookupError as error:
        raise UsageError(_unknown(model, str(error))) from error
    return _read(model, f"{found.provider.id}:{found.model.id}", found.model_price)


def _read(model: str, entry: str, price: ModelPrice) -> PriceList:
    if price.input_mtok is None or price.output_mtok is None:
        missing = "input" if price.input_mtok is None else "output"
        raise UsageError(_unknown(model, f"its entry {entry} has no price of {missing} tokens"))
    uncached = _rate(price.input_mtok)
    return PriceList(
        model=entry,
        input=uncached,
        output=_rate(price.output_mtok),
        cache_creation_input=_rate(price.cache_write_mtok) if price.cache_write_mtok is not None else uncached,
        cache_read_input=_rate(price.cache_read_mtok) if price.cache_read_mtok is not None else uncached,
        thousand_requests=_rate(price.requests_kcount or ZERO),
    )


def _rate(price: Decimal | TieredPrices) -> Rate:
    if isinstance(price, Decimal):
        return Rate(base=price)
    return Rate(base=price.base, tiers=tuple(Tier(above=tier.start, price=tier.price) for tier in price.tiers))


def _unknown(model: str, why: str) -> str:
    return (
        f"the prices of model {model!r} are not known, so that a cost budget cannot be kept: {why}; "
        "name a model with known prices in price_as, as provider:model"
    )
