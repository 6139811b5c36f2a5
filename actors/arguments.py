"""The arguments of a call as a model has written them, and what is wrong with them. Pure.

No text at all, or `null`, is a call without arguments. An object that was encoded twice is taken as the object. All
else that is not a JSON object is an error for the model to read, and so is what the output limit may have cut off:
nothing is mended.
"""

from __future__ import annotations

from .exact import parse, written
from .results import plain_error, valid_text

CUT_OFF = (
    "the answer came to its output limit and this call was cut off, so it was not executed; make it again, shorter or "
    "in parts"
)


def read(raw: str, cut: bool) -> tuple[str, str]:
    """The arguments as canonical JSON text, and an error result where they are not to be used; then the text is the raw
    one, as a JSON string."""
    text = valid_text(raw)
    if cut:
        return written(text), plain_error("CutOff", CUT_OFF)
    try:
        value = parse(text) if text.strip() else None
        if isinstance(value, str):
            value = parse(value)
        if value is None:
            return "{}", ""
        if not isinstance(value, dict):
            raise ValueError(f"they are {_kind(value)}")
        return valid_text(written(value)), ""
    except ValueError as error:
        why = f"the arguments must be one JSON object: {error}"
        return written(text), plain_error("InvalidArguments", why)


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", bool: "true or false"}.get(type(value), "a number")
