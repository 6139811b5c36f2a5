"""What the tests of the drill share."""

from __future__ import annotations

from perdure.store.events import Effect, ToolCallRequested


def request(effect: Effect, call: str = "t0c0") -> ToolCallRequested:
    """A call of `pay`."""
    return ToolCallRequested(
        turn_index=0,
        tool_call_id=call,
        provider_id=call,
        name="pay",
        arguments="{}",
        effect=effect,
        idempotency_key="k",
    )
