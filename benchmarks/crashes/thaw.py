"""Playing the scenes, and what has to hold after each."""

from __future__ import annotations

import asyncio
import random

import psutil

from perdure.actors.kernel import process_started
from perdure.benchmarks.processes import TITLES, processes
from perdure.store.events import (
    AssistantMessage,
    RunClaimed,
    RunCompleted,
    RunFailed,
    Stored,
    ToolCallRequested,
    TurnStarted,
)

from .case import Case
from .scenes import Scene
from .stage import Stage, until
from .table import Outcome

OWNERS = (TurnStarted, AssistantMessage, ToolCallRequested, RunCompleted, RunFailed)
"""What only the owner of an epoch appends."""


async def thawed(stage: Stage, scene: Scene, seed: int) -> Case:
    """Play a scene. Raises AssertionError when anything is not as it has to be after it."""
    case = Case(stage, scene.plan(seed))
    await stage.runtime.launch_many(stage.loaded, [case.request()])
    pid = await scene.play(stage, case, random.Random(f"{scene.name}/{seed}"))
    started = process_started(pid)
    await case.see_through()
    outcome = await case.outcome()
    seen = Outcome(outcome.status, outcome.effects, outcome.attempts, "any", "any")
    expected = Outcome("completed", scene.effects, scene.attempts, "any", "any")
    assert expected.allows(seen), f"{outcome}, expected {expected}"
    assert not case.duplicates(), f"{case.duplicates()} effects were done twice"
    stale(await stage.runtime.log.read(case.run_id))
    if scene.fate == "killed":
        await until(lambda: _is_gone(pid, started), f"the end of process {pid}", 20)
    elif scene.victim != "tool":
        lease = await stage.working(scene.victim)
        assert lease.pid == pid, f"process {pid} was to go on as the {scene.victim}, and {lease.pid} has its place"
    await settled(stage, case)
    return case


def stale(stored: list[Stored]) -> None:
    """Nobody but the newest owner has appended what only an owner may."""
    epoch = 0
    for one in stored:
        if isinstance(one.event, RunClaimed):
            epoch = one.event.epoch
        if isinstance(one.event, OWNERS):
            assert one.epoch == epoch, f"{one.event.type} at {one.seq} is of epoch {one.epoch}, the owner is {epoch}"


async def _is_gone(pid: int, started: float) -> bool:
    return process_started(pid) != started or not started


async def settled(stage: Stage, case: Case) -> None:
    """One journal and one supervisor, nobody stopped, no attempt left behind, and nothing happens to the run any
    more."""
    seq = len(await stage.runtime.log.read(case.run_id))
    acts = len(case.lines("effect"))

    async def quiet() -> bool:
        return not await asyncio.to_thread(processes, "tool")

    await until(quiet, "the end of all attempts", 20)
    for kind in ("journal", "supervisor"):
        found = await asyncio.to_thread(processes, kind)
        assert len(found) == 1, f"there are {len(found)} processes of the {kind}"
    stopped = [process for process in await asyncio.to_thread(processes, *TITLES) if _stopped(process)]
    assert not stopped, f"left stopped: {stopped}"
    assert (seq, acts) == (len(await stage.runtime.log.read(case.run_id)), len(case.lines("effect")))


def _stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
