"""Values and errors as text: one documented form for everything that a handler may give back."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from perdure import Image, ToolContext
from perdure.actors.results import PART, RESULT_MAX, error_text, keep_all, plain_error, recorded
from perdure.actors.values import DEPTH_MAX, ITSELF, TOO_DEEP, NoJsonForm, valid_text
from perdure.store.events import canonical


def result_text(value: Any) -> str:
    text, blobs = recorded(value)
    assert not blobs
    return text


class Colour(Enum):
    RED = "red"


class Suit(IntEnum):
    HEARTS = 1


class Person(BaseModel):
    name: str
    age: float


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
        (b"\xff\x00", '{"base64":"/wA="}'),
        (datetime(2024, 1, 2, 3), '"2024-01-02T03:00:00"'),
        (Decimal("0.10"), '"0.10"'),
        (9007199254740993, "9007199254740993"),
        ({(1, "a"): 1, None: 2, 3: 4, True: 5}, '{"3":4,"[1,\\"a\\"]":1,"null":2,"true":5}'),
        (deque([1]), "[1]"),
        (Suit.HEARTS, "1"),
        ("lone \ud800 and \udc00", '"lone \\\\ud800 and \\\\udc00"'),
        ({"\ud800": ["\udfff"]}, '{"\\\\ud800":["\\\\udfff"]}'),
        (Person(name="\ud800", age=float("nan")), '{"age":"NaN","name":"\\\\ud800"}'),
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
    circle: list[Any] = [1]
    circle.append({"me": circle, "twice": [2, 2]})
    return circle


def deep(levels: int) -> Any:
    nested: Any = "the bottom"
    for _ in range(levels):
        nested = {"in": [nested]}
    return nested


@dataclass
class Node:
    inside: Any


def test_what_contains_itself_is_noted_where_it_does() -> None:
    assert json.loads(result_text(cycle())) == [1, {"me": ITSELF, "twice": [2, 2]}]
    shared = ["x"]
    assert json.loads(result_text([shared, shared])) == [["x"], ["x"]], "what is in it twice does not contain itself"
    node = Node([])
    node.inside.append(node)
    with pytest.raises(NoJsonForm, match="Node"):  # no place for a note in a value of a type
        result_text(node)


@pytest.mark.parametrize("levels", [200, 20_000])
def test_what_is_nested_too_deep_is_noted_there(levels: int) -> None:
    text = result_text(deep(levels))
    assert TOO_DEEP in text and text.count("[") == DEPTH_MAX // 2 + 1
    assert result_text(deep(40)) == canonical(deep(40))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (threading.Lock(), "lock"),
        ([threading.Lock()], "lock"),
        ({"k": {"in": object()}}, "object"),
        (iter([1]), "list_iterator"),
        ({"k": [map(int, "12")]}, "map"),
        (io.StringIO("a line"), "StringIO"),
        (lambda: 1, "function"),
        ([10**5000], "list"),
        ({(1, 2): 1, "[1,2]": 2}, "two of its keys"),
    ],
)
def test_a_value_without_a_form_is_an_error_that_names_its_type(value: Any, name: str) -> None:
    with pytest.raises(NoJsonForm, match=name):
        result_text(value)


def test_sets_have_one_order() -> None:
    words = [f"w{number}" for number in range(50)]
    assert result_text(set(words)) == result_text(frozenset(reversed(words))) == canonical(sorted(words))


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (numpy.int64(2**62 + 1), 2**62 + 1),
        (numpy.float64("0.1"), 0.1),
        (numpy.float32("nan"), "NaN"),
        (numpy.bool_(True), True),
        (numpy.str_("é"), "é"),
        (numpy.datetime64("2024-01-02"), "2024-01-02"),
        (numpy.datetime64("2024-01-02T03:04:05.123456789"), "2024-01-02T03:04:05.123456789"),
        (numpy.array(["2024-01-02T03", "NaT"], "datetime64[s]"), ["2024-01-02T03:00:00", "NaT"]),
        (numpy.array([[1, 2]]), [[1, 2]]),
        ({"deep": [numpy.uint8(3)]}, {"deep": [3]}),
    ],
)
def test_numpys_values_are_what_they_hold(value: Any, form: Any) -> None:
    assert json.loads(result_text(value)) == form


# -- what is too large --------------------------------------------------------------------------------------


def kept(blobs: tuple[Any, ...]) -> list[bytes]:
    """The blobs as they are kept, part by part, by digest."""
    parts: dict[str, list[bytes]] = {}

    def keep(digest: str, part: int, data: bytes) -> None:
        assert len(data) <= PART and part == len(parts.setdefault(digest, []))
        parts[digest].append(data)

    keep_all(blobs, keep)
    found = {digest: b"".join(data) for digest, data in parts.items()}
    assert all(hashlib.sha256(data).hexdigest() == digest for digest, data in found.items())
    return list(found.values())


def test_a_text_that_is_too_long_shows_its_beginning_and_end_and_is_kept_whole() -> None:
    text = "begin" + "é\U0001f600" * 1_500_000 + "end"
    content, blobs = recorded(text)
    shown = json.loads(content)
    assert len(shown) < RESULT_MAX + 300 and shown.startswith("beginé") and shown.endswith("end")
    assert f"[{len(text) - RESULT_MAX} of {len(text)} characters are left out here" in shown
    assert blobs[0].digest in shown and kept(blobs) == [text.encode()]
    assert recorded("x" * (RESULT_MAX - 2)) == (f'"{"x" * (RESULT_MAX - 2)}"', ())


def test_what_a_child_has_written_is_kept_whole_however_much_it_is() -> None:
    context = ToolContext("r", 0, "t0c0", 1, "key", 0.0)
    said = context.run_process(["sh", "-c", "yes 'task-1: a line of a log' | head -c 200000000"]).stdout
    began = time.monotonic()
    content, (blob,) = recorded(said)
    assert len(content) < RESULT_MAX + 5_000 and len(blob.data) == len(said) == 200_000_000
    assert time.monotonic() - began < 30, "it would not be done within the time of an attempt"


def test_another_value_that_is_too_long_is_shown_as_its_json() -> None:
    value = {"rows": [{"n": number} for number in range(10_000)]}
    content, blobs = recorded(value)
    assert json.loads(content).startswith('{"rows":[{"n":0},') and json.loads(kept(blobs)[0]) == value


def test_images_are_shown_as_long_as_there_is_room_and_else_kept() -> None:
    small, large = Image(b"\x89PNG" * 10, "image/png"), Image(b"\x89PNG" * 3_000_000, "image/png")
    content, blobs = recorded(["see", small, large, small])
    said, first, note, last = json.loads(content)
    assert (said, first, blobs[0].digest in note) == ("see", last, True)
    assert first == {"type": "image", "media_type": "image/png", "data": base64.b64encode(small.data).decode()}
    assert note.startswith("[image/png of 12000000 bytes, not shown; it is the blob ") and kept(blobs) == [large.data]
    content, blobs = recorded([small, "x" * 100_000])
    assert kept(blobs)[0] == small.data and "data" not in json.loads(content)[:200]


def test_the_message_of_an_error_is_cut() -> None:
    said = json.loads(error_text(ValueError("a" + "x" * 2_000_000 + "z")))
    assert len(said["message"]) < 17_000 and said["message"].endswith("z")


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
