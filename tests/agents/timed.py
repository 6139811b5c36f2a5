"""An agent whose model answers at a time that its input names, and notes when nobody waits for it any more."""

import asyncio
import time
from pathlib import Path

from perdure import Agent, ToolContext, tool


def note(folder: str, kind: str, run_id: str) -> None:
    with open(Path(folder) / "ledger", "a") as file:
        file.write(f"{kind},{run_id},{time.time()}\n")


@tool(effect="non_idempotent", settles_after_s=0)
def pay(ctx: ToolContext) -> str:
    note(ctx.metadata["dir"], "effect", ctx.run_id)
    return "paid"


async def answer(request):
    """Turn 0 asks for `pay` where the input says so; the last turn ends at the time `at`."""
    folder = request.metadata["dir"]
    note(folder, "asked", request.run_id)
    if request.turn_index == 0 and request.input["pays"]:
        return {"tool_calls": [{"name": "pay"}]}
    try:
        await asyncio.sleep(max(0.0, request.input["at"] - time.time()))
    except asyncio.CancelledError:
        note(folder, "closed", request.run_id)
        raise
    return "done"


agent = Agent(name="timed", model=answer, tools=(pay,))
