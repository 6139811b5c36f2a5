"""What other limits would have made of a run: its log is gone through again, and the guards are asked at each turn.

Pure. A model that is refused a call may go on in another way than it did; how, nobody knows. Here it is taken to go on
as the log has it, with the refusals in the place of the results. So the first refusal is certain, and what follows from
it is likely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..store.budgets import Amount
from ..store.events import AssistantMessage, Stored, ToolResult
from ..store.states import Status
from .calls import Call, Turn
from .ceilings import is_final
from .guards import Limits, Refused, Stop, Wanted, changed, plan_turn
from .machine import State, fold
from .prices import PriceList
from .results import plain_error
from .standing import judged, loop_end, standing


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a run would have been stopped: after so many turns. `saved` is what the turns took that it had after that;
    its dollars are 0 where prices are not known."""

    turns: int
    code: str
    why: str
    turns_saved: int
    saved: Amount


@dataclass(frozen=True, slots=True)
class Replayed:
    """A run under other limits."""

    status: Status
    turns: int
    cut: Cut | None
    refused: Mapping[str, int]
    """How many calls would have been refused before that, by source of their results."""
    first_refused: int | None
    """The turn of the first of them."""
    priced: bool


def replay(events: Iterable[Stored], changes: Mapping[str, object]) -> Replayed:
    """A run under its own limits with some of them changed. A limit in dollars is left out where the model's prices are
    not known. Raises UsageError for a limit that makes no sense."""
    state, marks = _read(events)
    limits = changed(state.limits, changes)
    if state.prices is None:
        limits = limits.model_copy(update={"max_cost": None})
    refused: Counter[str] = Counter()
    first: int | None = None
    seen: list[Turn] = []
    cut: Cut | None = None
    used = Amount()
    for turn, (after, spent) in zip(state.turns, marks, strict=True):
        stop = _stop_before(limits, seen, after, used, state.prices)
        if stop:
            cut = _cut(state, len(seen), stop, used)
            break
        turn, sources = _guarded(limits, seen, after, turn)
        seen.append(turn)
        used = spent
        refused.update(sources)
        first = len(seen) - 1 if sources and first is None else first
        if turn.calls and is_final(len(seen) - 1, limits.max_turns) and len(seen) < state.turn_count:
            cut = _cut(state, len(seen), Stop("max_turns", "its last turn, with a notice and without tools"), used)
            break
    return Replayed(state.status, state.turn_count, cut, dict(refused), first, state.prices is not None)


def _read(events: Iterable[Stored]) -> tuple[State, list[tuple[int, Amount]]]:
    """The state of a log, and for each of its turns how many turns there were when the run was last resumed, and what
    was used by its end, calls that came to nothing included."""
    state: State | None = None
    marks: list[tuple[int, Amount]] = []
    for stored in events:
        state = fold([stored], state)
        if isinstance(stored.event, AssistantMessage):
            marks.append((state.resumed, state.used))
    return state or fold([]), marks


def _stop_before(
    limits: Limits, seen: Sequence[Turn], resumed: int, used: Amount, prices: PriceList | None
) -> Stop | None:
    """Why the turn after these is not begun."""
    if why := loop_end(limits, seen, resumed):
        return Stop("loop_detected", why)
    plan = plan_turn(limits, standing(seen, used, limits), prices)
    return plan if isinstance(plan, Stop) else None


def _guarded(limits: Limits, seen: Sequence[Turn], resumed: int, turn: Turn) -> tuple[Turn, list[str]]:
    """A turn with the refusals of its calls in the place of their results, and the sources of those."""
    wanted = [Wanted(call.request.name, call.request.arguments, _fits(call)) for call in turn.calls]
    verdicts = judged(limits, seen, resumed, wanted)
    calls = [_refused(call, no) if no else call for call, no in zip(turn.calls, verdicts, strict=True)]
    return turn._replace(calls=tuple(calls)), [no.source for no in verdicts if no]


def _fits(call: Call) -> bool:
    return call.result is None or call.result.source != "validation"


def _refused(call: Call, no: Refused) -> Call:
    content = plain_error(no.kind, no.why)
    result = ToolResult(tool_call_id=call.tool_call_id, attempt=1, content=content, is_error=True, source=no.source)
    return call._replace(result=result)


def _cut(state: State, turns: int, stop: Stop, used: Amount) -> Cut:
    return Cut(turns, stop.code, stop.message, state.turn_count - turns, state.used - used)
