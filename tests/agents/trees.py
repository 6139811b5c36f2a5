"""An agent whose tools start processes of every kind, and handlers that take a signal to stop in every way.

Input: {"turns": [[{"name": TOOL, "arguments": {"do": WHAT}}, ...], ...]}; one inner list per turn, then a final text.
WHAT is steps with commas: `spawn` starts one sleeper of each kind and waits until all of them run; `run` has
run_process start some; `bare` starts one without an environment; `act` takes effect; `sleep`, `grind` in C code,
`drop` exceptions for a second and then sleep, `clone` itself, `look` until cancelled, be `late` in heeding the signal,
`ignore` it, `die`. A note in the ledger tells when a tool has begun, when it was interrupted, and when it has finished.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from perdure import Agent, Limits, ModelRequest, Settled, ToolContext, tool

DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
KINDS = ("background", "session", "daemon", "forked", "deaf")


def note(ctx: ToolContext, kind: str) -> None:
    """One line in the ledger: kind, call, attempt, pid."""
    line = f"{kind},{ctx.tool_call_id},{ctx.attempt},{os.getpid()}\n"
    with open(Path(str(ctx.metadata["dir"]), "ledger"), "a") as file:
        file.write(line)


def spawn(ctx: ToolContext) -> None:
    """Sleepers: in the background, in a session of their own, daemons that were forked twice, deaf to SIGTERM."""
    folder = Path(str(ctx.metadata["dir"]), f"{ctx.tool_call_id}.{ctx.attempt}")
    folder.mkdir()
    paths = {kind: str(folder / kind) for kind in KINDS}
    sleeper = "touch {0}; exec sleep 600"
    subprocess.Popen(["sh", "-c", sleeper.format(paths["background"])])
    subprocess.Popen(["sh", "-c", sleeper.format(paths["session"])], start_new_session=True)
    subprocess.run(["sh", "-c", f"setsid sh -c '{sleeper.format(paths['daemon'])}' >/dev/null 2>&1 &"], check=True)
    subprocess.Popen([sys.executable, "-S", "-c", DEAF, paths["deaf"]], start_new_session=True)
    fork_twice(paths["forked"])
    while not all(Path(path).exists() for path in paths.values()):
        time.sleep(0.01)


def start_bare(ctx: ToolContext) -> None:
    """A sleeper in a session of its own, without an environment; it says who it is."""
    path = Path(str(ctx.metadata["dir"]), f"{ctx.tool_call_id}.bare")
    path.mkdir()
    says = f"echo $$ > {path}/new; mv {path}/new {path}/forked; exec sleep 600"
    subprocess.Popen(["env", "-i", "PATH=/bin:/usr/bin", "sh", "-c", says], start_new_session=True)
    while not (path / "forked").exists():
        time.sleep(0.01)


def fork_twice(path: str) -> None:
    """A daemon of the handler's own code, which executes nothing."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            Path(f"{path}.new").write_text(str(os.getpid()))
            os.rename(f"{path}.new", path)
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)


class Lingers:
    """Takes its time to go, and drops every exception that comes meanwhile, as Python has it."""

    def __init__(self, ctx: ToolContext) -> None:
        self.ctx = ctx

    def __del__(self) -> None:
        note(self.ctx, "begin")
        time.sleep(1)


def end(ctx: ToolContext, how: str) -> None:
    match how:
        case "sleep":
            time.sleep(600)
        case "look":
            while not ctx.cancelled:
                time.sleep(0.01)
        case "ignore":
            for _ in range(1000):
                try:
                    time.sleep(600)
                except BaseException:  # noqa: BLE001
                    note(ctx, "interrupted")
        case "late":
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                time.sleep(0.5)
        case "drop":
            Lingers(ctx)
            time.sleep(600)
        case "clone":
            if os.fork() == 0:
                raise ValueError("in the child")
        case "grind":
            sum(range(10**13))
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "act":
            note(ctx, "effect")


def carry_out(ctx: ToolContext, do: str) -> str:
    for what in do.split(","):
        if what == "spawn":
            spawn(ctx)
            note(ctx, "begin")
        elif what == "bare":
            start_bare(ctx)
        elif what == "run":
            note(ctx, "begin")
            ctx.run_process(["sh", "-c", "sleep 600 & setsid sleep 600 & exec sleep 600"])
        elif what == "begin":
            note(ctx, "begin")
        else:
            end(ctx, what)
    note(ctx, "end")
    return do


@tool(effect="read_only", attempts_max=1, num_cpus=0.1)
def read(ctx: ToolContext, do: str) -> str:
    return carry_out(ctx, do)


@tool(effect="read_only", timeout_s=4, attempts_max=1, num_cpus=0.1)
def glance(ctx: ToolContext, do: str) -> str:
    """Like read, but has four seconds for it."""
    return carry_out(ctx, do)


@tool(effect="idempotent_write", num_cpus=0.1)
def put(ctx: ToolContext, do: str) -> str:
    return carry_out(ctx, do)


@tool(effect="non_idempotent", num_cpus=0.1)
def blind(ctx: ToolContext, do: str) -> str:
    return carry_out(ctx, do)


@tool(effect="non_idempotent", num_cpus=0.1, settles_after_s=0)
def send(ctx: ToolContext, do: str) -> str:
    return carry_out(ctx, do)


@send.reconcile
def sent(ctx: ToolContext, do: str) -> Settled:
    lines = Path(str(ctx.metadata["dir"]), "ledger").read_text().splitlines()
    if any(line.startswith(f"effect,{ctx.tool_call_id},") for line in lines):
        return Settled.happened("found in the ledger")
    return Settled.did_not_happen()


@tool(effect="read_only", num_cpus=0.1)
async def wait(ctx: ToolContext, do: str) -> str:
    note(ctx, "begin")
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        note(ctx, "interrupted")
        raise
    return do


def model(request: ModelRequest) -> dict[str, Any]:
    turns: list[Any] = request.input["turns"]  # type: ignore[index, call-overload, assignment]
    return {"tool_calls": turns[request.turn_index]} if request.turn_index < len(turns) else {"text": "all done"}


agent = Agent(name="trees", model=model, tools=(read, glance, put, blind, send, wait), limits=Limits(max_turns=20))
