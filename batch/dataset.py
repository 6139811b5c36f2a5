"""Data sets: JSON lines, read as a stream and checked to the last line before anything is launched.

A line is an object with `input`, perhaps an `id`, and anything else as metadata; a line that is a string is an input.
The file is UTF-8; a byte order mark, CRLF, blank lines and a missing final newline change nothing, and only a line
feed ends a line. An escape of a lone surrogate, which is no character, becomes U+FFFD.

An `id` is a string or a whole number; 1 and "1" are the same id, and so are two Unicode forms of one text (ids are
compared and kept in form NFC). Case counts: "a" and "A" are two ids. A sample without an id gets one from its content
and from how many equal ones stand before it, so that a line inserted elsewhere does not change it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from pydantic import JsonValue

from ..store.errors import UsageError
from ..store.events import canonical
from .values import parse

LINE_BYTES_MAX: Final = 16 * 2**20
_BOM: Final = b"\xef\xbb\xbf"
_OTHER_ENCODINGS: Final = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a data set."""

    line: int
    id: str
    input: JsonValue
    metadata: dict[str, JsonValue] = field(default_factory=dict)


class Dataset:
    """A file of samples. `limit` takes only the first ones."""

    def __init__(self, path: str | os.PathLike[str], limit: int | None = None) -> None:
        self.path, self._limit = Path(path), limit
        self._seen: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[Sample]:
        """The samples in order, every time the same. Raises UsageError naming file and line."""
        try:
            with open(self.path, "rb") as file:
                self._check_unchanged(file)
                yield from islice(self._samples(file), self._limit)
                self._check_unchanged(file)
        except OSError as error:
            raise UsageError(f"data set {self.path} cannot be read: {error.strerror or error}") from error

    def _check_unchanged(self, file: BinaryIO) -> None:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"data set {self.path} is not a file: it is read more than once, so save it first")
        seen = (about.st_ino, about.st_size, about.st_mtime_ns)
        if self._seen not in (None, seen):
            raise UsageError(f"data set {self.path} was changed while it was read; give the command again")
        self._seen = seen

    def _samples(self, file: BinaryIO) -> Iterator[Sample]:
        lines: dict[bytes, int] = {}
        copies: dict[bytes, int] = {}
        number = 0
        for number, text in self._lines(file):
            sample = self._sample(number, text, copies)
            key = _digest(sample.id)
            if key in lines:
                raise UsageError(f"{self.path}, line {number}: id {_shown(sample.id)} is that of line {lines[key]} too")
            lines[key] = number
            yield sample
        if not lines:
            raise UsageError(f"data set {self.path} is empty: it needs one JSON object a line, with an input")

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, str]]:
        """The lines that are not blank, with their numbers."""
        number = 0
        while raw := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            if len(raw) > LINE_BYTES_MAX:
                raise self._bad(number, f"it is longer than {LINE_BYTES_MAX // 2**20} MiB")
            if number == 1:
                if raw[:2] in _OTHER_ENCODINGS:
                    raise self._bad(number, f"the file is {_OTHER_ENCODINGS[raw[:2]]}: save it as UTF-8")
                raw = raw.removeprefix(_BOM)
            if b"\0" in raw:
                raise self._bad(number, "it holds NUL bytes, as UTF-16 text does: save the file as UTF-8")
            try:
                text = raw.strip(b" \t\r\n").decode()
            except UnicodeDecodeError as error:
                raise self._bad(number, f"it is not UTF-8 ({error.reason} at byte {error.start + 1})") from error
            if text:
                yield number, text

    def _sample(self, number: int, text: str, copies: dict[bytes, int]) -> Sample:
        try:
            value = parse(text)
        except ValueError as error:
            raise self._bad(number, f"it is not JSON: {error}") from error
        if isinstance(value, str):
            value = {"input": value}
        if not isinstance(value, dict):
            raise self._bad(number, f"it is {_kind(value)}, not an object or a string")
        given = value.pop("id", None)
        content = canonical(value)
        if value.get("input") is None:
            raise self._bad(number, "it has no `input`")
        if given is None:
            digest = _digest(content)
            copies[digest] = copy = copies.get(digest, 0) + 1
            sample_id = f"{digest.hex()[:16]}-{copy}"
        else:
            sample_id = self._id(number, given)
        return Sample(number, sample_id, value.pop("input"), value)

    def _id(self, number: int, given: Any) -> str:
        if isinstance(given, int) and not isinstance(given, bool):
            return str(given)
        if not isinstance(given, str):
            raise self._bad(number, f"its `id` is {_kind(given)}, not a string or a whole number")
        if not given or "\0" in given:
            raise self._bad(number, f"its `id` is {'empty' if not given else 'a text with a NUL character'}")
        return unicodedata.normalize("NFC", given)

    def _bad(self, number: int, why: str) -> UsageError:
        return UsageError(f"{self.path}, line {number}: {why}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else "a string")
