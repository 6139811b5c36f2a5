"""The drill: the undisturbed run, twice, then one run per crash point, each brought to its end whatever happens."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final, Self
from uuid import uuid4

from ..actors.kernel import runtime_folder
from ..store.errors import PerdureError, UsageError
from ..store.events import Stored
from ..store.rows import RunRow
from ..store.sql import open_log
from .life import Part, Play
from .points import Point, points_of
from .verdict import Trace, Verdict, different, facts, judge
from .zygote import Zygote

PATIENCE: Final = 20.0
"""A life may take so many times the undisturbed run's time, and not less than LIFE_MIN_S."""
LIFE_MIN_S: Final = 60.0


class Drill:
    """One drill, in a folder of its own. To be entered before the process starts a thread or loads the agent."""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="perdure-drill-"))
        self._store = f"drill-{uuid4().hex[:12]}"
        self._zygote = Zygote()
        return self

    def __exit__(self, *exception: object) -> None:
        self._zygote.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(runtime_folder(self._store), ignore_errors=True)

    def rehearse(self, part: Part, longest_tool_s: float) -> list[Point]:
        """Run undisturbed. Returns the crash points of the run. Raises UsageError."""
        self._part, self._life_s = part, None
        self.clean, again = self._run(None), self._run(None)
        self.varying = different(facts(self.clean), facts(again))
        for trace in (self.clean, again):
            if facts(trace)["status"] != "completed":
                raise UsageError(f"undisturbed, the run does not complete: it ends as {_ending(trace)}")
        if self.clean.lines != again.lines:
            raise UsageError(f"undisturbed, {part.effects} grows by {self.clean.lines} lines and then {again.lines}")
        took_s = self.clean.events[-1].at - self.clean.events[0].at
        self._life_s = max(LIFE_MIN_S, PATIENCE * took_s) + longest_tool_s
        return points_of(self.clean.notes)

    def strike(self, point: Point) -> Verdict:
        """A run that is killed at this point."""
        return judge(self._run(point), point, self.clean, self.varying)

    _life_s: float | None

    def _run(self, point: Point | None) -> Trace:
        """One run, brought to its end: a life, and after the point's kill another one."""
        folder = self.folder / uuid4().hex[:8]
        folder.mkdir()
        play = Play(self._part, folder, self._store, point, self._life_s)
        before = self._lines()
        codes = [self._zygote.live(play)]
        if codes[0] and any(note.what == "killed" for note in play.ledger.read()):
            codes.append(self._zygote.live(replace(play, point=None)))
        after, notes = self._lines(), play.ledger.read()
        if failures := [note.text for note in notes if note.what == "failed"]:
            raise PerdureError(f"the drill itself failed{f', killed {point}' if point else ''}: {failures[0]}")
        row, events = asyncio.run(_stored(play))
        shutil.rmtree(folder)
        lines = None if before is None or after is None else after - before
        return Trace(row, events, notes, tuple(codes), lines)

    def _lines(self) -> int | None:
        effects = self._part.effects
        if effects is None:
            return None
        return len(effects.read_bytes().splitlines()) if effects.exists() else 0


async def _stored(play: Play) -> tuple[RunRow, list[Stored]]:
    event_log = await open_log(play.db, read_only=True)
    try:
        row = await event_log.run(play.run_id)
        if row is None:
            raise PerdureError("a run of the drill was never created")
        return row, await event_log.read(play.run_id)
    finally:
        await event_log.close()


def _ending(trace: Trace) -> str:
    message = getattr(trace.events[-1].event, "message", "")
    return facts(trace)["status"] + (f" ({message})" if message else "")
