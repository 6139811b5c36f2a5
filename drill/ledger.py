"""What really happened, written down by the processes that it happened in. Nothing that recovers a run reads it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

What = Literal[
    "reached", "killed", "entered", "returned", "raised", "died", "probed", "answered", "asked", "waited", "failed"
]


@dataclass(frozen=True)
class Note:
    """One line. reached, killed: a point (`place`). entered, returned (`text` is the result), raised: a handler.
    died: an attempt's process. probed, answered (`text` is the answer): a probe, a person. asked: the model, for the
    turn `attempt`, with a digest of the messages. waited: a settling time of `seconds` was skipped. failed: the drill.
    """

    what: What
    place: str = ""
    text: str = ""
    tool: str = ""
    call: str = ""
    attempt: int = 0
    key: str = ""
    seconds: float = 0.0
    at: float = field(default_factory=time.time)


class Ledger:
    """A file of notes that many processes append to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, note: Note) -> None:
        """Append a note; it is on disk when this returns."""
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, b"\n" + json.dumps(asdict(note)).encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)

    def read(self) -> list[Note]:
        """All notes so far, in order. One whose writer was killed in the middle of it was never written."""
        if not self._path.exists():
            return []
        notes = []
        for line in filter(None, self._path.read_text().splitlines()):
            with contextlib.suppress(ValueError):
                notes.append(Note(**json.loads(line)))
        return notes
