"""Prices: every kind of token at its own price, once, exact, and never free for want of a price."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, time
from decimal import Decimal, localcontext
from typing import Any

import pytest
from genai_prices import Usage as Counted
from genai_prices import calc_price
from genai_prices.data_snapshot import DataSnapshot, set_custom_snapshot
from genai_prices.types import (
    ClauseEquals,
    ConditionalPrice,
    ModelInfo,
    ModelPrice,
    Provider,
    TimeOfDateConstraint,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.actors.prices import PriceList, Rate, Tier, cost, in_dollars, output_for, parts, price_list, total
from perdure.store.errors import UsageError
from perdure.store.events import Usage

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
MODELS = (
    "anthropic:claude-sonnet-4-20250514",  # a price for each kind
    "openai:gpt-4o",  # none for cache writes
    "openai:gpt-4",  # none for the cache at all
    "anthropic:claude-sonnet-4-5",  # dearer for long prompts
    "perplexity:sonar",  # a fee per request
)
FIRST = Usage(input_tokens=3, cache_creation_input_tokens=12_304, cache_read_input_tokens=0, output_tokens=550)
NEXT = Usage(input_tokens=4, cache_creation_input_tokens=0, cache_read_input_tokens=12_304, output_tokens=550)
TABLES = {model: price_list(model, AT) for model in MODELS}

counts = st.integers(0, 400_000)
usages = st.builds(
    Usage,
    input_tokens=counts,
    output_tokens=counts,
    cache_creation_input_tokens=counts,
    cache_read_input_tokens=counts,
)


def flat(entry: str = "", **prices: str) -> PriceList:
    return PriceList(model=entry, **{kind: Rate(base=Decimal(price)) for kind, price in prices.items()})


CACHING = flat(input="3", output="15", cache_creation_input="3.75", cache_read_input="0.3")


def test_cached_tokens_are_charged_once_at_their_own_price() -> None:
    assert parts(CACHING, FIRST)[:4] == tuple(map(Decimal, ("0.000009", "0.00825", "0.04614", "0")))
    assert parts(CACHING, NEXT)[:4] == tuple(map(Decimal, ("0.000012", "0.00825", "0", "0.0036912")))
    assert in_dollars(total([cost(CACHING, FIRST), cost(CACHING, NEXT)])) == "$0.0663522"


def test_a_table_without_cache_prices_charges_cached_tokens_as_input() -> None:
    table = TABLES["openai:gpt-4"]
    assert table.cache_creation_input == table.cache_read_input == table.input == Rate(base=Decimal(30))
    assert cost(table, FIRST) == Decimal("12307") * 30 / 1_000_000 + Decimal("0.033")


@settings(max_examples=60, deadline=None)
@given(model=st.sampled_from(MODELS), usage=usages)
def test_a_call_costs_what_genai_prices_says(model: str, usage: Usage) -> None:
    cached = usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    counted = Counted(
        input_tokens=usage.input_tokens + cached,
        cache_write_tokens=usage.cache_creation_input_tokens,
        cache_read_tokens=usage.cache_read_input_tokens,
        output_tokens=usage.output_tokens,
    )
    provider, _, name = model.partition(":")
    theirs = calc_price(counted, name, provider_id=provider, genai_request_timestamp=AT)
    assert cost(TABLES[model], usage) == theirs.total_price


@settings(max_examples=60, deadline=None)
@given(model=st.sampled_from(MODELS), calls=st.lists(usages, max_size=8), precision=st.integers(1, 28))
def test_the_parts_add_up_to_the_total_in_any_order_and_whatever_context_the_user_has_set(
    model: str, calls: list[Usage], precision: int
) -> None:
    table = TABLES[model]
    with localcontext() as context:
        context.prec = precision
        summed = total(cost(table, usage) for usage in calls)
        backwards = total(part for usage in reversed(calls) for part in reversed(parts(table, usage)))
    assert summed == backwards == sum((cost(table, usage) for usage in calls), Decimal(0))


@pytest.mark.parametrize("model", MODELS)
def test_a_price_list_is_the_same_after_a_trip_through_the_store(model: str) -> None:
    table = TABLES[model]
    assert PriceList.model_validate_json(table.model_dump_json()) == table
    assert PriceList.model_validate(table.model_dump(mode="json")) == table


def test_a_long_prompt_is_charged_at_its_tier_with_its_cached_part_counted() -> None:
    table = flat(input="1", output="10", cache_creation_input="1", cache_read_input="0.1").model_copy(
        update={"output": Rate(base=Decimal(10), tiers=(Tier(above=100, price=Decimal(20)),))}
    )
    at_edge = Usage(input_tokens=40, cache_read_input_tokens=60, output_tokens=1_000_000)
    assert parts(table, at_edge).output == 10
    assert parts(table, at_edge.model_copy(update={"cache_creation_input_tokens": 1})).output == 20
    with pytest.raises(ValueError, match="ascending"):
        Rate(base=Decimal(1), tiers=(Tier(above=5, price=Decimal(1)), Tier(above=5, price=Decimal(2))))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("script:demo.jsonl", "provider"),
        ("anthropic:claude-nonexistent", "claude-nonexistent"),
        ("gpt-4o", "provider:model"),
        (":gpt-4o", "provider:model"),
        ("openai:", "provider:model"),
    ],
)
def test_a_model_without_prices_is_named_and_not_free(model: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        price_list(model, AT)
    assert repr(model) in str(refused.value) and why in str(refused.value)


@pytest.mark.parametrize("provider", ["google-gla", "openai-responses", "bedrock", "gateway/anthropic"])
def test_the_names_that_model_strings_give_to_providers_are_known(provider: str) -> None:
    names = {
        "google-gla": "gemini-2.5-flash",
        "openai-responses": "gpt-4o",
        "bedrock": "us.anthropic.claude-sonnet-4-20250514-v1:0",
        "gateway/anthropic": "claude-sonnet-4-5",
    }
    assert price_list(f"{provider}:{names[provider]}", AT).output.base > 0


@pytest.fixture
def own_table() -> Iterator[None]:
    """A price table of the test's own, so that no new version of the package changes what it says."""
    dearer_by_day = [
        ConditionalPrice(prices=ModelPrice(input_mtok=Decimal(1), output_mtok=Decimal(2))),
        ConditionalPrice(
            TimeOfDateConstraint(time(8, tzinfo=UTC), time(18, tzinfo=UTC)),
            prices=ModelPrice(input_mtok=Decimal(3), output_mtok=Decimal(4)),
        ),
    ]
    entries: dict[str, Any] = {
        "by-day": dearer_by_day,
        "free": ModelPrice(),
        "embedding": ModelPrice(input_mtok=Decimal(1)),
        "images": ModelPrice(output_mtok=Decimal(1)),
    }
    models = [ModelInfo(id=name, match=ClauseEquals(name), prices=prices) for name, prices in entries.items()]
    provider = Provider(id="own", name="Own", api_pattern="own", models=models)
    set_custom_snapshot(DataSnapshot(providers=[provider], from_auto_update=False))
    yield
    set_custom_snapshot(None)


@pytest.mark.usefixtures("own_table")
@pytest.mark.parametrize(("name", "kind"), [("free", "input"), ("embedding", "output"), ("images", "input")])
def test_an_entry_without_a_price_of_input_or_output_is_not_free_either(name: str, kind: str) -> None:
    with pytest.raises(UsageError, match=f"'own:{name}'.* no price of {kind} tokens"):
        price_list(f"own:{name}", AT)


@pytest.mark.usefixtures("own_table")
def test_a_price_that_changes_in_time_is_that_of_the_time_asked_for() -> None:
    assert price_list("own:by-day", AT).input.base == 3
    assert price_list("own:by-day", AT.replace(hour=20)).input.base == 1


@given(dollars=st.decimals(0, 100, places=9), length=st.integers(0, 300_000))
@settings(max_examples=60, deadline=None)
def test_output_that_is_paid_for_costs_no_more_and_one_token_more_would(dollars: Decimal, length: int) -> None:
    table = TABLES["anthropic:claude-sonnet-4-5"]
    paid = output_for(table, length, dollars)
    assert paid is not None
    rate = table.output.of(length)
    assert rate * paid <= dollars * 1_000_000 < rate * (paid + 1)


def test_free_output_has_no_bound() -> None:
    assert (
        output_for(flat(input="1", output="0", cache_creation_input="1", cache_read_input="1"), 0, Decimal(0)) is None
    )


def test_the_table_is_loaded_only_when_it_is_asked() -> None:
    code = "import perdure.actors.guards, sys; print('genai_prices' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout
    assert shown.strip() == "False"
