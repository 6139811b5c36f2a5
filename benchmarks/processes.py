"""The processes of a local cluster that this process started, by what they do; and a seeded killer of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import psutil

TITLES: Final = {
    "actor": "ray::RunActor",
    "tool": "ray::attempt",
    "journal": "ray::JournalActor",
    "supervisor": "ray::SupervisorActor",
}
"""How the title of a process begins, by kind; a worker is called `ray::attempt` only while it runs one."""


def processes(*kinds: str) -> list[psutil.Process]:
    """The living processes of these kinds below this one, in the order of their pids."""
    titles = tuple(TITLES[kind] for kind in kinds)
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if line and line[0].startswith(titles):
            found.append(process)
    return sorted(found, key=lambda process: process.pid)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL that was sent."""

    kind: str
    pid: int
    at: float


@dataclass
class Killer:
    """Sends SIGKILL to processes of random kinds at random times; the same seed makes the same choices.

    weights: how often each kind is chosen. every_s: mean time between kills.
    """

    seed: int
    every_s: float
    say: Callable[[str], None]
    weights: dict[str, float] = field(
        default_factory=lambda: {"actor": 0.45, "tool": 0.3, "journal": 0.15, "supervisor": 0.1}
    )
    kills: list[Kill] = field(default_factory=list)

    async def run(self) -> None:
        """Kill until cancelled."""
        chance = random.Random(self.seed)
        while True:
            await asyncio.sleep(chance.uniform(0.5, 1.5) * self.every_s)
            kind = chance.choices(list(self.weights), list(self.weights.values()))[0]
            await self.kill_one(kind, chance)

    async def kill_one(self, kind: str, chance: random.Random) -> None:
        """Kill one process of a kind, as soon as there is one."""
        while not (found := await asyncio.to_thread(processes, kind)):  # noqa: ASYNC110 - nothing tells of them
            await asyncio.sleep(0.01)
        self.kill(kind, chance.choice(found).pid)

    def kill(self, kind: str, pid: int) -> None:
        """Send the signal and note it; nothing is noted of a process that was gone already."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills.append(Kill(kind, pid, time.time()))
        self.say(f"SIGKILL {len(self.kills)}: {kind} (process {pid})")

    def counts(self) -> dict[str, int]:
        """How many processes of each kind were killed."""
        return {kind: sum(kill.kind == kind for kill in self.kills) for kind in TITLES}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share (0..1) of the values lies; nan of no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else float("nan")
