"""Ceilings on turns and tool calls, and how a run ends that comes to its last turn. Pure.

Calls. What may run is decided for the whole turn before any call of it starts. Each call whose arguments fit takes a
place, in call order, whatever becomes of it later (denied, rejected, failed); once a ceiling is reached, the rest are
answered with an error and take no place. So with `max_tool_calls=6` a turn of 8 calls runs 6, and a run that is resumed
with a higher limit goes on counting from 6.

Turns. Every request says how many turns remain. In the last one (`is_final`) the model is told to answer now or to hand
over what it has, and has no tools; a call that it makes in spite of that is answered with an error, and the run ends
(`final_answer`). A run of a single turn keeps its tools: it has no turn in which it could have been told.

For the machine: `takes_place` tells by the source of a call's result whether the call counts. The notice of the
last turn is recorded before the turn is asked, with `final_notice` as its text, so that a replay shows the same. A
limit that was raised since makes another turn the last one: what counts is the limit at the time of each step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

TAKES_NO_PLACE: Final = frozenset({"validation", "limit", "loop"})
"""Sources of results of calls that were never let through."""
_LAST: Final = "This is the last of "
SHOWN_MAX: Final = 500
"""Characters of the model's last words in a message."""


def takes_place(source: str | None) -> bool:
    """Whether a call counts towards the ceilings, by the source of its result; None: it has none yet."""
    return source not in TAKES_NO_PLACE


def over(wanted: int, taken: int, per_turn: int | None, in_all: int | None) -> tuple[str, ...]:
    """For each of a turn's calls that want a place, in order: why it has none, or nothing. `taken` are the places of
    earlier turns."""
    return tuple(_over(n, taken + n, per_turn, in_all) for n in range(wanted))


def _over(in_turn: int, in_run: int, per_turn: int | None, in_all: int | None) -> str:
    if in_all is not None and in_run >= in_all:
        return f"not executed: the limit of {in_all} tool calls for this run is used up; answer with what is known"
    if per_turn is not None and in_turn >= per_turn:
        return f"not executed: the limit is {per_turn} tool calls per turn; make fewer calls at once"
    return ""


# -- the last turn ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run completes with."""

    output: JsonValue
    stop_reason: str


def is_final(turn_index: int, max_turns: int) -> bool:
    """Whether this turn is the one in which the model has to come to an end."""
    return max_turns > 1 and turn_index >= max_turns - 1


FEW_TURNS: Final = 5
"""With so many turns left or fewer, a model of a provider is told with each request. Before that it would only spoil
what the provider has cached of the conversation."""


def few_left(turn_index: int, max_turns: int) -> bool:
    """Whether few turns remain, this one included."""
    return max_turns - turn_index <= FEW_TURNS


def turns_left(turn_index: int, max_turns: int) -> str:
    """What a request says of the turns that remain, this one included."""
    left = max_turns - turn_index
    return f"{left} of {max_turns} turns remain, this one included." if left > 1 else "This is the last turn."


def final_notice(max_turns: int) -> str:
    """What the model is told before its last turn."""
    return (
        f"{_LAST}{max_turns} turns, and there are no tools any more. Answer now with what you have. If "
        "the task is not finished, hand over instead, with nothing but one JSON object: "
        '{"partial": true, "done": [what is done], "open": [what is not], "next": "what to do next"}'
    )


def is_final_notice(text: str) -> bool:
    """Whether a notice was that of a last turn."""
    return text.startswith(_LAST)


GOES_ON: Final = "The limit on turns was raised: the run goes on, and the tools are there again."
"""What the model is told that was told of a last turn before the limit was raised."""
NO_TOOLS: Final = "not executed: this was the last turn, and it has no tools"
"""The result of a call that is made in the last turn all the same."""


def final_answer(text: str) -> Answer | None:
    """How a run ends after its last turn: with a hand-over (stop reason `partial_progress`), with the model's text as
    the best answer that there is (`final_turn`), or, where it said nothing, with none."""
    handed_over = _object(text)
    if handed_over is not None and handed_over.get("partial") is True:
        return Answer(handed_over, "partial_progress")
    return Answer(text, "final_turn") if text.strip() else None


def used_up(max_turns: int, said: str, tools: Iterable[str]) -> str:
    """Why a run has failed that has no turns left, and how far it got: the model's last words, and the tools of the
    calls that took a place."""
    calls = ", ".join(f"{name} x{count}" for name, count in sorted(Counter(tools).items())) or "none"
    shown = said if len(said) <= SHOWN_MAX else said[:SHOWN_MAX] + "..."
    last = f'; its last words: "{shown}"' if said else ""
    return f"the limit of {max_turns} turns is used up; raise max_turns and resume. Calls so far: {calls}{last}"


def _object(text: str) -> dict[str, JsonValue] | None:
    """The one JSON object that a text consists of, in a code fence or not."""
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```"):
        bare = bare.partition("\n")[2].removesuffix("```")
    try:
        value = json.loads(bare, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")
