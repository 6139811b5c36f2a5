"""The results of a batch: one JSON object a sample in the order of the data set, and the sums of a report."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from ..actors.requests import Ended
from ..client.outcomes import Outcome
from ..store.errors import UsageError
from ..store.events import Usage
from ..store.projections import add_usage
from ..store.rows import RunRow
from ..store.sql import SqlLog
from ..store.states import Status
from .dataset import Sample
from .plan import Batch, outcomes

FAILURES_SHOWN: Final = 10


@dataclass
class Report:
    """Sums over the samples of a batch."""

    statuses: Counter[Status] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    errors: Counter[str] = field(default_factory=Counter)
    """How many runs failed, by error code."""
    failures: list[tuple[str, Outcome]] = field(default_factory=list)
    """The first few: sample id and outcome."""

    def add(self, sample: Sample, row: RunRow, outcome: Outcome) -> None:
        """Count one sample."""
        self.statuses[row.status] += 1
        self.usage = add_usage(self.usage, row.usage)
        if row.status is Status.FAILED:
            self.errors[outcome.error or "unknown"] += 1
            if len(self.failures) < FAILURES_SHOWN:
                self.failures.append((sample.id, outcome))


async def results(event_log: SqlLog, batch: Batch, report: Report) -> AsyncIterator[dict[str, Any]]:
    """The result of every sample that has a run, in order; the report grows along."""
    async for chunk in outcomes(event_log, batch):
        rows = [row for _, _, row in chunk if row]
        ends = await event_log.read_at({row.run_id: row.end_seq for row in rows if row.end_seq})
        for key, sample, row in chunk:
            if row is None:
                continue
            outcome = Outcome(key, row.status)
            if row.status.is_terminal and key in ends:
                outcome = Outcome.of(Ended(key, row.epoch, row.status, "ended", ends[key].event))
            report.add(sample, row, outcome)
            yield {
                "id": sample.id,
                "run_id": key,
                "status": row.status.value,
                "output": outcome.output,
                "error": outcome.error,
                "message": outcome.message,
                "usage": row.usage.model_dump(),
            }


def check_output(output: Path, dataset: Path) -> None:
    """Raises UsageError when results cannot be written there."""
    folder = output.absolute().parent
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder: name a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output {output}: folder {folder} does not exist or may not be written")
    if output.exists() and os.path.samefile(output, dataset):
        raise UsageError(f"--output {output} is the data set itself: name another file")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` when the block ends well, at once and whole."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.absolute().parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
