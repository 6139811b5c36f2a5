"""How far a batch is: a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from ..store.states import LIVE, Status
from .terminal import Terminal

LINE_EVERY_S: Final = 5.0
LINE_EVERY_PART: Final = 0.1

Counts = dict[Status, int]


class Progress(Protocol):
    """Is told the counts whenever they were looked up."""

    def __call__(self, counts: Counts) -> None: ...


def ended(counts: Counts) -> int:
    """How many runs need nothing more, or nothing but a person."""
    return sum(count for status, count in counts.items() if status not in LIVE)


def words(counts: Counts) -> str:
    """Counts as people say them: 3 completed, 1 failed."""
    return ", ".join(f"{counts[status]} {status}" for status in Status if counts.get(status)) or "nothing yet"


class Lines:
    """A line whenever another tenth is done, or after a few seconds with news."""

    def __init__(self, terminal: Terminal, total: int) -> None:
        self._terminal, self._total = terminal, total
        self._said, self._said_at = -1, 0.0

    def __call__(self, counts: Counts) -> None:
        done, now = ended(counts), time.monotonic()
        if done == self._said:
            return
        tenth = done - self._said >= LINE_EVERY_PART * self._total
        if tenth or done == self._total or now - self._said_at >= LINE_EVERY_S:
            self._said, self._said_at = done, now
            self._terminal.say(f"{done}/{self._total}: {words(counts)}")


@contextmanager
def shown(terminal: Terminal, total: int) -> Iterator[Progress]:
    """Progress as it suits the place where it is shown."""
    if not terminal.err.isatty():
        yield Lines(terminal, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Bar(*columns, TimeRemainingColumn(), console=Console(file=terminal.err)) as bar:
        task = bar.add_task("", total=total)
        yield lambda counts: bar.update(task, completed=ended(counts), description=words(counts))
