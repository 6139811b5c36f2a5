"""From what a user types to a run: a whole id, or a prefix that only one run has."""

from __future__ import annotations

from typing import Final

from ..store.errors import NotFound, UsageError
from ..store.rows import RunRow
from ..store.sql import SqlLog
from .text import line

PREFIX_MIN: Final = 4
CANDIDATES_SHOWN: Final = 5


async def find_run(event_log: SqlLog, text: str) -> RunRow:
    """The run of an id or of an unambiguous prefix of it. Raises NotFound or UsageError."""
    if _is_text(text):
        if row := await event_log.run(text):
            return row
        if len(text) >= PREFIX_MIN:
            found = await event_log.runs(prefix=text, limit=CANDIDATES_SHOWN + 1)
            if len(found) == 1:
                return found[0]
            if found:
                raise UsageError(f"run {text!r} is ambiguous: {_candidates(found)}; give more of the id")
        elif text:
            raise NotFound(f"no run {text!r}: give its id, or at least the first {PREFIX_MIN} characters")
    raise NotFound(f"no run {line(text)!r} in this store; `perdure list` shows what there is")


def _candidates(rows: list[RunRow]) -> str:
    names = [line(row.run_id) for row in rows[:CANDIDATES_SHOWN]]
    return ", ".join(names) + (", and more" if len(rows) > CANDIDATES_SHOWN else "")


def _is_text(text: str) -> bool:
    """Whether a database can be asked for it."""
    return "\0" not in text and text.isprintable()
