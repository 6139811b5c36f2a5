"""What became of a run that was killed: compared with the undisturbed one, and its effects counted. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..actors.machine import idempotency_key
from ..store.events import RunCompleted, Stored, ToolCallRequested, ToolResult, canonical
from ..store.rows import RunRow
from .ledger import Note
from .points import Point


@dataclass(frozen=True)
class Trace:
    """A run of the drill that has come to its end, or to the end of its time."""

    row: RunRow
    events: Sequence[Stored]
    notes: Sequence[Note]
    codes: tuple[int, ...] = (0,)
    """Exit codes of the run's lives, a killing signal as a negative number."""
    lines: int | None = None
    """How many lines the user's ledger grew by."""

    @property
    def hung(self) -> bool:
        """Whether the run was given up before it had ended."""
        return self.codes[-1] != 0

    @property
    def struck(self) -> bool:
        """Whether the point's kill was seen from outside."""
        victims = [note.text for note in self.notes_of("killed")]
        if victims == ["tool"]:
            return bool(self.notes_of("died"))
        return victims == ["all"] and self.codes[0] == -signal.SIGKILL

    @property
    def calls(self) -> dict[str, ToolCallRequested]:
        return {s.event.tool_call_id: s.event for s in self.events if isinstance(s.event, ToolCallRequested)}

    def notes_of(self, what: str) -> list[Note]:
        return [note for note in self.notes if note.what == what]


@dataclass(frozen=True)
class Verdict:
    """One crash point. `differences` are from the undisturbed run, `questions` what a person was asked."""

    point: Point
    where: str
    struck: bool
    status: str
    differences: tuple[str, ...]
    duplicates: tuple[str, ...]
    questions: tuple[str, ...]
    repeated: int
    """Calls whose handler was entered more than once."""
    lost_s: float | None
    """From the kill to the next event, in the drill's own processes; None when nothing followed."""
    settling_s: float
    """Settling times that were skipped, and that a real run would have waited."""

    @property
    def bad(self) -> bool:
        """Whether an effect was doubled, or the run ended differently and no question explains it."""
        return bool(self.duplicates) or (bool(self.differences) and not self.questions)


def facts(trace: Trace) -> dict[str, str]:
    """What a run came to, in terms that do not depend on how it got there."""
    calls, last = list(trace.calls), trace.events[-1].event
    found = {"status": trace.row.status.value + (f": {trace.row.error}" if trace.row.error else "")}
    if trace.hung:
        found["status"] += ", no end in time"
    found["output"] = canonical(last.output) if isinstance(last, RunCompleted) else ""
    if trace.lines is not None:
        found["effects in the ledger"] = str(trace.lines)
    for stored in trace.events:
        if isinstance(event := stored.event, ToolResult):
            found[f"result of {event.tool_call_id}"] = ("error " if event.is_error else "") + event.content
    found = {name: neutral(text, trace.row.run_id, calls) for name, text in found.items()}
    asked: dict[str, set[str]] = {}
    for note in trace.notes_of("asked"):
        asked.setdefault(f"model request {note.attempt}", set()).add(note.text)
    return found | {name: " ".join(sorted(digests)) for name, digests in asked.items()}


def different(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """The names of facts that are not the same in both."""
    return tuple(name for name in {**one, **other} if one.get(name) != other.get(name))


def duplicates(trace: Trace, lines: int | None) -> Iterator[str]:
    """Effects that were or may have been made twice. `lines` is what the user's ledger grew by undisturbed."""
    for call_id, request in trace.calls.items():
        notes = [note for note in trace.notes if note.call == call_id]
        entered = [note for note in notes if note.what == "entered"]
        name = f"{request.name} ({call_id})"
        if request.effect != "read_only" and len({note.key for note in entered}) > 1:
            yield f"{name} was called with {len({note.key for note in entered})} idempotency keys"
        if request.effect != "non_idempotent":
            continue
        returned = [note.attempt for note in notes if note.what == "returned"]
        denied = {note.attempt for note in notes if note.text in ("did_not_happen", "not_happened")}
        if len(returned) > 1:
            lied = " though its probe said that it had not happened" if denied & set(returned) else ""
            yield f"{name} returned {len(returned)} times{lied}"
        elif unsaid := [note.attempt for note in entered[:-1] if note.attempt not in denied]:
            yield f"{name} was entered again, and nobody had said that attempt {unsaid[0]} did not happen"
    if lines is not None and trace.lines is not None and trace.lines > lines:
        yield f"the ledger has {trace.lines} new lines, undisturbed it has {lines}"


def judge(trace: Trace, point: Point, clean: Trace, varying: Sequence[str]) -> Verdict:
    """The verdict on one crash point. `varying` are facts that differ without any crash."""
    doubled = tuple(duplicates(trace, clean.lines))
    unlike = [name for name in different(facts(trace), facts(clean)) if name not in varying]
    entries: dict[str, int] = {}
    for note in trace.notes_of("entered"):
        entries[note.call] = entries.get(note.call, 0) + 1
    answers = {(n.call, n.attempt): n for n in trace.notes_of("answered")}
    return Verdict(
        point,
        where(point, trace.calls or clean.calls),
        struck=trace.struck,
        status=facts(trace)["status"],
        differences=tuple(unlike),
        duplicates=doubled,
        questions=tuple(f"{note.tool} ({note.call}): {note.text}" for note in answers.values()),
        repeated=sum(count > 1 for count in entries.values()),
        lost_s=_lost(trace, point),
        settling_s=sum(note.seconds for note in trace.notes_of("waited")),
    )


def where(point: Point, calls: Mapping[str, ToolCallRequested]) -> str:
    """A point for people: its key, and the tool's name for a call."""
    named = [word for word in point.key.split() if word in calls]
    return f"{point.moment} {point.key}" + (f" ({calls[named[0]].name})" if named else "")


def _lost(trace: Trace, point: Point) -> float | None:
    killed = trace.notes_of("killed")
    if not killed:
        return None
    call = next(word for word in point.key.split() if word in trace.calls) if point.victim == "tool" else None
    later = (
        stored.at - killed[0].at
        for stored in trace.events
        if stored.at > killed[0].at and (call is None or getattr(stored.event, "tool_call_id", None) == call)
    )
    return next(later, None)


def neutral(text: str, run_id: str, calls: Sequence[str]) -> str:
    """The text without what is another in each run: the run's id and the idempotency keys of its calls."""
    for call in calls:
        text = text.replace(idempotency_key(run_id, call), f"(key of {call})")
    return text.replace(run_id, "(run)")
