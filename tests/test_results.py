"""Values and errors as text: one documented form for everything that a handler may give back."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from perdure.actors.results import NoJsonForm, error_text, plain_error, result_text, valid_text


class Colour(Enum):
    RED = "red"


class Receipt(BaseModel):
    amount: Decimal
    at: date


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ("é", '"é"'),
        (float("nan"), '"NaN"'),
        ([float("inf"), -float("inf")], '["Infinity","-Infinity"]'),
        (Decimal("1.10"), '"1.10"'),
        (datetime(2024, 1, 2, tzinfo=UTC), '"2024-01-02T00:00:00Z"'),
        (timedelta(seconds=90), '"PT1M30S"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Colour.RED, '"red"'),
        (b"bytes", '"bytes"'),
        ({3}, "[3]"),
        ((1, 2), "[1,2]"),
        (Receipt(amount=Decimal("2"), at=date(2024, 1, 2)), '{"amount":"2","at":"2024-01-02"}'),
        (Point(1), '{"x":1}'),
        (Path("/tmp"), '"/tmp"'),
        ({"b": 1, "a": 2}, '{"a":2,"b":1}'),
        ("nul \0 byte", '"nul \\u0000 byte"'),
    ],
)
def test_a_value_has_one_form(value: Any, text: str) -> None:
    assert result_text(value) == text


def cycle() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (threading.Lock(), "lock"),
        ([threading.Lock()], "lock"),
        ({"k": {"in": object()}}, "object"),
        (iter([1]), "list_iterator"),
        ({"k": [map(int, "12")]}, "map"),
        (b"\xff", "bytes"),
        ("\ud800", "str"),
        (cycle(), "list"),
        (deep(), "list"),
    ],
    ids=["lock", "nested lock", "object", "iterator", "nested iterator", "bytes", "surrogate", "cycle", "deep"],
)
def test_a_value_without_a_form_is_an_error_that_names_its_type(value: Any, name: str) -> None:
    with pytest.raises(NoJsonForm, match=name):
        result_text(value)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(values)
def test_every_json_value_comes_back_as_it_was(value: Any) -> None:
    text = result_text(value)
    assert json.loads(text) == value
    assert result_text(json.loads(text)) == text


@given(st.text(st.characters()))
def test_any_text_can_be_encoded_once_it_is_valid(text: str) -> None:
    valid_text(text).encode()
    assert valid_text(valid_text(text)) == valid_text(text)


def test_an_error_is_type_message_and_traceback() -> None:
    try:
        raise ValueError("bad \ud800")
    except ValueError as error:
        said = json.loads(error_text(error))
    assert (said["error"], said["message"]) == ("ValueError", "bad \\ud800")
    assert "test_results.py" in said["traceback"]


def test_a_long_traceback_is_cut_and_an_error_that_cannot_speak_is_still_told() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert json.loads(error_text(Mute()))["error"] == "Mute"
    assert len(json.loads(error_text(ValueError("x" * 10_000)))["traceback"]) <= 4_000
    assert json.loads(plain_error("Kind", "why \udfff")) == {"error": "Kind", "message": "why \\udfff"}
