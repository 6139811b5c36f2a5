"""Freezing each kind of process for three lease periods, in each phase of a run, and thawing it.

    python benchmarks/zombies.py [--seeds N] [--victim NAME ...] [--json]

Meanwhile the work goes to others where it has to. After each scene: the run has completed, its log is whole and holds
nothing of an owner that was replaced, no effect was done twice, who was frozen is gone or goes on as before, and there
is one journal, one supervisor and no attempt left behind. Ends with 1 when anything of that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from perdure.benchmarks.crashes.scenes import SCENES
from perdure.benchmarks.crashes.stage import Stage, runtime_for
from perdure.benchmarks.crashes.table import Victim
from perdure.benchmarks.crashes.takeover import takeover
from perdure.benchmarks.crashes.thaw import thawed

VICTIMS: Final[tuple[Victim, ...]] = ("actor", "tool", "journal", "supervisor")
TAKEOVER: Final = "supervisor, another Runtime takes over: gives up"


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="how often each scene is played")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--victim", action="append", choices=VICTIMS, help="only these processes")
    parser.add_argument("--phase", default="", help="only scenes with this text in their phase")
    parser.add_argument("--json", action="store_true", help="one JSON line for every scene")
    return parser.parse_args(arguments)


async def run(chosen: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """What was wrong with each scene, by seed; empty where nothing was."""
    wanted = chosen.victim or VICTIMS
    found: dict[str, list[str]] = {}
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    async with runtime_for(folder) as runtime:
        stage = Stage(runtime, folder)
        for scene in [scene for scene in SCENES if scene.victim in wanted and chosen.phase in scene.phase]:
            for seed in seeds:
                await tried(found, f"{scene.name}: {scene.fate}", seed, thawed(stage, scene, seed))
        stage.close()
    if "supervisor" in wanted and chosen.phase in TAKEOVER:
        for seed in seeds:
            own = folder / f"takeover-{seed}"
            own.mkdir()
            await tried(found, TAKEOVER, seed, takeover(own, seed))
    return found


async def tried(found: dict[str, list[str]], name: str, seed: int, play: Coroutine[Any, Any, object]) -> None:
    """Play a scene and note what was wrong."""
    try:
        await play
    except AssertionError as error:
        found.setdefault(name, []).append(f"seed {seed}: {error}")
    else:
        found.setdefault(name, []).append("")
    print(f"{name}, seed {seed}: {found[name][-1] or 'well'}", file=sys.stderr)


def main() -> int:
    chosen, began = options(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zombies-") as folder:
        found = asyncio.run(run(chosen, Path(folder)))
    wrong = 0
    for name, seeds in found.items():
        bad = [text for text in seeds if text]
        wrong += len(bad)
        if chosen.json:
            print(json.dumps({"scene": name, "tried": len(seeds), "wrong": bad}))
        else:
            print(f"{len(seeds) - len(bad):>3} of {len(seeds):<3} {name}", *bad, sep="\n      ")
    print(f"{sum(map(len, found.values()))} freezes, {wrong} breaches, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
