"""An agent that says where it is, in a ledger outside of perdure, and waits there to be killed.

Input: {"turns": [[{"name": TOOL, "arguments": {"at": AT}}, ...], ...]}, one inner list a turn, then a final text. The
run's metadata names the folder (`dir`) of its ledger and the turn (`hold`, -1 for none) in which the model waits.

AT is "" for a call that just acts, `slow@S` for one that takes S seconds, else where its first attempt waits: `bound`
in a worker, before leave to begin is asked for; `begun` in the handler, before the effect; `acted` behind it; `forked`
in a child of the handler, in a session of its own, before the effect, which is the child's. Everybody waits once, until
there is a file `go-PLACE` in the folder. A tool comes twice, as `put` and, for a person to approve, as `ask_put`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator

from perdure import Agent, Limits, ModelRequest, Settled, ToolContext, tool
from perdure.actors.tools import Tool
from perdure.store.events import Effect

POLL_S: Final = 0.005
SHARE: Final = 0.05
"""Part of a CPU that a tool asks for: many of them wait at once."""


def write(folder: Path, kind: str, **fields: Any) -> None:
    """One line in the ledger, durable for everybody else at once."""
    line = json.dumps({"kind": kind, "pid": os.getpid(), "at": time.time(), **fields}) + "\n"
    file = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)


def first(folder: Path, place: str) -> bool:
    """Whether nobody was at this place before."""
    try:
        os.close(os.open(folder / place, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def wait(folder: Path, place: str) -> None:
    """Say that we are here and wait to be let go, unless somebody did so before."""
    if first(folder, place):
        write(folder, place)
        while not (folder / f"go-{place}").exists():
            time.sleep(POLL_S)


def in_a_worker() -> bool:
    """Whether this is the process of a Ray task: arguments are also checked by the run's owner, which is an actor."""
    import ray

    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is None


def arrive(at: str) -> str:
    place, _, folder = at.partition("@")
    if place == "bound" and in_a_worker():
        wait(Path(folder), place)
    return at


At = Annotated[str, AfterValidator(arrive)]


def carry_out(ctx: ToolContext, at: str) -> str:
    folder = Path(str(ctx.metadata["dir"]))
    place, _, seconds = at.partition("@")
    half_s = float(seconds) / 2 if place == "slow" else 0.0
    fields = {"call": ctx.tool_call_id, "attempt": ctx.attempt, "key": ctx.idempotency_key}
    write(folder, "handler", **fields)
    if place == "begun":
        wait(folder, place)
    if place == "forked":
        in_a_child(folder, fields)
        return "done by a child"
    time.sleep(half_s)
    write(folder, "effect", **fields)
    time.sleep(half_s)
    if place == "acted":
        wait(folder, place)
    return f"done in attempt {ctx.attempt}"


def in_a_child(folder: Path, fields: dict[str, Any]) -> None:
    """Have a child do the effect, which lives on when its parent is killed; wait for it. Without the sockets of its
    parent, by which Ray would hold that for alive."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    for file in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                os.close(file)
    wait(folder, "forked")
    write(folder, "effect", **fields)
    os._exit(0)


def read(ctx: ToolContext, at: At) -> str:
    return carry_out(ctx, at)


def put(ctx: ToolContext, at: At) -> str:
    return carry_out(ctx, at)


def send(ctx: ToolContext, at: At) -> str:
    return carry_out(ctx, at)


def blind(ctx: ToolContext, at: At) -> str:
    """Like send, but no probe can tell whether it happened."""
    return carry_out(ctx, at)


def sent(ctx: ToolContext, at: At) -> Settled:
    folder = Path(str(ctx.metadata["dir"]))
    write(folder, "probe", call=ctx.tool_call_id, attempt=ctx.attempt)
    lines = (folder / "ledger").read_text().splitlines()
    if any('"kind": "effect"' in line and ctx.idempotency_key in line for line in lines):
        return Settled.happened("found in the ledger")
    return Settled.did_not_happen()


def both(handler: Callable[..., str], effect: Effect, probe: Callable[..., Settled] | None = None) -> list[Tool]:
    """The tool, free and gated."""
    gates: tuple[tuple[str, Literal["never", "always"]], ...] = (("", "never"), ("ask_", "always"))
    tools = [
        tool(
            effect,
            name=prefix + handler.__name__,
            approval=approval,
            num_cpus=SHARE,
            timeout_s=120,
            settles_after_s=0,
        )(handler)
        for prefix, approval in gates
    ]
    for each in tools:
        if probe:
            each.reconcile(probe)
    return tools


async def model(request: ModelRequest) -> dict[str, Any]:
    folder, turns = Path(str(request.metadata["dir"])), request.input["turns"]  # type: ignore[index, call-overload]
    shown = [result["tool_call_id"] for said in request.messages for result in said.get("results", ())]
    write(folder, "shown", turn=request.turn_index, calls=shown)
    if request.turn_index == request.metadata["hold"] and first(folder, "model"):
        write(folder, "model")
        while not (folder / "go-model").exists():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(POLL_S)
    if request.turn_index < len(turns):  # type: ignore[arg-type]
        return {"tool_calls": turns[request.turn_index]}  # type: ignore[index]
    return {"text": "all done"}


agent = Agent(
    name="crashes",
    model=model,
    tools=(
        *both(read, "read_only"),
        *both(put, "idempotent_write"),
        *both(send, "non_idempotent", sent),
        *both(blind, "non_idempotent"),
    ),
    limits=Limits(max_turns=20, max_repeats=None),  # plans repeat calls
)
