"""200 real multi-turn tool-calling tasks as one batch, with processes being killed if asked for.

    python benchmarks/bfcl/run.py [--chaos SEED] [--actors N] [--concurrency N] [--tasks N] [--json]

A task counts when its run completed and its final world equals the world after the same calls in one plain process.
Every effect must be in the world's applied record exactly once, and every log gapless and refolding to its stored
state. With --chaos, SIGKILL goes to run actors, tool workers, the journal and the supervisor throughout; the batch
is then repeated under other names until at least --kills processes were killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure import Runtime
from perdure.actors.machine import fold
from perdure.benchmarks.bfcl.agent import FOLDER_VARIABLE
from perdure.benchmarks.bfcl.data import DatasetUnavailable, Task, tasks
from perdure.benchmarks.bfcl.plain import expected
from perdure.benchmarks.bfcl.world import World
from perdure.benchmarks.processes import Kill, Killer, percentile
from perdure.client.launching import Request, check_agent
from perdure.client.runtime import Outcome
from perdure.store.events import RunClaimed, Stored

AGENT = f"{Path(__file__).resolve().with_name('agent.py')}:agent"


@dataclass
class Report:
    """What was seen over all rounds."""

    tasks: int = 0
    completed: int = 0
    equal: int = 0
    effects: int = 0
    doubled: int = 0
    missing: int = 0
    refolded: int = 0
    respawns: int = 0
    recovery_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def perfect(self) -> bool:
        """Whether every task is completed and equal, every effect there once, every log sound."""
        return self.completed == self.equal == self.refolded == self.tasks and not (self.doubled or self.missing)


async def play(runtime: Runtime, chosen: list[Task], name: str) -> dict[str, Outcome]:
    """Run the tasks as one batch; outcomes by task id."""
    loaded = check_agent(AGENT)
    requests = [
        Request(task.id, run_id=run_id(name, task), batch=name, sample=task.id, metadata={"task": task.id})
        for task in chosen
    ]
    runs = await runtime.launch_many(loaded, requests)
    outcomes = await asyncio.gather(*(run.outcome() for run in runs))
    return {task.id: outcome for task, outcome in zip(chosen, outcomes, strict=True)}


def run_id(name: str, task: Task) -> str:
    """A run id of fixed length for a task of a batch."""
    return f"{name}-{task.id.rpartition('_')[2].zfill(4)}"


async def examine(
    runtime: Runtime, folder: Path, task: Task, outcome: Outcome, kills: list[Kill], report: Report
) -> None:
    """Compare one run's world, record and log with what they should be."""
    report.tasks += 1
    report.completed += outcome.status == "completed"
    want = expected(task)
    with World.open(folder, outcome.run_id, task.instances) as world:
        equal = world.snapshot() == want.snapshot
        keys = Counter(record.key for record in world.applied())
    report.equal += equal
    report.effects += len(keys)
    report.doubled += sum(keys.values()) - len(keys)
    report.missing += want.effects - len(keys)
    events = await runtime.log.read(outcome.run_id)
    row = await runtime.log.run(outcome.run_id)
    state = fold(events)
    sound = row is not None and (state.status, state.seq, state.usage) == (row.status, row.seq, row.usage)
    report.refolded += sound
    report.recovery_s += recoveries(events, kills)
    report.respawns += sum(isinstance(e.event, RunClaimed) and e.event.reason != "start" for e in events)
    if outcome.status != "completed" or not equal or not sound:
        report.problems.append(f"{outcome.run_id}: {outcome.status} {outcome.error or ''} {outcome.message or ''}")


def recoveries(events: list[Stored], kills: list[Kill]) -> list[float]:
    """Seconds from a kill of a run actor to the first new event of the respawned run, the claim left out."""
    found = []
    for claim, after in itertools.pairwise(events):
        if isinstance(claim.event, RunClaimed) and claim.event.reason == "respawn":
            before = [kill.at for kill in kills if kill.kind == "actor" and kill.at <= claim.at]
            if before:
                found.append(after.at - max(before))
    return found


async def rounds(arguments: argparse.Namespace, folder: Path, say: Any) -> tuple[Report, Killer | None]:
    """Play the batch once, or with chaos until enough was killed."""
    chosen = list(tasks().values())[: arguments.tasks]
    report, killer = Report(), None
    if arguments.chaos is not None:
        killer = Killer(arguments.chaos, arguments.every, say)
    actors, concurrency = arguments.actors, arguments.concurrency
    async with Runtime(folder / "runs.db", actors=actors, concurrency=concurrency) as runtime:
        number = 0
        while number == 0 or (killer and len(killer.kills) < arguments.kills):
            began = time.monotonic()
            chaos = asyncio.create_task(killer.run()) if killer else None
            try:
                outcomes = await play(runtime, chosen, f"round{number:02}")
            finally:
                if chaos:
                    chaos.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await chaos
            report.wall_s += time.monotonic() - began
            for task in chosen:
                await examine(runtime, folder, task, outcomes[task.id], killer.kills if killer else [], report)
            say(f"round {number}: {report.equal} of {report.tasks} completed and equal, {report.wall_s:.1f} s")
            number += 1
    return report, killer


def figures(report: Report, killer: Killer | None) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "tasks": report.tasks,
        "completed": report.completed,
        "equal": report.equal,
        "effects": report.effects,
        "effects_doubled": report.doubled,
        "effects_missing": report.missing,
        "logs_gapless_and_refolding": report.refolded,
        "wall_s": round(report.wall_s, 1),
        "kills": killer.counts() if killer else {},
        "kills_total": len(killer.kills) if killer else 0,
        "respawns": report.respawns,
        "recovery_p50_s": round(percentile(report.recovery_s, 0.5), 2) if report.recovery_s else None,
        "recovery_p95_s": round(percentile(report.recovery_s, 0.95), 2) if report.recovery_s else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="BFCL multi-turn tasks on perdure")
    parser.add_argument("--chaos", type=int, metavar="SEED", help="kill processes throughout")
    parser.add_argument("--kills", type=int, default=40, help="with --chaos: how many kills at least")
    parser.add_argument("--every", type=float, default=1.0, help="with --chaos: mean seconds between kills")
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-bfcl-") as made:
        os.environ[FOLDER_VARIABLE] = made
        try:
            report, killer = asyncio.run(
                rounds(arguments, Path(made), lambda line: print(line, file=sys.stderr, flush=True))
            )
        except DatasetUnavailable as error:
            print(f"bfcl: {error}", file=sys.stderr)
            return 2
    values = figures(report, killer)
    if arguments.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"{name.replace('_', ' '):28} {value}")
    for problem in report.problems[:20]:
        print(f"problem: {problem}", file=sys.stderr)
    return 0 if report.perfect else 1


if __name__ == "__main__":
    sys.exit(main())
