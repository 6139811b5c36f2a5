"""A clerk of a small warehouse, with the model of a provider. It needs a key, and a few of its tokens.

    pip install 'perdure[anthropic]'
    ANTHROPIC_API_KEY=... perdure run examples/clerk.py:clerk "Reserve 2 lamps and 40 mugs for order 17"

Any other model that pydantic-ai knows does as well, and any server that speaks as OpenAI's chat completions do:

    pip install 'perdure[openai]'
    OPENAI_API_KEY=... perdure run examples/clerk.py:clerk "..." --model openai:gpt-5-mini
    OPENAI_BASE_URL=http://localhost:8000/v1 perdure run examples/clerk.py:clerk "..." --model openai-chat:qwen3

Its world is a folder: one file for each reservation.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from perdure import Agent, Limits, ToolContext, tool

STOCK = {"lamp": 12, "chair": 4, "mug": 31}


@tool(effect="read_only")
def stock(item: str) -> int:
    """How many of an item there are; 0 of one that the warehouse does not have. Items are in the singular."""
    return STOCK.get(item.lower(), 0)


@tool(effect="idempotent_write")
def reserve(ctx: ToolContext, order_id: str, item: str, count: int) -> str:
    """Reserve so many of an item for an order."""
    if not 0 < count <= STOCK.get(item.lower(), 0):
        raise ValueError(f"there are {STOCK.get(item.lower(), 0)} of {item}")
    folder = Path(str(ctx.metadata.get("world") or Path(tempfile.gettempdir()) / "clerk"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ctx.idempotency_key).write_text(f"{order_id} {item} {count}\n")  # the same key, the same file
    return f"reserved {count} {item} for order {order_id}"


clerk = Agent(
    name="clerk",
    model="anthropic:claude-sonnet-5-5",
    instructions="You are the clerk of a warehouse. Look at the stock before you reserve. Answer in one sentence.",
    tools=(stock, reserve),
    limits=Limits(max_turns=10),
)
