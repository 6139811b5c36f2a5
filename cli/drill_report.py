"""What `drill` says: a row for each crash point, then the sums, what was wrong, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..drill.verdict import Verdict
from .text import duration, line, table

HEAD = "CRASH POINT", "KILLED", "OUTCOME", "DOUBLED", "ASKED", "TIME LOST"


@dataclass(frozen=True)
class DrillReport:
    """A finished drill. `varying` is what differed between the two undisturbed runs."""

    verdicts: Sequence[Verdict]
    varying: Sequence[str]
    advice: Sequence[str]

    def sums(self) -> dict[str, Any]:
        """The drill in figures."""
        verdicts = self.verdicts
        lost = [verdict.lost_s for verdict in verdicts if verdict.lost_s is not None]
        return {
            "points": len(verdicts),
            "kills": sum(verdict.struck for verdict in verdicts),
            "as_undisturbed": sum(not verdict.differences for verdict in verdicts),
            "doubled": sum(len(verdict.duplicates) for verdict in verdicts),
            "questions": sum(len(verdict.questions) for verdict in verdicts),
            "repeated_calls": sum(verdict.repeated for verdict in verdicts),
            "lost_s_median": median(lost) if lost else None,
            "lost_s_max": max(lost, default=None),
            "settling_s_skipped": sum(verdict.settling_s for verdict in verdicts),
            "varying": list(self.varying),
        }

    def objects(self) -> Iterator[dict[str, Any]]:
        """The report for programs."""
        for verdict in self.verdicts:
            shown = asdict(verdict)
            yield {"type": "point", **shown.pop("point"), **shown, "bad": verdict.bad}
        for text in self.advice:
            yield {"type": "advice", "text": text}
        yield {"type": "summary", **self.sums()}

    def lines(self) -> Iterator[str]:
        """The report for people."""
        yield from table(HEAD, [_row(verdict) for verdict in self.verdicts])
        sums = self.sums()
        yield ""
        yield (
            f"{sums['points']} crash points, {sums['kills']} kills: {sums['as_undisturbed']} ended as undisturbed, "
            f"{sums['doubled']} effects doubled, {sums['questions']} questions to a person"
        )
        if sums["lost_s_max"] is not None:
            lost = f"time lost {_seconds(sums['lost_s_median'])} in the median, {_seconds(sums['lost_s_max'])} at most"
            skipped = sums["settling_s_skipped"]
            yield lost + (f"; settling times skipped: {duration(skipped)} in all" if skipped else "")
        if sums["repeated_calls"]:
            yield f"calls that ran again, as their class allows or a probe or person said: {sums['repeated_calls']}"
        if self.varying:
            yield f"not compared, as it varies without a crash too: {line(', '.join(self.varying), None)}"
        for verdict in self.verdicts:
            for reason in verdict.duplicates:
                yield f"DOUBLED, {_killed(verdict)} killed {line(verdict.where)}: {line(reason)}"
            if verdict.bad and verdict.differences:
                yield f"DIFFERENT, {_killed(verdict)} killed {line(verdict.where)}: {', '.join(verdict.differences)}"
        for text in self.advice:
            yield f"advice: {line(text, None)}"


def _row(verdict: Verdict) -> tuple[str, ...]:
    if not verdict.struck:
        outcome = "not reached"
    elif verdict.differences:
        outcome = f"{verdict.status}, different: {', '.join(verdict.differences)}"
    else:
        outcome = f"{verdict.status}, as undisturbed"
    lost = "-" if verdict.lost_s is None else _seconds(verdict.lost_s)
    return (
        line(verdict.where),
        _killed(verdict),
        line(outcome, 80),
        str(len(verdict.duplicates)),
        line("; ".join(verdict.questions) or "-", 60),
        lost + (f" + {verdict.settling_s:g} s settling" if verdict.settling_s else ""),
    )


def _killed(verdict: Verdict) -> str:
    return "everything" if verdict.point.victim == "all" else "the tool"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else duration(seconds)
