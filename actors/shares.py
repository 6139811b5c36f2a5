"""A run's model calls in the budget that it shares: what is reserved for one, and what its answer is charged with."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ..store.errors import UsageError
from ..store.events import AssistantMessage, BudgetReleased, BudgetReserved, Event
from .agent import Agent
from .budgets import ANSWER_TOKENS, Share, prompt_at_most, share
from .machine import State
from .model import NOT_TAKEN, ModelError, ModelRequest
from .prices import PriceList, cost

PAUSE_S: Final = 0.2, 1.0
"""Within these bounds an owner waits before it asks a budget again."""


def share_of(request: ModelRequest, agent: Agent, state: State) -> Share:
    """What a model call can take at most. Its answer is bounded by the `max_tokens` of the agent's model settings."""
    newest = next((n for n in reversed(range(len(request.messages))) if request.messages[n]["role"] == "assistant"), -1)
    shown = [_length(message) for message in request.messages]
    frame = _length([request.instructions, request.tools, request.withheld, request.turns_left, request.notice])
    last = state.turn.message.usage if state.turn and newest >= 0 else None
    prompt = prompt_at_most(last, sum(shown[newest + 1 :]), sum(shown) + frame)
    longest = agent.model_settings.get("max_tokens") or ANSWER_TOKENS
    return share(prompt, min(longest, request.max_output_tokens or longest), state.prices)


def _length(value: Any) -> int:
    """Bytes, as many as there can be tokens."""
    return len(json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace"))


def reservation(turn_index: int, wanted: Share) -> BudgetReserved:
    """The event that reserves a share."""
    return BudgetReserved(
        turn_index=turn_index, prompt_tokens=wanted.prompt, output_tokens=wanted.output, cost=wanted.cost
    )


def charged(events: Sequence[Event], prices: PriceList | None) -> list[Event]:
    """The events of a turn, its message with what the call has cost."""
    return [
        event.model_copy(update={"cost": cost(prices, event.usage)})
        if prices and isinstance(event, AssistantMessage)
        else event
        for event in events
    ]


def given_back(error: Exception, state: State) -> list[Event]:
    """The events that give back what a run holds, where this error says that its model call has cost nothing."""
    nothing = isinstance(error, UsageError) or (isinstance(error, ModelError) and error.code in NOT_TAKEN)
    return [BudgetReleased(turn_index=state.turn_count)] if nothing and state.reserved else []


async def pause(news: asyncio.Event) -> None:
    """Wait a little for others to settle what they hold, or for news of the run."""
    with suppress(TimeoutError):
        async with asyncio.timeout(random.uniform(*PAUSE_S)):
            await news.wait()
    news.clear()
