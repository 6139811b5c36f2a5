"""Answers that are none: what becomes of a run whose model refused, or said nothing. Pure.

A refusal, or an answer that a filter took back, ends the run: to ask again in the same words is to be refused again.
What there is of its text stays in the log and is shown to no model. A resumed run asks anew.

An answer with neither text nor calls is asked for again, `Limits.max_empty - 1` times in a row at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..store.events import AssistantMessage
from .calls import Turn
from .guards import Limits, Stop

REFUSALS: Final = {"refusal": "the model refused", "content_filter": "a content filter stopped the answer"}
"""What it means, by the stop reason; the run fails with that as its code."""
SHOWN_MAX: Final = 500
"""Characters of a partial text in a message."""


def is_refusal(message: AssistantMessage) -> bool:
    """Whether an answer is a refusal, with some text or none."""
    return message.stop_reason in REFUSALS


def is_empty(turn: Turn) -> bool:
    """Whether an answer has nothing to go on with."""
    return not turn.calls and not turn.message.text.strip() and not is_refusal(turn.message)


def refused(message: AssistantMessage) -> Stop | None:
    """How a run ends whose newest answer is a refusal; None where it is none."""
    what = REFUSALS.get(message.stop_reason)
    if what is None:
        return None
    text = message.text if len(message.text) <= SHOWN_MAX else message.text[:SHOWN_MAX] + "..."
    said = f'; it had said: "{text}"' if text else ""
    return Stop("refusal" if message.stop_reason == "refusal" else "content_filter", f"{what}{said}")


def silent(turns: Sequence[Turn], limits: Limits) -> Stop | None:
    """How a run ends whose newest answers, all from after its newest resume, say nothing; None where it goes on."""
    if limits.max_empty is None or (count := _empty(turns)) < limits.max_empty:
        return None
    return Stop("empty_answer", f"the model gave {count} answers in a row with neither text nor tool calls")


def told_of_silence(turns: Sequence[Turn], limits: Limits) -> str | None:
    """What the model is told before its next turn, if its newest answers say nothing."""
    count = _empty(turns)
    if not count or limits.max_empty is None:
        return None
    return f"Your answer was empty ({count} of {limits.max_empty}). Answer in words, or call a tool."


def _empty(turns: Sequence[Turn]) -> int:
    return next((n for n, turn in enumerate(reversed(turns)) if not is_empty(turn)), len(turns))
