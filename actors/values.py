"""The one JSON form of whatever a handler gives back.

| value | form |
|---|---|
| texts, numbers, booleans, None | as they are; NaN and infinities as "NaN", "Infinity", "-Infinity" |
| lists, tuples, deques | arrays |
| sets | arrays, sorted by the text of their items |
| dicts, pydantic models, dataclasses | objects; a key that is no text is the JSON text of its own form |
| datetime, date, time, timedelta | ISO 8601 |
| Decimal, UUID, paths, URLs | texts with every digit |
| enums | their values |
| bytes | the text, if they are UTF-8; else {"base64": ...} |
| numpy's scalars and arrays | as what they hold; its dates ISO 8601 with all their digits |
| Image | {"type": "image", "media_type": ..., "data": base64} |

In a text, secrets are masked and a lone surrogate becomes its escape. What contains itself, and what lies deeper than
DEPTH_MAX, is replaced by a note. A type without a rule, and an iterator such as an open file, has no form: never its
repr.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from pydantic_core import PydanticSerializationError, to_jsonable_python

from ..store.events import canonical
from ..store.secrets import masked

DEPTH_MAX: Final = 100
"""Levels of a value that are recorded."""
TOO_DEEP: Final = f"[nested deeper than {DEPTH_MAX} levels: left out]"
ITSELF: Final = "[contains itself: left out]"


class NoJsonForm(TypeError):
    """A handler returned a value whose type has no JSON form."""


@dataclass(frozen=True)
class Image:
    """An image for the model, alone or in a list with texts. `media_type` as in image/png."""

    data: bytes
    media_type: str


def valid_text(text: str) -> str:
    """The text with lone surrogates written as escapes, so that it can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encoded(image: Image) -> dict[str, str]:
    """An image as a block of content."""
    return {"type": "image", "media_type": image.media_type, "data": base64.b64encode(image.data).decode()}


def json_form(value: Any, shown: Callable[[Image], Any] = encoded) -> Any:
    """A value as what JSON has; `shown` is what becomes of an image. Raises NoJsonForm."""
    try:
        return _Walk(shown).form(value, 0)
    except (PydanticSerializationError, RecursionError, UnicodeError, ValueError) as error:
        raise NoJsonForm(f"a {type(value).__name__} cannot be recorded as JSON: {valid_text(str(error))}") from error


class _Walk:
    def __init__(self, shown: Callable[[Image], Any]) -> None:
        self._shown = shown
        self._above: set[int] = set()
        """The containers that the present value is in."""

    def form(self, value: Any, depth: int) -> Any:
        match value:
            case None | bool():
                return value
            case Enum():
                return self.form(value.value, depth)
            case str():
                return masked(valid_text(value))
            case int():
                return int(value)
            case float():
                return float(value) if abs(value) < float("inf") else _odd(value)
            case bytes() | bytearray() | memoryview():
                return _of_bytes(bytes(value))
            case Image():
                return self._shown(value)
            case Mapping() | list() | tuple() | set() | frozenset() | deque():
                return self._inside(value, depth)
        return self._leaf(value, depth)

    def _inside(self, value: Any, depth: int) -> Any:
        if depth >= DEPTH_MAX:
            return TOO_DEEP
        if id(value) in self._above:
            return ITSELF
        self._above.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self._object(value, depth + 1)
            items = [self.form(item, depth + 1) for item in value]
            return sorted(items, key=canonical) if isinstance(value, (set, frozenset)) else items
        finally:
            self._above.discard(id(value))

    def _object(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in value.items():
            form = self.form(key, depth)
            name = form if isinstance(form, str) else canonical(form)
            if name in found:
                raise ValueError(f"two of its keys are {name!r} as text")
            found[name] = self.form(item, depth)
        return found

    def _leaf(self, value: Any, depth: int) -> Any:
        """A value that pydantic knows, or numpy's: `tolist` gives what it holds, be it one or many."""
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            dates = value.dtype.kind == "M"  # of which numpy makes integers if they are finer than Python's
            held = (value.astype(str) if dates else value).tolist()
            if type(held) is type(value):
                raise ValueError(f"a {type(value).__name__} has no form of its own")
            return self.form(held, depth)
        if hasattr(value, "__next__"):  # pydantic would read it to its end, and record an open file as its lines
            raise ValueError(f"a {type(value).__name__} is an iterator, not a value")
        known = to_jsonable_python(value, inf_nan_mode="strings")
        return self.form(known, depth)


def _odd(value: float) -> str:
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _of_bytes(data: bytes) -> Any:
    try:
        return masked(data.decode())
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
