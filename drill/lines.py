"""The lines of a handler as places to be killed at: right before each that it comes to, once a line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def file_of(handler: Callable[..., Any]) -> str | None:
    """The file that a handler is written in; None for one that is no Python function."""
    code = getattr(inspect.unwrap(handler), "__code__", None)
    return code.co_filename if code else None


@contextmanager
def traced(file: str | None, reach: Callable[[int], None]) -> Iterator[None]:
    """Inside, `reach` is called before each line of the file that this thread executes, with its number: of a handler,
    and of what it calls in the same file. Not for the first line, where nothing has been done yet."""
    seen: set[int] = set()

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            if len(seen) > 1:
                reach(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, _: object) -> Any:
        return line if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    if file:
        sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
