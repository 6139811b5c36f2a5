"""An agent that does what its input says, with tools of every class that leave their marks outside the product.

Input: {"turns": [[{"name": TOOL, "arguments": {"do": WHAT}}, ...], ...]}; one inner list per turn, then a final
text. In place of a list: `die` ends the run actor, `hang` never answers, `hold` waits for `go` and then asks for one
put, `falter` fails until there is `go`. The run's metadata names the folder (`dir`) of the ledger and of the files
that tools wait for.

WHAT, step by step with commas: `act` writes the effect to the ledger; `wait` until the file `go` is in the folder;
`exit` calls os._exit(3); `sysexit` raises SystemExit; `kill` sends SIGKILL to itself; `raise` fails; `sleep` for an
hour; `spin` in Python, `grind` in C code, for as long; `first-...` does the step in the first attempt only; `behead`
kills the store's supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

from perdure import Agent, Limits, ModelRequest, Settled, ToolContext, tool


def note(ctx: ToolContext, kind: str) -> None:
    """One line in the ledger: kind, run, call, attempt, key, pid, time."""
    fields = (kind, ctx.run_id, ctx.tool_call_id, ctx.attempt, ctx.idempotency_key, os.getpid(), time.time())
    line = ",".join(map(str, fields)) + "\n"
    file = os.open(Path(str(ctx.metadata["dir"]), "ledger"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)


def step(ctx: ToolContext, what: str) -> None:
    """One step of a tool."""
    if what.startswith("first-"):
        if ctx.attempt > 1:
            return
        what = what.removeprefix("first-")
    match what:
        case "act":
            note(ctx, "effect")
        case "wait":
            while not Path(str(ctx.metadata["dir"]), "go").exists():
                time.sleep(0.01)
        case "exit":
            os._exit(3)
        case "sysexit":
            sys.exit(4)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "behead":
            os.kill(supervisor_pid(Path(str(ctx.metadata["dir"])).parent / "runs.db"), signal.SIGKILL)
        case "sleep":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "grind":
            sum(range(10**13))
        case "raise":
            raise ValueError("as it was told")
        case _:
            raise ValueError(f"unknown step {what!r}")


def supervisor_pid(store: Path) -> int:
    """The process that the store's lease names, once that is a living one."""
    while True:
        with contextlib.closing(sqlite3.connect(store)) as connection:
            (pid,) = connection.execute("SELECT pid FROM leases WHERE name = 'supervisor'").fetchone()
        if Path(f"/proc/{pid}").exists():
            return int(pid)
        time.sleep(0.01)


def carry_out(ctx: ToolContext, do: str) -> str:
    note(ctx, "begin")
    for what in do.split(","):
        step(ctx, what)
    return f"done in attempt {ctx.attempt}"


@tool(effect="read_only", num_cpus=0.2)
def read(ctx: ToolContext, do: str) -> str:
    return carry_out(ctx, do)


@tool(effect="idempotent_write", num_cpus=0.2)
def put(ctx: ToolContext, do: str) -> str:
    return carry_out(ctx, do)


@tool(effect="non_idempotent", settles_after_s=0, timeout_s=280, num_cpus=0.2)
def send(ctx: ToolContext, do: str) -> str:
    return carry_out(ctx, do)


@send.reconcile
def sent(ctx: ToolContext, do: str) -> Settled:
    note(ctx, "probe")
    lines = Path(str(ctx.metadata["dir"]), "ledger").read_text().splitlines()
    if any(line.startswith("effect,") and ctx.idempotency_key in line for line in lines):
        return Settled.happened("found in the ledger")
    return Settled.did_not_happen()


@tool(effect="non_idempotent", settles_after_s=0, num_cpus=0.2, approval="always")
def wire(ctx: ToolContext, do: str) -> str:
    """Like send, but a person has to approve each call."""
    return carry_out(ctx, do)


wire.reconcile(sent)


@tool(effect="non_idempotent", settles_after_s=0, num_cpus=0.2, approval="always", approval_timeout_s=4)
def haste(ctx: ToolContext, do: str) -> str:
    """Like wire, but there are four seconds to approve it."""
    return carry_out(ctx, do)


@tool(effect="read_only", num_cpus=0.2, approval="always", approval_timeout_s=1, approval_default="reject")
def peek(ctx: ToolContext, do: str) -> str:
    """Like read, but rejected unless it is approved within a second."""
    return carry_out(ctx, do)


@tool(effect="read_only", timeout_s=2, num_cpus=0.2)
def glance(ctx: ToolContext, do: str) -> str:
    """Like read, but has two seconds for it."""
    return carry_out(ctx, do)


@tool(effect="non_idempotent", timeout_s=2, settles_after_s=0, num_cpus=0.2)
def dart(ctx: ToolContext, do: str) -> str:
    """Like send, but has two seconds for it."""
    return carry_out(ctx, do)


dart.reconcile(sent)


@tool(effect="non_idempotent", settles_after_s=0, num_cpus=0.2)
def blind(ctx: ToolContext, do: str) -> str:
    """Like send, but nobody can tell whether it happened."""
    return carry_out(ctx, do)


@tool(effect="non_idempotent", settles_after_s=0, num_cpus=0.2)
def vague(ctx: ToolContext, do: str) -> str:
    """Like send, but its probe kills its own process when it is asked first."""
    return carry_out(ctx, do)


@vague.reconcile
def once_more(ctx: ToolContext, do: str) -> Settled:
    answer = sent(ctx, do)
    if Path(str(ctx.metadata["dir"]), "ledger").read_text().count("probe,") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


def model(request: ModelRequest) -> dict[str, Any]:
    turns: list[Any] = request.input["turns"]  # type: ignore[index, call-overload, assignment]
    if request.turn_index < len(turns):
        asked = turns[request.turn_index]
        if asked == "die":
            os._exit(7)
        if asked == "hang":
            time.sleep(3600)
        if asked == "falter":
            if not Path(str(request.metadata["dir"]), "go").exists():
                raise ConnectionError("the provider is down")
            return {"text": "all done"}
        if asked == "hold":
            while not Path(str(request.metadata["dir"]), "go").exists():
                time.sleep(0.01)
            return {"tool_calls": [{"name": "put", "arguments": {"do": "act"}}]}
        return {"tool_calls": asked}
    return {"text": "all done"}


agent = Agent(
    name="effects",
    model=model,
    tools=(read, put, send, wire, haste, peek, glance, dart, blind, vague),
    limits=Limits(max_turns=20, max_repeats=None),  # tests repeat calls on purpose
)
