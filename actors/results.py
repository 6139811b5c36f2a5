"""What a handler returned or raised, as JSON text for the log.

Values go through pydantic's JSON mode; NaN and infinities become the strings "NaN", "Infinity", "-Infinity". A type
that has no JSON form is an error that names it, never its repr; so is an iterator, such as an open file. Exceptions
are recorded as type, message and traceback text.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from ..store.events import canonical


class NoJsonForm(TypeError):
    """A handler returned a value whose type has no JSON form."""


def valid_text(text: str) -> str:
    """The text with lone surrogates written as escapes, so that it can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def result_text(value: Any) -> str:
    """The value as canonical JSON text. Raises NoJsonForm."""
    try:
        _refuse_iterators(value)
        return canonical(json.loads(to_json(value, inf_nan_mode="strings")))
    except (PydanticSerializationError, RecursionError, UnicodeError, ValueError) as error:
        raise NoJsonForm(f"a {type(value).__name__} cannot be recorded as JSON: {valid_text(str(error))}") from error


def _refuse_iterators(value: Any) -> None:
    """pydantic reads iterators to their end: an open file or a cursor would be recorded as its lines."""
    if isinstance(value, Iterator):
        raise ValueError(f"a {type(value).__name__} is an iterator, not a value")
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset)):
        return
    for item in value:
        _refuse_iterators(item)


def error_text(error: BaseException) -> str:
    """An exception as canonical JSON text."""
    lines = traceback.format_exception(error)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - foreign code, which may fail even here
        message = "its text cannot be had: __str__ raises"
    return canonical(
        {
            "error": type(error).__name__,
            "message": valid_text(message),
            "traceback": valid_text("".join(lines))[-4000:],
        }
    )


def plain_error(kind: str, message: str) -> str:
    """An error of the runtime's own as canonical JSON text, in the form of `error_text`."""
    return canonical({"error": kind, "message": valid_text(message)})
