"""Freezing a process for three lease periods in a phase of a run, while everything else goes on, and thawing it.

Each function brings a run to its phase and returns the process that it froze.
"""

from __future__ import annotations

import asyncio
import random

from perdure.client import decisions

from .case import Case
from .stage import Stage, until


async def pause(stage: Stage) -> None:
    """Three lease periods."""
    await asyncio.sleep(3 * stage.runtime.settings.lease_s)


async def in_place(case: Case) -> None:
    async def look() -> bool:
        return bool(case.waits())

    await until(look, f"{case.plan.point} of run {case.run_id}")


async def claims(stage: Stage, case: Case, count: int) -> None:
    """Wait until the run was claimed so often."""

    async def look() -> bool:
        ((epoch,),) = stage.query("SELECT epoch FROM runs WHERE run_id = ?", case.run_id)
        return bool(epoch >= count)

    await until(look, f"claim {count} of run {case.run_id}")


async def approve(stage: Stage, case: Case, call_id: str) -> None:
    await decisions.approve(stage.runtime.log, case.run_id, call_id, by="ann")
    case.asked.append("approval")


# -- the run actor ------------------------------------------------------------------------------------------


async def actor(stage: Stage, case: Case, chance: random.Random) -> int:
    """Frozen while the model or a tool is at work, found out, replaced and killed."""
    await in_place(case)
    stage.stop(pid := case.owner())
    await asyncio.sleep(chance.uniform(0, 0.2))
    case.go_everywhere()
    await pause(stage)
    stage.thaw(pid)
    return pid


async def actor_thawed_early(stage: Stage, case: Case, chance: random.Random) -> int:
    """It thaws when the run is claimed for another and nobody has come to kill it yet, for the supervisor is frozen
    too; so it really tries to go on with what is not its own any more."""
    await in_place(case)
    stage.stop(pid := case.owner())
    case.go_everywhere()
    supervisor = (await stage.working("supervisor")).pid
    await claims(stage, case, 2)
    stage.stop(supervisor)
    stage.thaw(pid)
    await asyncio.sleep(1 + chance.uniform(0, 0.5))
    stage.thaw(supervisor)
    return pid


async def actor_at_a_decision(stage: Stage, case: Case, chance: random.Random) -> int:
    """It waits for one call of the turn, and another is decided about."""
    await in_place(case)
    stage.stop(pid := case.owner())
    await approve(stage, case, "t0c1")
    await asyncio.sleep(chance.uniform(0, 0.2))
    case.go_everywhere()
    await pause(stage)
    stage.thaw(pid)
    return pid


async def actor_in_an_append(stage: Stage, case: Case, chance: random.Random) -> int:
    """Its append is on the way to a stopped journal; it is written, and the actor does not hear of it."""
    await in_place(case)
    journal = (await stage.working("journal")).pid
    stage.stop(journal)
    case.go_everywhere()
    await asyncio.sleep(0.1 + chance.uniform(0, 0.2))
    stage.stop(pid := case.owner())
    stage.thaw(journal)
    await pause(stage)
    stage.thaw(pid)
    return pid


# -- the tool's worker --------------------------------------------------------------------------------------


async def tool(stage: Stage, case: Case, chance: random.Random) -> int:
    """Frozen and thawed, with nobody to miss it."""
    await in_place(case)
    stage.stop(pid := case.waiting_pid())
    await asyncio.sleep(chance.uniform(0, 0.2))
    case.go_everywhere()
    await pause(stage)
    stage.thaw(pid)
    return pid


async def tool_superseded(stage: Stage, case: Case, chance: random.Random) -> int:
    """Its journal is killed meanwhile, and the next one has to know what it did."""
    await in_place(case)
    stage.stop(pid := case.waiting_pid())
    old = await stage.working("journal")
    stage.kill("journal", old.pid)
    case.go_everywhere()
    await asyncio.sleep(chance.uniform(0, 1.0))
    if chance.random() < 0.5:  # else it thaws into the recovery
        await pause(stage)
    stage.thaw(pid)
    return pid


async def tool_outlived_by_a_child(stage: Stage, case: Case, chance: random.Random) -> int:
    """A child of the handler is frozen, and the worker is killed: the child still could act, and no cluster knows."""
    await in_place(case)
    stage.stop(pid := case.waiting_pid())
    stage.kill("tool", int(case.lines("handler")[0]["pid"]))
    await asyncio.sleep(chance.uniform(0, 0.2))
    case.go_everywhere()
    await pause(stage)
    stage.thaw(pid)
    return pid


async def tool_at_a_decision(stage: Stage, case: Case, chance: random.Random) -> int:
    """Frozen while another call of its turn is decided about, which goes on without it."""
    await in_place(case)
    stage.stop(pid := case.waiting_pid())
    await approve(stage, case, "t0c1")
    case.go_everywhere()

    async def ran() -> bool:
        return case.acts("t0c1") == 1

    await until(ran, "the approved call")
    await pause(stage)
    stage.thaw(pid)
    return pid


async def tool_in_an_append(stage: Stage, case: Case, chance: random.Random) -> int:
    """Its mark is on the way to a stopped journal; it is written, and the worker does not hear of it."""
    await in_place(case)
    journal = (await stage.working("journal")).pid
    stage.stop(journal)
    case.go_everywhere()
    await asyncio.sleep(0.1 + chance.uniform(0, 0.2))
    stage.stop(pid := case.waiting_pid())
    stage.thaw(journal)
    await pause(stage)
    stage.thaw(pid)
    return pid


# -- journal and supervisor ---------------------------------------------------------------------------------


async def lease_holder(stage: Stage, case: Case, chance: random.Random) -> int:
    """Frozen while the model or a tool is at work."""
    await in_place(case)
    stage.stop(pid := (await stage.working(case.plan.victim)).pid)
    await asyncio.sleep(chance.uniform(0, 0.2))
    case.go_everywhere()
    await pause(stage)
    stage.thaw(pid)
    return pid


async def lease_holder_thawed_early(stage: Stage, case: Case, chance: random.Random) -> int:
    """Frozen for less than a lease period."""
    await in_place(case)
    stage.stop(pid := (await stage.working(case.plan.victim)).pid)
    case.go_everywhere()
    await asyncio.sleep(chance.uniform(0.5, 0.9) * stage.runtime.settings.lease_s)
    stage.thaw(pid)
    return pid


async def lease_holder_at_a_decision(stage: Stage, case: Case, chance: random.Random) -> int:
    """The run is parked and decided about while who should act on that is frozen."""
    await stage.runtime.outcome(case.run_id)
    pid = (await stage.working(case.plan.victim)).pid
    await stage.stop_between_writes(pid)
    await approve(stage, case, "t0c0")
    await pause(stage)
    stage.thaw(pid)
    return pid


async def lease_holder_in_an_append(stage: Stage, case: Case, chance: random.Random) -> int:
    """Frozen with the store's write lock in its hands: nobody can write before it thaws or is killed."""
    if case.plan.point == "before intent":
        await in_place(case)
    pid = (await stage.working(case.plan.victim)).pid
    assert await stage.stop_in_a_write(pid, lambda: chance.uniform(0, 0.002)), "never met inside of a transaction"
    case.go_everywhere()
    await pause(stage)
    stage.thaw(pid)
    return pid
