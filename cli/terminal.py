"""Where a command writes: results on `out`, everything about them on `err`.

Ray and its processes write to the standard streams whatever they are told. While a cluster is up the streams are
therefore led away at the level of file descriptors, and only a Terminal knows the real ones. Secrets are masked, and
control characters but line ends and tabs spelled out.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from ..store.secrets import masked
from .text import safe


class Terminal:
    """The two streams of a command. Writing to a closed pipe raises BrokenPipeError."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out, self.err = out or sys.stdout, err or sys.stderr

    def put(self, text: str) -> None:
        """A line of the result."""
        self.out.write(masked(safe(text)) + "\n")
        self.out.flush()

    def say(self, text: str) -> None:
        """A line about the work; nothing happens where nobody can read it."""
        with contextlib.suppress(OSError, ValueError):
            self.err.write(masked(safe(text)) + "\n")
            self.err.flush()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Until the end, nothing but this Terminal writes to the process's streams."""
        try:
            kept = [(stream, stream.fileno()) for stream in (self.out, self.err)]
        except (OSError, ValueError):  # streams of a test, without a descriptor
            yield
            return
        before = self.out, self.err
        streams: list[TextIO] = []
        copies: list[tuple[int, int]] = []
        null = os.open(os.devnull, os.O_WRONLY)
        for stream, descriptor in kept:
            stream.flush()
            copy = os.dup(descriptor)
            streams.append(os.fdopen(copy, "w", encoding=stream.encoding, errors="backslashreplace"))
            os.dup2(null, descriptor)
            copies.append((copy, descriptor))
        os.close(null)
        self.out, self.err = streams
        try:
            yield
        finally:
            for copy, descriptor in copies:
                os.dup2(copy, descriptor)
            self.out, self.err = before
            for stream in streams:
                with contextlib.suppress(OSError):
                    stream.close()
