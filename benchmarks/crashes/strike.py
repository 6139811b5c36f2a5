"""Bringing runs to a point, and killing who is there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import psutil

from perdure.benchmarks.processes import TITLES
from perdure.client import decisions
from perdure.store.events import Stored, ToolCallRequested, ToolCallRetried, ToolCallStarted, ToolResult
from perdure.store.states import Status

from .case import Case
from .plan import Plan
from .stage import Stage, until


class Missed(Exception):
    """A process was not where it was meant to be when it was stopped: the fault did not strike."""


async def play(stage: Stage, plans: Sequence[Plan]) -> list[Case]:
    """Runs of one point and victim, side by side: launched, struck and seen through. Raises Missed."""
    cases = [Case(stage, plan) for plan in plans]
    await stage.runtime.launch_many(stage.loaded, [case.request() for case in cases])
    await STRIKES[plans[0].point](stage, cases)
    await asyncio.gather(*(case.see_through() for case in cases))
    return cases


# -- coming to the point ------------------------------------------------------------------------------------


async def _all(cases: Sequence[Case], holds: Callable[[Case], bool], what: str) -> None:
    """Wait until something holds for every run."""

    async def look() -> bool:
        return all(map(holds, cases))

    await until(look, f"{what}: {cases[0].plan} and {len(cases) - 1} more")


async def at_its_place(stage: Stage, cases: Sequence[Case]) -> None:
    """Whoever is killed waits at the point itself."""
    await _all(cases, lambda case: bool(case.waits()), "at its place")
    await asyncio.sleep(cases[0].plan.delay_s)
    await kill(stage, cases)
    for case in cases:
        case.go("model")


async def on_its_way(stage: Stage, cases: Sequence[Case]) -> None:
    """The journal is stopped, the handlers return, the journal is killed."""
    await _all(cases, lambda case: bool(case.waits()), "at its place")
    journal = (await stage.working("journal")).pid
    stage.stop(journal)
    for case in cases:
        case.go("acted")
    await _all(cases, _has_returned, "its handler returned")
    await kill(stage, cases)


def _has_returned(case: Case) -> bool:
    """Whether the worker that waited serves no attempt any more."""
    line = case.waits()
    assert line
    try:
        title = psutil.Process(line["pid"]).cmdline()
    except psutil.NoSuchProcess:
        return True
    return not (title and title[0].startswith(TITLES["tool"]))


async def recorded(stage: Stage, cases: Sequence[Case]) -> None:
    """The results are let in, and who is to act on them is killed as soon as the last one is durable."""
    await _all(cases, lambda case: bool(case.waits()), "at its place")
    for case in cases:
        case.go("acted")
    await _all(cases, lambda case: stage.holds_result(case.run_id, case.plan.targets[0]), "its result is recorded")
    await kill(stage, cases)
    for case in cases:
        case.go("model")


async def decided(stage: Stage, cases: Sequence[Case]) -> None:
    """Who is to act on a decision is stopped, the decision is made, and he is killed."""
    for case in cases:
        outcome = await stage.runtime.outcome(case.run_id)
        assert outcome.status == Status.AWAITING_APPROVAL, f"{case.plan}: instead of asking it ended: {outcome}"
    victim = cases[0].plan.victim
    process = await stage.working(victim)
    await stage.stop_between_writes(process.pid)
    for case in cases:
        await decisions.approve(stage.runtime.log, case.run_id, case.plan.targets[0], by="ann")
        case.asked.append("approval")
    await asyncio.sleep(cases[0].plan.delay_s)
    await kill(stage, cases)


async def in_an_append(stage: Stage, cases: Sequence[Case]) -> None:
    """The journal is stopped inside of a transaction, with all these runs writing, and killed."""
    chance = random.Random(cases[0].plan.seed)
    journal = (await stage.working("journal")).pid
    await asyncio.sleep(cases[0].plan.delay_s)
    if not await stage.stop_in_a_write(journal, lambda: chance.uniform(0, 0.01)):
        raise Missed("the journal was never met inside of a transaction")
    live = stage.live([case.run_id for case in cases])
    await kill(stage, cases)
    if live < len(cases) / 2:
        raise Missed(f"only {live} of {len(cases)} runs had not ended")


STRIKES: dict[str, Callable[[Stage, Sequence[Case]], Awaitable[None]]] = {
    "before intent": at_its_place,
    "intent durable": at_its_place,
    "start mark written": at_its_place,
    "effect done": at_its_place,
    "result on its way": on_its_way,
    "result recorded": recorded,
    "decision recorded": decided,
    "in an append": in_an_append,
}


# -- the kill -----------------------------------------------------------------------------------------------


async def kill(stage: Stage, cases: Sequence[Case]) -> None:
    """Stop the victims, see that each run is at its point, kill them. Raises Missed when one is not."""
    kind = cases[0].plan.victim
    if kind == "tool":
        victims = {case.waiting_pid() for case in cases}
    elif kind == "actor":
        victims = {case.owner() for case in cases}
    else:
        victims = {(await stage.working(kind)).pid}
    for pid in victims:
        stage.stop(pid)
    seen = stage.written([case.run_id for case in cases])
    try:
        for case in cases:
            case.before = seen[case.run_id]
            if why := astray(case, await stage.runtime.log.read(case.run_id)):
                raise Missed(f"{case.plan}: {why}")
    finally:
        for pid in victims:
            stage.kill(kind, pid)


def astray(case: Case, stored: Sequence[Stored]) -> str:
    """Why a run is not at its point; empty if it is there."""
    if case.plan.point == "in an append":
        return ""
    (call_id,) = case.plan.targets
    about = [one.event for one in stored if getattr(one.event, "tool_call_id", "") == call_id]
    has = {type(event) for event in about}
    acts, entered = case.acts(call_id), any(line["call"] == call_id for line in case.lines("handler"))
    marked = case.plan.cls.startswith("non_idempotent")
    wrong = {
        "before intent": ToolCallRequested in has,
        "intent durable": ToolCallRequested not in has or ToolCallStarted in has or entered,
        "start mark written": not entered or bool(acts) or (marked and ToolCallStarted not in has),
        "effect done": acts != 1 or ToolResult in has,
        "result on its way": acts != 1 or ToolResult in has,
        "result recorded": ToolResult not in has or case.answered(case.plan.turn + 1, stored),
        "decision recorded": not about or ToolCallRetried in has or entered,
    }[case.plan.point]
    return f"it is not at its point, the log has {[event.type for event in about]}" if wrong else ""
