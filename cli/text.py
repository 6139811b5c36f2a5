"""Text for terminals and pipes. What models and tools said may hold escape codes; none of them reaches a terminal."""

from __future__ import annotations

import json
import re
import time
from typing import Any, Final

_BIDI: Final = "\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069"
_UNSAFE: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}\u2028\u2029\ud800-\udfff]")
_UNSAFE_IN_LINE: Final = re.compile(f"[\x00-\x1f\x7f-\x9f{_BIDI}\u2028\u2029\ud800-\udfff]")
_UNSAFE_IN_JSON: Final = re.compile(f"[\x7f-\x9f{_BIDI}\u2028\u2029\ud800-\udfff]")
_NAMES: Final = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
CUT_AT: Final = 200
"""Characters of a model's or tool's text that a line of a listing shows."""


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    return _NAMES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")


def safe(text: str) -> str:
    """Text with its lines and tabs, every other control character spelled out."""
    return _UNSAFE.sub(_escape, text.replace("\r\n", "\n"))


def line(value: Any, cut: int | None = CUT_AT) -> str:
    """A value on one line, control characters spelled out, cut where it gets long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    short = text if cut is None or len(text) <= cut else f"{text[:cut]}... ({len(text)} characters)"
    return _UNSAFE_IN_LINE.sub(_escape, short)


def json_line(value: Any) -> str:
    """A value as one line of JSON that any reader of lines takes for one line."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def clock(at: float, seconds: bool = True) -> str:
    """A time of the store in the user's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M", time.localtime(at))


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Columns under a head, as lines without trailing spaces."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
