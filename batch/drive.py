"""Launching a batch and seeing it through, with a bounded number of its runs outstanding.

The driver keeps no run in mind: how many are outstanding, and how far the batch is, are counts in the store. So the
same loop serves a first start, a resume and a batch of any size, whoever works on the runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from ..client.door import Door
from ..store.events import RunFailed, RunRequeued
from ..store.log import Create, Refused, Requeue
from ..store.states import LIVE, Status
from ..store.writer import GroupWriter
from .plan import AGAIN, CHUNK, NEW, Batch, Plan

WINDOW_MIN: Final = 256
"""Fewest runs that are outstanding while there are more to launch: enough that no slot is idle between two looks."""
WINDOW_PER_SLOT: Final = 4
POLL_S: Final = 0.1
POLL_COST: Final = 10
"""The pause between two looks is at least this many times as long as a look takes..."""
POLL_MOST_S: Final = 1.0
"""... but never longer than this."""
CHECK_S: Final = 2.0

HOPELESS: Final = frozenset({"no_credit", "bad_key", "unknown_model"})
"""Ends of one run that are those of all others too. Nothing more is launched then."""
LOOKED_AT: Final = 20
"""How many of the newest failures are looked at."""

Counts = dict[Status, int]


def window(concurrency: int | None) -> int:
    """How many runs of a batch may be outstanding."""
    return max(WINDOW_MIN, WINDOW_PER_SLOT * (concurrency or 0))


async def drive(door: Door, batch: Batch, plan: Plan, most: int, progress: Callable[[Counts], None]) -> Counts:
    """Launch what the plan says is due, at most `most` outstanding at once, and wait until no run is live. When a run
    fails in a way that all others would, nothing more is launched.

    Returns how many samples' runs are in each status. Raises UsageError when the data set changes on the way.
    """
    due, writer, failures = _due(batch, plan), GroupWriter(door.log), _Failures(door, batch.name)
    await failures.hopeless(0)
    checked_at, launched_all = time.monotonic(), False
    while True:
        looked_at = time.monotonic()
        whole = await door.log.counts(batch.name)
        counts = plan.own(whole)
        progress(counts)
        room = most - sum(whole.get(status, 0) for status in LIVE)
        launched_all = launched_all or await failures.hopeless(whole.get(Status.FAILED, 0))
        if room > 0 and not launched_all:
            commands = list(islice(due, min(room, CHUNK)))
            launched_all = len(commands) < min(room, CHUNK)
            await _launch(door, writer, commands)
            if commands:
                continue
        if launched_all and not any(counts[status] for status in LIVE):
            await writer.close()
            return counts
        now = time.monotonic()
        if now - checked_at > CHECK_S:
            checked_at = now
            await door.check()
        await asyncio.sleep(min(max(POLL_S, POLL_COST * (now - looked_at)), POLL_MOST_S))


class _Failures:
    """The runs of a batch that failed since this was made."""

    def __init__(self, door: Door, batch: str) -> None:
        self._door, self._batch = door, batch
        self._known: set[tuple[str, int | None]] = set()
        self._count = -1

    async def hopeless(self, count: int) -> bool:
        """Whether one of them failed as all others would; `count` is how many have failed in all by now."""
        if count == self._count:
            return False
        rows = await self._door.log.runs(statuses=[Status.FAILED], batch=self._batch, limit=LOOKED_AT)
        new = {(row.run_id, row.end_seq) for row in rows} - self._known
        first, self._count = self._count < 0, count
        self._known |= new
        if first:
            return False
        ends = await self._door.log.read_at({run_id: seq for run_id, seq in new if seq})
        return any(isinstance(end.event, RunFailed) and end.event.code in HOPELESS for end in ends.values())


def _due(batch: Batch, plan: Plan) -> Iterator[Create | Requeue]:
    """What is to be appended, in the order of the data set."""
    marks = iter(plan.marks)
    for chunk in batch.chunks():
        for (key, sample), mark in zip(chunk.items(), marks, strict=False):
            if mark == NEW:
                yield batch.create(key, sample)
            elif mark == AGAIN:
                yield Requeue(key, RunRequeued(by="batch"))


async def _launch(door: Door, writer: GroupWriter, commands: list[Create | Requeue]) -> None:
    creates = [command for command in commands if isinstance(command, Create)]
    requeues = [command for command in commands if isinstance(command, Requeue)]
    if creates:
        await door.create(creates)
    if requeues:
        for verdict in await writer.submit_all(requeues):
            if isinstance(verdict, Refused) and verdict.reason != "not_ended":
                raise verdict
        await door.nudge(command.run_id for command in requeues)
