"""JSON whose numbers keep every digit: a decimal is not rounded through a float on its way from a model to a tool."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel

DEPTH_MAX: Final = 200
"""Levels of a value that are taken: not more than pydantic's, nor than what the log and the providers' clients bear."""
_M = TypeVar("_M", bound=BaseModel)
TOO_DEEP: Final = "it is nested too deeply"
_DECIMAL: Final = re.compile(r"[0-9][.eE]")


class Exact(float):
    """A number that was written as a decimal. A float to everybody, but its text is as it was written: pydantic makes
    a Decimal of that."""

    __slots__ = ("written",)
    written: str

    def __new__(cls, written: str) -> Exact:
        number = super().__new__(cls, written)
        if math.isinf(number):
            raise ValueError(f"{written[:40]} is too large a number")
        number.written = written
        return number

    def __str__(self) -> str:
        return self.written


def parse(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what is not strict JSON, for a number that is too large and for
    nesting that is too deep."""
    try:
        value = json.loads(text, parse_float=Exact, parse_constant=_refused)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if text.count("[") + text.count("{") > DEPTH_MAX and _levels(value) > DEPTH_MAX:
        raise ValueError(TOO_DEEP)
    return value


def _levels(value: Any) -> int:
    """How many containers lie in each other at most."""
    levels, inside = 0, [value]
    while inside := [each for each in inside if isinstance(each, (dict, list))]:
        levels += 1
        inside = [item for each in inside for item in (each.values() if isinstance(each, dict) else each)]
    return levels


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def written(value: Any) -> str:
    """A parsed value as canonical JSON text, as `canonical`, its numbers as they were. Raises ValueError for nesting
    that is too deep."""
    try:
        return _written(value)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _written(value: Any) -> str:
    if isinstance(value, Exact):
        return value.written
    if isinstance(value, dict):
        return "{" + ",".join(f"{_plain(key)}:{_written(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return _plain(value)


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def validated(model: type[_M], text: str) -> _M:
    """What a model makes of a JSON text, its decimals exact. Raises pydantic.ValidationError, and ValueError."""
    rounded = False

    def number(digits: str) -> float:
        nonlocal rounded
        rounded = rounded or str(float(digits)) != digits
        return Exact(digits)

    if _DECIMAL.search(text):
        value = json.loads(text, parse_float=number)
        if rounded:
            return model.model_validate(value)
    return model.model_validate_json(text)
