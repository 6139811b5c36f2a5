"""What a demonstration has to show: read from the logs and from the world outside, after everything is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from perdure import PerdureError, Runtime
from perdure.actors.machine import fold
from perdure.store.events import RunClaimed, Stored
from perdure.store.states import Status

from .support_desk import payments
from .wreckage import KINDS, Kill

Refund = tuple[str, str]
"""A run and an order."""


@dataclass
class Report:
    """Findings. `trouble` lists, in words, everything that should not be."""

    runs: int
    completed: int = 0
    kills: list[Kill] = field(default_factory=list)
    events: int = 0
    respawns: int = 0
    respawn_s: list[float] = field(default_factory=list)
    """From the kill of a run actor to the first new event of each of its runs: a new owner's claim."""
    working_s: list[float] = field(default_factory=list)
    """From the kill of a run actor to the first thing that each of its runs did afterwards."""
    wanted: int = 0
    made: int = 0
    trouble: list[str] = field(default_factory=list)

    def killed(self, kind: str) -> int:
        return sum(kill.kind == kind for kill in self.kills)

    def lines(self) -> Iterable[tuple[str, str]]:
        """The report as a table of two columns."""
        yield "runs completed", f"{self.completed} of {self.runs}"
        yield "killed", ", ".join(f"{kind} {self.killed(kind)}x" for kind in KINDS)
        yield "runs respawned", f"{self.respawns}"
        yield "  kill to new owner", spread(self.respawn_s)
        yield "  kill to next step", spread(self.working_s)
        for kind in ("journal", "supervisor"):
            yield (
                f"{kind} back after",
                spread([kill.back_s for kill in self.kills if kill.kind == kind and kill.back_s]),
            )
        yield "refunds wanted, made", f"{self.wanted}, {self.made}"
        yield "events in the logs", f"{self.events}"
        for text in self.trouble or ["none: nothing doubled, missing or left behind, every log gapless"]:
            yield "trouble", text


def spread(times: list[float]) -> str:
    """The middle and the worst of some times."""
    return f"p50 {median(times):.2f} s, max {max(times):.2f} s" if times else "-"


def check_ledger(report: Report, folder: Path, wanted: set[Refund]) -> None:
    """Compare what was paid with what should have been."""
    paid = Counter((entry["run"], entry["order"]) for entry in payments(folder))
    report.wanted, report.made = len(wanted), paid.total()
    report.trouble += [f"order {order} of run {run} was paid {n} times" for (run, order), n in paid.items() if n > 1]
    report.trouble += [f"order {order} of run {run} was not paid" for run, order in wanted - paid.keys()]
    report.trouble += [f"order {order} of run {run} was paid unasked" for run, order in paid.keys() - wanted]


async def check_logs(report: Report, runtime: Runtime) -> None:
    """Read every log, fold it, and hold it against what the store says of the run."""
    for row in await runtime.log.runs():
        events = await runtime.log.read(row.run_id)
        report.events += len(events)
        try:
            state = fold(events)  # refuses a gap, an illegal event, a second result
        except PerdureError as error:
            report.trouble.append(f"the log of run {row.run_id} does not fold: {error}")
            continue
        if (state.status, state.seq) != (row.status, row.seq):
            report.trouble.append(f"run {row.run_id} is {row.status}, but its log says {state.status}")
        if row.status is Status.COMPLETED:
            report.completed += 1
        else:
            report.trouble.append(f"run {row.run_id} is {row.status}: {row.error or 'unfinished'}")
        recovery(report, row.run_id, events)


def recovery(report: Report, run_id: str, events: list[Stored]) -> None:
    """When the run was claimed anew, and how long after the death of its actor."""
    claims = [s for s in events if isinstance(s.event, RunClaimed) and s.event.reason != "start"]
    report.respawns += len(claims)
    deaths = [kill.at for kill in report.kills if kill.kind == "run actor" and run_id in kill.run_ids]
    for death in deaths:
        claim = next((stored for stored in claims if stored.at > death), None)
        if claim is None:
            continue  # it had ended in the meantime
        report.respawn_s.append(claim.at - death)
        work = (stored.at for stored in events[claim.seq :] if not isinstance(stored.event, RunClaimed))
        report.working_s += [at - death for at in list(work)[:1]]
