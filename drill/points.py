"""Crash points: where a run of the drill is killed, and the hand that kills.

A point is named by what happens there and not by a number, so it is the same in a run whose calls overtake each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..store.events import AssistantMessage, Event
from ..store.log import Append, Claim, Command, Leave
from .ledger import Ledger, Note

Moment = Literal["before", "after"]
Victim = Literal["all", "tool"]


@dataclass(frozen=True)
class Point:
    """Kill `victim` before or after what `key` names: an append, the handler of a call, or a line inside of it.

    all: the journal, the run's owner and all tools, as when a machine goes down. tool: the process of that attempt.
    """

    moment: Moment
    key: str
    victim: Victim = "all"


def append_keys(command: Command) -> list[str]:
    """The names of what a command appends, the telling one first; none for one that appends nothing by itself."""
    match command:
        case Leave():
            return []
        case Append():
            telling_first = sorted(command.events, key=lambda event: not isinstance(event, AssistantMessage))
            return [_event_key(event) for event in telling_first]
        case Claim():
            return [f"run_claimed {command.seen_epoch + 1}"]
    event: Event | None = getattr(command, "event", None)
    return [_event_key(event)] if event else []


def _event_key(event: Event) -> str:
    place = [getattr(event, name) for name in ("turn_index", "tool_call_id") if hasattr(event, name)]
    attempt = getattr(event, "attempt", 1)
    return " ".join(map(str, [event.type, *place, *([attempt] if attempt > 1 else [])]))


def handler_key(call_id: str, attempt: int) -> str:
    """The name of one attempt's handler."""
    return f"handler {call_id}" + (f" {attempt}" if attempt > 1 else "")


def line_key(call_id: str, attempt: int, line: int) -> str:
    """The name of a line of one attempt's handler."""
    return f"line {line} of {call_id}" + (f" {attempt}" if attempt > 1 else "")


def points_of(notes: Iterable[Note]) -> list[Point]:
    """All points that an undisturbed run passed, each once, in order."""
    found: dict[Point, None] = {}
    for note in notes:
        if note.what == "reached":
            moment: Moment = "before" if note.text == "before" else "after"
            point = Point(moment, note.place)
            found[point] = None
            if note.place.startswith("handler "):
                found[Point(moment, note.place, "tool")] = None
    return list(found)


class Striker:
    """Kills at its point. Where it has none it notes which points are passed."""

    def __init__(self, point: Point | None, ledger: Ledger, life: int) -> None:
        """`life` is the process that the journal and the owner live in."""
        self._point, self._ledger, self._life = point, ledger, life

    def reach(self, moment: Moment, keys: Sequence[str]) -> None:
        """The process that calls is at this place, which has any of these names; the first is noted. Does not return
        where it is to be killed."""
        if self._point is None:
            self._ledger.write(Note("reached", place=keys[0], text=moment))
        elif self._point.moment == moment and self._point.key in keys:
            self._ledger.write(Note("killed", place=keys[0], text=self._point.victim))
            if self._point.victim == "all":
                os.kill(self._life, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
