"""Runs of shapes with and without faults, and what must be true of every one of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perdure.actors.requests import Ended
from perdure.store.events import ApprovalRequested, RunCompleted, Stored, ToolCallUnsettled, ToolResult
from perdure.store.log import Accepted, Claim, EventLog
from perdure.store.memory import MemoryLog
from perdure.store.rows import CallRow, RunRow
from perdure.store.states import Status

from .fakes import LEASE, RUN, check_projection, created, new_run
from .harness import Cluster, Fault, World
from .person import Person
from .processes import processes
from .shapes import Shape

LIVES_MAX = 5
QUESTIONS = (ApprovalRequested, ToolCallUnsettled)
OpenLog = Callable[[World], Awaitable[EventLog]]


async def memory_log(world: World) -> EventLog:
    """A fresh in-memory log on the world's clock."""
    return MemoryLog(world.clock)


@dataclass(frozen=True)
class Report:
    """A run that has come to its end."""

    world: World
    events: list[Stored]
    row: RunRow
    calls: list[CallRow]
    lives: int

    @property
    def end(self) -> tuple[Any, ...]:
        """How the run ended, in terms that do not depend on how it got there."""
        last = self.events[-1].event
        output = last.output if isinstance(last, RunCompleted) else None
        return self.row.status, self.row.error, output, self.row.turns, self.row.usage

    @property
    def asked(self) -> dict[int, list[Any]]:
        """What the model was shown for each turn, once per time it was asked."""
        shown: dict[int, list[Any]] = {}
        for turn, messages in self.world.tape.asked:
            shown.setdefault(turn, []).append(messages)
        return shown


async def play(shape: Shape, folder: Path, *faults: Fault, open_log: OpenLog = memory_log) -> Report:
    """Run a shape to its end; the i-th life of its processes meets the i-th fault."""
    world = World(shape, folder)
    log = await open_log(world)
    world.person = Person(world, log)
    await new_run(log, created(config={"limits": shape.limits.model_dump(mode="json")}))
    async with asyncio.timeout(10), processes():
        cluster = Cluster(log, world, _next(faults, 0, world))
        life = 1
        while not await _live(cluster, log):
            assert life < LIVES_MAX, f"{shape.name}: no end after {life} lives, {faults}"
            if world.journal.died.is_set():
                cluster = Cluster(log, world, _next(faults, life, world))
            life += 1
        world.owner.kill()
        world.journal.kill()
        await world.owner.gone()
        await world.journal.gone()
    row = await log.run(RUN)
    assert row is not None
    report = Report(world, await log.read(RUN), row, await log.calls(RUN), life)
    await log.close()
    return report


def _next(faults: Sequence[Fault], life: int, world: World) -> Fault | None:
    """The fault of a life; the first counts from the beginning, later ones from the life's own."""
    if life >= len(faults):
        return None
    already = world.steps if faults[life].where == "step" else world.commits
    return replace(faults[life], n=faults[life].n + already)


async def _live(cluster: Cluster, log: EventLog) -> bool:
    """Claim the run and drive it, again and again while a person lets it go on. False when the owner was killed."""
    world = cluster.world
    while True:
        row = await log.run(RUN)
        assert row is not None
        if row.status.is_terminal:
            return True
        if row.status is Status.AWAITING_APPROVAL:
            assert await world.person.answer_all(), "a run is parked and nothing is asked"
            continue
        claim = Claim(RUN, f"claim {row.epoch}", LEASE, row.epoch, "decision" if row.parked else "start")
        claiming = world.journal.spawn(cluster.journal.commit([claim]))
        await asyncio.wait({claiming})
        if claiming.cancelled():
            return False
        answer = claiming.result()[0]
        if not isinstance(answer, Accepted):
            assert answer.reason == "ended", answer  # what still ran for it has parked the run meanwhile
            continue
        if await _drive(cluster, cluster.start_owner(answer.row.epoch, RUN)) is None:
            return False


async def _drive(cluster: Cluster, driving: asyncio.Task[Ended]) -> Ended | None:
    """How the drive ended, None when the owner was killed."""
    world = cluster.world
    while not driving.done():
        died = asyncio.create_task(world.journal.died.wait())
        await asyncio.wait({driving, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if world.journal.died.is_set():
            await world.journal.gone()
            if not world.owner.died.is_set():
                cluster.start_journal()
    if driving.cancelled():
        return None
    assert driving.result().outcome in ("ended", "waits"), driving.result()
    return driving.result()


# -- what must hold -----------------------------------------------------------------------------------


def check(report: Report, clean: Report) -> None:
    """The run with faults kept every promise, and ended like the one without."""
    world, shape = report.world, report.world.shape
    assert not world.broken, world.broken
    check_projection(report.events, report.row, report.calls)
    check_ledger(report)
    assert report.end == clean.end
    assert set(report.asked) == set(clean.asked)
    for turn, shown in report.asked.items():
        for messages in shown:
            assert _comparable(messages, shape) == _comparable(clean.asked[turn][0], shape), f"turn {turn} differs"
    asked = {kind: {s.event.tool_call_id for s in report.events if isinstance(s.event, kind)} for kind in QUESTIONS}
    assert shape.may_be_unsettled or not asked[ToolCallUnsettled], "there was a probe to ask"
    assert shape.is_gated or not asked[ApprovalRequested], "nothing is gated"


def _comparable(messages: list[Any], shape: Shape) -> str:
    """A conversation as text; that of an abandoned call names its attempt, which depends on what befell it."""
    text = json.dumps(messages)
    return re.sub(r"attempt \d+", "an attempt", text) if any(tool.abandoned for tool in shape.tools) else text


def check_ledger(report: Report) -> None:
    """Effects agree with their classes and with what was recorded."""
    effects = {call.tool_call_id: call.effect for call in report.calls}
    lines = Counter(call for call, _, _ in report.world.ledger)
    keys: dict[str, set[str]] = {}
    for call, key, _ in report.world.ledger:
        keys.setdefault(call, set()).add(key)
    assert all(len(of_call) == 1 for of_call in keys.values()), "a call changed its idempotency key"
    assert len({key for of_call in keys.values() for key in of_call}) == len(keys), "two calls share a key"
    for call, effect in effects.items():
        if effect == "non_idempotent":
            assert lines[call] <= 1, f"{call} took effect {lines[call]} times"
    for stored in report.events:
        if isinstance(stored.event, ToolResult) and not stored.event.is_error:
            assert lines[stored.event.tool_call_id] >= 1, "a success without an effect"
        if isinstance(stored.event, ToolResult) and stored.event.source in ("rejection", "policy"):
            assert not lines[stored.event.tool_call_id], "a call took effect that was not to run"
