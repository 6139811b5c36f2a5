"""What the guards are told of a run: how far it has got, and the calls that it made. Pure, read off its turns.

A guard looks at whole turns: it is asked when no call is open, or before the calls of a new turn start.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..store.budgets import Amount
from .calls import Call, Turn
from .ceilings import takes_place
from .guards import Limits, Refused, Standing, Wanted, judge_calls
from .loops import Made, call_hash, outcome_of, went_on, window


def standing(turns: Sequence[Turn], used: Amount, limits: Limits) -> Standing:
    """How far a run has got with these turns, for which it has used so much. The tools are left out where these limits
    look at none: a long run has many."""
    counts = limits.max_tool_calls is not None or len(turns) >= limits.max_turns - 1
    calls = [call for turn in turns for call in turn.calls] if counts else []
    return Standing(
        turn_count=len(turns),
        used=used,
        last=turns[-1].message.usage if turns else None,
        said=next((turn.message.text for turn in reversed(turns) if turn.message.text.strip()), ""),
        tools=tuple(call.request.name for call in calls if takes_place(call.result.source if call.result else None)),
    )


def judged(limits: Limits, turns: Sequence[Turn], resumed: int, calls: Sequence[Wanted]) -> tuple[Refused | None, ...]:
    """What the guards say to each call of the turn after these; `resumed` of them are from before the newest resume."""
    recent = _recent(turns[resumed:], limits.max_repeats)
    first = calls[0] if calls else None
    if first and any((first.tool, first.arguments) == (c.request.name, c.request.arguments) for _, c in recent):
        past = [_made(turn_index, call) for turn_index, call in recent]
    else:
        past = []  # a loop goes on with its next call; results are not hashed for nothing
    return judge_calls(limits, standing(turns, Amount(), limits), past, calls)


def loop_end(limits: Limits, turns: Sequence[Turn], resumed: int) -> str:
    """Why a run with these turns ends that does nothing but go on with a loop; empty where it goes on."""
    if limits.max_repeats is None or not turns or not any(_intercepted(call) for call in turns[-1].calls):
        return ""
    return went_on([_made(turn_index, call) for turn_index, call in _recent(turns[resumed:], limits.max_repeats)])


def _recent(turns: Sequence[Turn], repeats: int | None) -> list[tuple[int, Call]]:
    """The finished calls of these turns, in order, as far back as `loops` looks; all of the last two turns at least."""
    if repeats is None:
        return []
    newest_first: list[tuple[int, Call]] = []
    before_last = 0
    for n, turn in enumerate(reversed(turns)):
        if n >= 2 and len(newest_first) - before_last >= window(repeats):
            break
        newest_first += [(turn.message.turn_index, call) for call in reversed(turn.calls) if call.result]
        before_last = before_last if n else len(newest_first)
    return newest_first[::-1]


def _intercepted(call: Call) -> bool:
    return call.result is not None and call.result.source == "loop"


def _made(turn_index: int, call: Call) -> Made:
    request, result = call.request, call.result
    assert result is not None
    outcome = outcome_of(result.content, result.is_error, result.source)
    return Made(turn_index, request.name, call_hash(request.name, request.arguments), outcome, _intercepted(call))
