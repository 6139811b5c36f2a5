"""kill -9 at every point of a call, for every class of effect; each has one outcome, whoever dies there.

    python benchmarks/crash_points.py [--seeds N] [--point NAME ...] [--cls NAME ...] [--side N] [--json]

A seed draws what else the run does, where in its turn the call stands, how long the point lasts, and which of the
processes there is killed. Effects are counted in a ledger outside. Ends with 1 when an outcome is not the one that
the table in `crashes/table.py` has for its class and point, or an effect was done twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from perdure.benchmarks.crashes.report import Report
from perdure.benchmarks.crashes.stage import Stage, runtime_for
from perdure.benchmarks.crashes.sweep import sweep
from perdure.benchmarks.crashes.table import CLASSES, POINTS


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="seeds of each class and point")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--point", action="append", choices=POINTS, help="only these points")
    parser.add_argument("--cls", action="append", choices=CLASSES, help="only these classes")
    parser.add_argument("--side", type=int, default=10, help="runs that are struck side by side")
    parser.add_argument("--json", action="store_true", help="one JSON line for every class and point")
    return parser.parse_args(arguments)


async def run(chosen: argparse.Namespace, folder: Path) -> Report:
    report = Report()
    began = time.monotonic()
    async with runtime_for(folder) as runtime:
        stage = Stage(runtime, folder)
        seeds = range(chosen.first, chosen.first + chosen.seeds)
        await sweep(stage, report, chosen.cls or CLASSES, chosen.point or POINTS, seeds, chosen.side)
        report.kills.update(stage.sent)
        stage.close()
    report.took_s = time.monotonic() - began
    return report


def main() -> int:
    chosen = options()
    with tempfile.TemporaryDirectory(prefix="crash-points-") as folder:
        report = asyncio.run(run(chosen, Path(folder)))
    for line in report.json_lines() if chosen.json else report.table():
        print(line)
    totals = report.totals()
    print(json.dumps(totals) if chosen.json else "\n".join(f"{name}: {value}" for name, value in totals.items()))
    return 1 if report.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
