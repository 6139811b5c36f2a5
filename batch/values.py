"""JSON that comes from outside, made fit for the log: valid Unicode, finite numbers, a bounded depth."""

from __future__ import annotations

import json
import re
from typing import Any, Final

DEPTH_MAX: Final = 100
"""Nesting of lists and objects. The log's codec reads twice as much."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def parse(text: str) -> Any:
    """The value of a JSON text; lone surrogates in it become U+FFFD. Raises ValueError saying what is wrong."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep") from error
    if text.count("[") + text.count("{") > DEPTH_MAX and _too_deep(value):
        raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep")
    return plain(value) if "\\u" in text or _SURROGATE.search(text) else value


def plain(value: Any) -> Any:
    """A JSON value with every lone surrogate, which no UTF-8 text can hold, replaced by U+FFFD."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a number")
    return number


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [item for part in level for item in _parts(part)]
        if not level:
            return False
    return True


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
