"""What is there of an answer that is not complete: a call that is under way, was given up or died with its process.

It is evidence for people and has its cost; it never is a turn, and no request shows it to a model: the turn is asked
anew. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from ..store.events import AssistantDelta, AssistantInterrupted, AssistantMessage, Event, Usage

CHARACTERS_PER_TOKEN: Final = 4
"""What an estimate takes a token to be."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The text that was received. `told` is what the call has taken as far as its model said, `complete` if that is all
    of it; `counted` says that its cost is in the run's usage."""

    text: str
    told: Usage | None
    complete: bool
    counted: bool = False


def heard(partial: Partial | None, event: AssistantDelta) -> Partial | None:
    """With one more piece; None for a piece that does not follow."""
    before = partial.text if partial and event.offset else ""
    if event.offset != len(before) or (event.offset and partial and partial.counted):
        return None
    return Partial(before + event.text, event.usage, event.complete)


def interrupted(partial: Partial, turn_index: int, prompt_characters: int) -> AssistantInterrupted:
    """What a call has cost that came to nothing: what the model told, or else an estimate from characters."""
    usage = partial.told or Usage()
    if usage == Usage(output_tokens=usage.output_tokens):
        usage = usage.model_copy(update={"input_tokens": tokens_in(prompt_characters)})
    if not partial.complete:
        output = max(usage.output_tokens, tokens_in(len(partial.text)))
        usage = usage.model_copy(update={"output_tokens": output})
    return AssistantInterrupted(turn_index=turn_index, usage=usage, estimated=not partial.complete)


def unfinished(events: Iterable[Event]) -> Partial | None:
    """The answer that is not complete at the end of these events of a run."""
    partial: Partial | None = None
    for event in events:
        match event:
            case AssistantDelta():
                partial = heard(partial, event)
            case AssistantInterrupted() if partial:
                partial = replace(partial, counted=True)
            case AssistantMessage():
                partial = None
    return partial


def tokens_in(characters: int) -> int:
    """An estimate."""
    return -(-characters // CHARACTERS_PER_TOKEN)
