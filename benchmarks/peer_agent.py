"""The peers' workload as a perdure agent: their model, their tool, their effects file.

What it has to know comes as the run's metadata. The folder of the peers' harness is named by PEERS_BENCH.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ["PEERS_BENCH"])
import common  # type: ignore[import-not-found]

from perdure import Agent, ModelRequest, Settled, ToolContext, tool


async def model(request: ModelRequest) -> dict[str, Any]:
    """The harness's fake model, as a function of the request."""
    about = request.metadata
    reply = await common.call_model(
        request.run_id, request.turn_index, about["turns"], about["tools"], about["model_ms"]
    )
    calls = [{"name": call["name"], "arguments": call["args"], "id": call["id"]} for call in reply["calls"]]
    return {"text": reply["text"], "tool_calls": calls}


@tool(effect="non_idempotent", settles_after_s=0)
def append(ctx: ToolContext, turn: int, call: int) -> dict[str, Any]:
    """Append one line to the run's effects file."""
    answer: dict[str, Any] = common.call_tool(ctx.metadata["workdir"], ctx.run_id, turn, call)
    return answer


@append.reconcile
def appended(ctx: ToolContext, turn: int, call: int) -> Settled:
    """Whether the line is in the effects file. A line is written by one system call, so it is there or not."""
    path = Path(str(ctx.metadata["workdir"]), "effects", f"{ctx.run_id}.txt")
    lines = path.read_text().splitlines() if path.exists() else []
    if f"{ctx.run_id},{turn},{call}" in lines:
        return Settled.happened({"ok": True, "turn": turn, "call": call, "note": "found"})
    return Settled.did_not_happen()


agent = Agent(name="peer", model=model, tools=(append,))
