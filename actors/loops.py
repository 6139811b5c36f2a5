"""Repetition: calls that go round in circles and bring nothing new. Pure.

A call is the same as another when tool and arguments are; the order of keys does not matter. A loop is a cycle of one
to `PERIOD_MAX` calls that was gone through `repeats - 1` times in a row, where every call has had the same result each
time. The next time round is intercepted: its calls are not executed, and are answered with `explanation`. A result
that changes, such as that of a poll, breaks a loop; so does any call that is not next in the cycle. Attempts of one
call are one call. A turn of intercepted calls and nothing else is the warning; a second one in a row ends the run.

A turn's calls are judged together, before any of them starts. None of them has a result yet, so they only go on with a
cycle that earlier turns have shown: three like calls side by side are no loop.

For the machine: a `Made` per finished call of the turns before, in call order, since the run was last resumed (a
resumed run starts afresh); `intercepted` is `result.source == "loop"`, `outcome` comes from `outcome_of`. The newest
`window(repeats)` of them and all of the last two turns are enough. `guards.judge_calls` asks `looping` in `turn_events`
before arguments are looked at, so that a call that is refused again and again counts too; `next_step` asks `went_on`
when no call is open, before it starts a turn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..store.events import canonical

PERIOD_MAX: Final = 4
"""The longest cycle that is looked for, in calls."""

_SAME_WHATEVER_THEY_SAY: Final = frozenset({"crash", "timeout"})
"""Sources whose results name an attempt, a process or a time, and mean the same."""


@dataclass(frozen=True, slots=True)
class Made:
    """A finished call. `call` and `outcome` are hashes that are equal for like calls and like results."""

    turn: int
    tool: str
    call: str
    outcome: str
    intercepted: bool = False


@dataclass(frozen=True, slots=True)
class Loop:
    """Which calls of a turn are in a loop: the first `calls` of them. `cycle` names its tools, in the order in which
    they would come next."""

    calls: int
    cycle: tuple[str, ...]


def call_hash(tool: str, arguments: str) -> str:
    """What like calls have in common. `arguments` is JSON text; text that is not is taken as it stands."""
    with contextlib.suppress(ValueError, RecursionError):
        arguments = canonical(json.loads(arguments))
    return _sha256(canonical([tool, arguments]))


def outcome_of(content: str, is_error: bool, source: str) -> str:
    """What like results have in common."""
    return _sha256(canonical([is_error, source if source in _SAME_WHATEVER_THEY_SAY else content]))


def window(repeats: int) -> int:
    """How many finished calls before the last warning are looked at."""
    return PERIOD_MAX * (repeats - 1)


def looping(past: Sequence[Made], calls: Sequence[str], repeats: int | None) -> Loop | None:
    """The loop that a turn of these calls, given by their hashes, would go on with. None as `repeats`: off. It is at
    least 3, since it takes two rounds to see whether a result changes.

    Of several cycles the one that most of the calls belong to counts, the shortest first.
    """
    if repeats is None or not calls:
        return None
    body, tail = _warned(past)
    best: Loop | None = None
    for period in range(1, PERIOD_MAX + 1):
        cycle = _cycle(body, period, repeats)
        if not cycle or any(made.call != cycle[n % period].call for n, made in enumerate(tail)):
            continue
        begun = len(tail)
        like = (call == cycle[(begun + n) % period].call for n, call in enumerate(calls))
        count = next((n for n, same in enumerate(like) if not same), len(calls))
        if count > (best.calls if best else 0):
            names = tuple(cycle[(begun + n) % period].tool for n in range(period))
            best = Loop(count, names)
    return best


def went_on(past: Sequence[Made]) -> str:
    """Why a run ends whose last two turns were nothing but a loop; empty where it goes on."""
    newest = past[-1].turn if past else 0
    last, before = ([made for made in past if made.turn == turn] for turn in (newest, newest - 1))
    if not (last and before and all(made.intercepted for made in (*last, *before))):
        return ""
    tools = ", ".join(sorted({made.tool for made in last}))
    return f"the model went on with the same calls ({tools}) after it had been told that they bring nothing new"


def explanation(loop: Loop, repeats: int) -> str:
    """What the model is told in the place of a result."""
    if len(loop.cycle) == 1:
        what = f"the same call of {loop.cycle[0]}, with the same arguments, had the same result each time"
    else:
        what = f"the same calls ({', '.join(loop.cycle)}), with the same arguments, had the same results each time"
    return (
        f"not executed: {what}, {repeats - 1} times in a row, so one more would bring nothing new. Change the "
        "arguments, do something else, or answer with what is known. Going on with it ends the run."
    )


def _warned(past: Sequence[Made]) -> tuple[Sequence[Made], Sequence[Made]]:
    """The calls before the last turn, and that turn, where it was a warning; else all calls and nothing."""
    start = len(past)
    while start and past[start - 1].turn == past[-1].turn:
        start -= 1
    tail = past[start:]
    return (past[:start], tail) if tail and all(made.intercepted for made in tail) else (past, ())


def _cycle(body: Sequence[Made], period: int, repeats: int) -> Sequence[Made]:
    """The newest calls, if they are `repeats - 1` rounds of one cycle of this length, else nothing."""
    length = period * (repeats - 1)
    seen = body[len(body) - length :] if len(body) >= length else ()
    outcomes: dict[tuple[str, bool], str] = {}
    for n, made in enumerate(seen):
        known = outcomes.setdefault((made.call, made.intercepted), made.outcome)
        if made.call != seen[n % period].call or known != made.outcome:
            return ()
    return seen[:period]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
