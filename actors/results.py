"""What a handler returned or raised, as JSON text for the log: its form, and what is cut from it.

A text that is longer than RESULT_MAX is recorded as its beginning, a note and its end; images above IMAGES_MAX as
notes. What is left out so is kept whole, as a blob that the note names. Exceptions are recorded as type, message and
traceback text.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..store.events import canonical
from ..store.secrets import masked
from .values import Image, NoJsonForm, encoded, json_form, valid_text

__all__ = ["NoJsonForm", "Recorded", "error_text", "plain_error", "recorded", "valid_text"]

RESULT_MAX: Final = 64_000
"""Characters of a result."""
TAIL: Final = 16_000
"""Of these, how many show the end."""
IMAGES_MAX: Final = 1_000_000
"""Characters of the images of a result, in base64."""
MESSAGE_MAX: Final = 16_000
"""Characters of an exception's message."""


class Blob(NamedTuple):
    """A value that is kept outside of the log."""

    digest: str
    data: bytes


class Recorded(NamedTuple):
    """A result as canonical JSON text, and what has to be kept before it is recorded."""

    content: str
    blobs: tuple[Blob, ...] = ()


def recorded(value: Any) -> Recorded:
    """A handler's value as it is recorded, without secrets: those would be cut in two. Raises NoJsonForm."""
    album = _Album(IMAGES_MAX)
    form = json_form(value, album.shown)
    whole: str = form if isinstance(form, str) and len(form) > RESULT_MAX else _text(value, form)
    if len(whole) - album.inline <= RESULT_MAX:
        return Recorded(whole, tuple(album.blobs))
    if album.inline:  # a block that is cut would be no image any more
        album = _Album(0)
        whole = _text(value, json_form(value, album.shown))
    blob = _blob(whole.encode())
    note = f"all of it is the blob {blob.digest}: perdure blob {blob.digest}"
    return Recorded(canonical(_cut(whole, RESULT_MAX, TAIL, note)), (*album.blobs, blob))


class _Album:
    """The images of a result: shown as long as there is room, else kept."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.inline = 0
        """Characters of those that are shown."""
        self.blobs: list[Blob] = []

    def shown(self, image: Image) -> Any:
        block = encoded(image)
        if self.inline + len(block["data"]) <= self._room:
            self.inline += len(block["data"])
            return block
        blob = _blob(image.data)
        self.blobs.append(blob)
        size = len(image.data)
        return f"[{valid_text(image.media_type)} of {size} bytes, not shown; it is the blob {blob.digest}]"


def _blob(data: bytes) -> Blob:
    return Blob(hashlib.sha256(data).hexdigest(), data)


def _text(value: Any, form: Any) -> str:
    try:
        return canonical(form)
    except ValueError as error:  # an integer of thousands of digits
        raise NoJsonForm(f"a {type(value).__name__} cannot be recorded as JSON: {error}") from error


def _cut(text: str, most: int, tail: int, note: str) -> str:
    """The beginning and the end of a text, with a note of what is left out between them."""
    if len(text) <= most:
        return text
    head = most - tail
    left_out = f"\n\n[{len(text) - most} of {len(text)} characters are left out here; {note}]\n\n"
    return text[:head] + left_out + text[-tail:]


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
            "message": _cut(masked(valid_text(message)), MESSAGE_MAX, MESSAGE_MAX // 4, "they are not kept"),
            "traceback": masked(valid_text("".join(lines)))[-4000:],
        }
    )


def plain_error(kind: str, message: str) -> str:
    """An error of the runtime's own as canonical JSON text, in the form of `error_text`."""
    return canonical({"error": kind, "message": valid_text(message)})


PART: Final = 1 << 20
"""Bytes of a blob that are kept at once."""

Keep = Callable[[str, int, bytes], object]
"""Keeps one part of a blob, by digest and number; returns once that is durable."""


def throw_away(digest: str, part: int, data: bytes) -> None:
    """A Keep for where nobody will ask for a blob."""


def keep_all(blobs: tuple[Blob, ...], keep: Keep) -> None:
    """Keep blobs, part by part."""
    for blob in blobs:
        for number, start in enumerate(range(0, max(1, len(blob.data)), PART)):
            keep(blob.digest, number, blob.data[start : start + PART])
