"""What a batch is going to do: which samples are new, which have runs already, and whether those still fit.

The whole data set is read, and compared with the store, before anything is launched. What is kept of it is one byte a
sample.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Final

from pydantic import JsonValue

from ..actors.loading import LoadedAgent
from ..client.launching import Request, create
from ..store.errors import UsageError
from ..store.events import RunCreated, canonical
from ..store.log import Create
from ..store.rows import RunRow
from ..store.secrets import masked_value
from ..store.sql import SqlLog
from ..store.states import TERMINAL, Status
from .dataset import Dataset, Sample

CHUNK: Final = 500
"""Samples that are looked up, or launched, at once."""
NEW, KNOWN, AGAIN = 0, 1, 2


def run_id(batch: str, sample_id: str) -> str:
    """The id of a sample's run: the same for the same batch and sample for ever, so nothing is launched twice."""
    return hashlib.sha256(json.dumps([batch, sample_id]).encode()).hexdigest()[:32]


def batch_name(text: str) -> str:
    """A batch's name as it is kept. Raises UsageError."""
    name = unicodedata.normalize("NFC", text)
    if not name or not name.isprintable() or len(name) > 200:
        raise UsageError(f"a batch needs a name of 1 to 200 printable characters, not {text[:80]!a}")
    return name


@dataclass(frozen=True)
class Batch:
    """A name, an agent and the samples that it is to be run on."""

    name: str
    loaded: LoadedAgent
    dataset: Dataset
    model: str | None = None
    limits: Mapping[str, object] = field(default_factory=dict)
    """Those that override the agent's."""
    budget: str | None = None
    """That which its runs share."""
    priced: bool = False
    """The prices of the model have to be known."""

    @cached_property
    def config(self) -> dict[str, JsonValue]:
        """What its runs keep of the agent's settings. Raises UsageError as `Agent.snapshot` does."""
        return self.loaded.agent.snapshot(self.model, self.limits, self.priced)

    def chunks(self) -> Iterator[dict[str, Sample]]:
        """The samples by run id, in order, in chunks."""
        samples = iter(self.dataset)
        while some := list(islice(samples, CHUNK)):
            yield {run_id(self.name, sample.id): sample for sample in some}

    def create(self, run_id: str, sample: Sample) -> Create:
        """The command that creates a sample's run."""
        request = Request(sample.input, run_id, self.name, sample.id, metadata=sample.metadata, budget=self.budget)
        return create(self.loaded, request, self.config)


@dataclass
class Plan:
    """What was found: a mark for each sample, how many runs are in each status, and how many have other code."""

    marks: bytearray = field(default_factory=bytearray)
    counts: dict[Status, int] = field(default_factory=dict)
    """Of the samples that have runs."""
    others: dict[Status, int] = field(default_factory=dict)
    """Of the batch's runs whose samples are not in the data set."""
    other_code: int = 0

    @property
    def total(self) -> int:
        return len(self.marks)

    @property
    def new(self) -> int:
        return self.marks.count(NEW)

    @property
    def again(self) -> int:
        return self.marks.count(AGAIN)

    def own(self, batch_counts: dict[Status, int]) -> dict[Status, int]:
        """The counts of the data set's samples, from those of the whole batch."""
        return {status: max(0, batch_counts.get(status, 0) - self.others.get(status, 0)) for status in Status}


async def make_plan(event_log: SqlLog, batch: Batch, retry: bool = False) -> Plan:
    """Read the data set to its end and compare it with the store.

    `retry` marks the runs that ended without completing to be tried again. Raises UsageError for a data set that
    cannot be read, for a batch of that name that was something else, and for limits that cannot be kept.
    """
    plan, model = Plan(), batch.config["model"]
    for chunk in batch.chunks():
        rows = {row.run_id: row for row in await event_log.runs(ids=list(chunk))}
        born = await event_log.read_at(dict.fromkeys(rows, 1))
        for key, sample in chunk.items():
            row = rows.get(key)
            if row is None:
                plan.marks.append(NEW)
                continue
            event = born[key].event
            assert isinstance(event, RunCreated)
            _check_same(batch, model, sample, event)
            plan.other_code += event.agent.digest != batch.loaded.ref.digest
            plan.counts[row.status] = plan.counts.get(row.status, 0) + 1
            again = retry and row.status in TERMINAL - {Status.COMPLETED}
            plan.marks.append(AGAIN if again else KNOWN)
    found = await event_log.counts(batch.name)
    plan.others = {status: count - plan.counts.get(status, 0) for status, count in found.items()}
    return plan


def _check_same(batch: Batch, model: JsonValue, sample: Sample, event: RunCreated) -> None:
    """Raises UsageError when a sample's run was something else than would be launched now."""
    for what, before, now in (
        ("agent", event.agent.ref, batch.loaded.ref.ref),
        ("model", event.config.get("model"), model),
        ("input", canonical(event.input), canonical(masked_value(sample.input))),
    ):
        if before != now:
            told = "" if what == "input" else f" ({before}, now {now})"
            raise UsageError(
                f"{batch.dataset.path}, line {sample.line}: batch {batch.name!r} has run sample {sample.id!r} with "
                f"another {what}{told}; choose another --name"
            )


async def outcomes(event_log: SqlLog, batch: Batch) -> AsyncIterator[list[tuple[str, Sample, RunRow | None]]]:
    """The samples with the rows of their runs, in order, in chunks."""
    for chunk in batch.chunks():
        rows = {row.run_id: row for row in await event_log.runs(ids=list(chunk))}
        yield [(key, sample, rows.get(key)) for key, sample in chunk.items()]
