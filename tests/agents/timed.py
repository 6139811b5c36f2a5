"""An agent whose model answers at a time that its input names, and notes when nobody waits for it any more."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from perdure import Agent, ModelRequest, ToolContext, tool


def note(folder: str, kind: str, run_id: str) -> None:
    with open(Path(folder) / "ledger", "a") as file:
        file.write(f"{kind},{run_id},{time.time()}\n")


@tool(effect="non_idempotent", settles_after_s=0)
def pay(ctx: ToolContext) -> str:
    note(str(ctx.metadata["dir"]), "effect", ctx.run_id)
    return "paid"


async def answer(request: ModelRequest) -> AsyncGenerator[Any, None]:
    """Turn 0 asks for `pay` where the input says so; the last turn begins at once and ends at the time `at`."""
    folder, asked = str(request.metadata["dir"]), dict[str, Any](request.input)  # type: ignore[arg-type]
    note(folder, "asked", request.run_id)
    if request.turn_index == 0 and asked["pays"]:
        yield {"tool_calls": [{"name": "pay"}]}
        return
    yield "so far"
    try:
        await asyncio.sleep(max(0.0, asked["at"] - time.time()))
    except asyncio.CancelledError:
        note(folder, "closed", request.run_id)
        raise
    yield ", done"


agent = Agent(name="timed", model=answer, tools=(pay,))
