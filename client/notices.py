"""Ray's notices in a program of the user's: to a logger, and not between the lines that the program prints.

A thread of Ray prints what its processes have to say on `sys.stdout`, whatever Ray's own log level is.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

log = logging.getLogger("perdure.ray")
SPEAKER: Final = "ray_listen_error_messages"
"""Name of the thread."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


class Aside:
    """Takes the place of `sys.stdout` until it is ended: passes on what is written, except by Ray's thread."""

    def __init__(self) -> None:
        self._out: Any = sys.stdout
        self._ended = False
        self._speaker = 0
        if self._out is not None:  # a program without a console has none
            sys.stdout = self

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        if self._ended or (thread.name != SPEAKER and thread.ident != self._speaker):
            written: int = self._out.write(text)
            return written
        if said := _COLOUR.sub("", text).strip():
            log.info("%s", said)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """What this thread writes is Ray's too until the block ends: it is calling Ray."""
        self._speaker = threading.get_ident()
        try:
            yield
        finally:
            self._speaker = 0

    def end(self) -> None:
        """Put the stream back; whoever still holds this one writes straight to it."""
        self._ended = True
        if sys.stdout is self:
            sys.stdout = self._out
