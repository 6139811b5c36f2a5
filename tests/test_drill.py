"""`perdure drill`: real kills at every point of an agent's run, and what it says of agents good and bad."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.store.events import (
    AssistantMessage,
    RunCompleted,
    ToolResult,
    TurnStarted,
)
from perdure.store.log import Append
from perdure.store.sql import open_log

from .drill_kit import request
from .fakes import RUN, accepted, claim, created, new_run

HEAD = """
import time

from perdure import Agent, Settled, ToolContext, tool
from world import act, acted

"""
WORLD = """
from pathlib import Path

LEDGER = Path(__file__).with_name("effects")


def act(key):
    with open(LEDGER, "a") as file:
        file.write(key + "\\n")


def acted(key):
    return LEDGER.exists() and key in LEDGER.read_text().split()

"""
GOOD = """
@tool(effect="idempotent_write")
async def note(ctx: ToolContext) -> str:
    if not acted(ctx.idempotency_key):
        act(ctx.idempotency_key)
    return "noted for " + ctx.run_id

@tool(effect="non_idempotent")
def pay(ctx: ToolContext):
    act(ctx.idempotency_key)
    yield "paid"

@pay.reconcile
def paid(ctx: ToolContext) -> Settled:
    return Settled.happened(["paid"]) if acted(ctx.idempotency_key) else Settled.did_not_happen()

agent = Agent(name="good", model="script:script", tools=(note, pay))
"""
BAD = """
@tool(effect="read_only")
def look(ctx: ToolContext) -> str:
    act("look")
    return "seen"

@tool(effect="non_idempotent", settles_after_s=0)
def pay(ctx: ToolContext) -> str:
    act("pay")
    return "paid"

@pay.reconcile
def paid(ctx: ToolContext) -> Settled:
    return Settled.did_not_happen()

agent = Agent(name="bad", model="script:script", tools=(look, pay))
"""
BLIND = """
@tool(effect="non_idempotent", approval="always")
def pay(ctx: ToolContext) -> str:
    act(ctx.idempotency_key)
    return "paid"

agent = Agent(name="blind", model=lambda request: "never asked", tools=(pay,))
"""
SLOW = """
@tool(effect="read_only")
def wait() -> str:
    act("begun")
    time.sleep(600)

agent = Agent(name="slow", model="script:script", tools=(wait,))
"""
BOTH = (
    '{"tool_calls": [{"name": "note"}]}\n{"tool_calls": [{"name": "pay"}], "delay_ms": 60000}\n{"text": "all done"}\n'
)
WORSE = '{"tool_calls": [{"name": "look"}]}\n{"tool_calls": [{"name": "pay"}]}\n{"text": "all done"}\n'


@dataclass
class Stage:
    """A folder with an agent, and a temporary folder of its own."""

    folder: Path

    def __post_init__(self) -> None:
        self.effects, self.temporary = self.folder / "effects", self.folder / "tmp"
        self.temporary.mkdir()

    def cast(self, agent: str, script: str = "") -> None:
        (self.folder / "agent.py").write_text(HEAD + agent)
        (self.folder / "world.py").write_text(WORLD)
        (self.folder / "script").write_text(script)

    def line(self, text: str) -> int:
        """The number of the agent's first line with this text."""
        lines = (self.folder / "agent.py").read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if text in line)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        env = os.environ | {"TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "perdure", *args]
        return subprocess.Popen(command, cwd=self.folder, env=env, text=True, **options)

    def drill(self, *args: str) -> Drilled:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.start("drill", "agent.py:agent", "--json", "--yes", *args, **pipes)
        out, err = process.communicate(timeout=120)
        return Drilled(process.returncode, [json.loads(line) for line in out.splitlines()], err)

    def left(self) -> list[str]:
        """Files of ours in the temporary folder, and processes that use it."""
        files = [str(path) for path in self.temporary.rglob("*") if path.name != f"perdure-{os.getuid()}"]
        return files + [str(process) for process in psutil.process_iter() if self._ours(process)]

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TMPDIR") == str(self.temporary)
        except psutil.Error:
            return False


@dataclass
class Drilled:
    code: int
    said: list[dict[str, Any]]
    err: str

    def __post_init__(self) -> None:
        self.points = [one for one in self.said if one["type"] == "point"]
        self.advice = [one["text"] for one in self.said if one["type"] == "advice"]
        self.sums = self.said[-1] if self.said else {}

    def doubled(self) -> set[tuple[str, str, str]]:
        """The points at which effects were doubled."""
        return {(p["moment"], p["key"], p["victim"]) for p in self.points if p["duplicates"]}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_an_agent_that_keeps_its_promises_passes_at_every_point(stage: Stage) -> None:
    stage.cast(GOOD, BOTH)
    done = stage.drill("hello", "--ledger", "effects")
    assert done.code == 0, done.err
    assert [p for p in done.points if p["bad"] or p["differences"] or p["questions"]] == []
    assert done.sums["kills"] == done.sums["points"] == len(done.points)
    appends = ["run_created", "run_claimed 1", "assistant_message 0", "tool_result t0c0", "assistant_message 1"]
    appends += ["tool_call_started t1c0", "tool_result t1c0", "assistant_message 2"]
    expected = {(moment, key, "all") for key in appends for moment in ("before", "after")}
    handlers = "handler t0c0", "handler t1c0"
    expected |= {(m, key, v) for key in handlers for m in ("before", "after") for v in ("all", "tool")}
    inside = ("    act(", "t0c0"), ('return "noted', "t0c0"), ('yield "paid"', "t1c0")
    expected |= {("before", f"line {stage.line(text)} of {call}", "all") for text, call in inside}
    reached = {(p["moment"], p["key"], p["victim"]) for p in done.points}
    assert expected <= reached | {("before", "run_completed", "all"), ("after", "run_completed", "all")}
    lines = stage.effects.read_text().split()
    assert len(lines) == len(set(lines)) == 2 * (len(done.points) + 2), "each run has two effects, and no more"
    settled = {(p["moment"], p["key"]): p["settling_s"] for p in done.points}
    assert settled["before", "handler t1c0"] == 60.0, "the settling time of a real run is told"
    assert settled["after", "handler t1c0"] == 0.0, "what happened is known at once"
    assert any("pay has no settles_after_s" in text for text in done.advice)
    assert stage.left() == []


def test_tools_that_break_their_promises_are_caught(stage: Stage) -> None:
    stage.cast(BAD, WORSE)
    done = stage.drill("hello", "--ledger", "effects")
    assert done.code == 1, done.err
    assert done.sums["kills"] == done.sums["points"]
    ran_twice = {("after", f"handler {call}", victim) for call in ("t0c0", "t1c0") for victim in ("all", "tool")}
    seen, paid = stage.line('return "seen"'), stage.line('return "paid"')
    done_by_then = {("before", f"line {seen} of t0c0", "all"), ("before", f"line {paid} of t1c0", "all")}
    assert done.doubled() == ran_twice | done_by_then | {("before", "tool_result t0c0", "all")}
    reasons = {reason for p in done.points for reason in p["duplicates"]}
    assert "pay (t1c0) returned 2 times though its probe said that it had not happened" in reasons
    assert "the ledger has 3 new lines, undisturbed it has 2" in reasons


async def test_a_stored_run_is_played_again_and_what_nobody_can_tell_is_asked(stage: Stage) -> None:
    stage.cast(BLIND)
    await recorded(stage.folder / "runs.db")
    done = stage.drill("--from", RUN[:8], "--db", "runs.db", "--ledger", "effects")
    assert done.code == 0, done.err
    assert done.sums["kills"] == done.sums["points"]
    asked = {(p["moment"], p["key"], p["victim"]): p["questions"] for p in done.points if p["questions"]}
    assert asked == {
        ("after", "tool_call_started t0c0", "all"): ["pay (t0c0): not_happened"],
        ("before", "handler t0c0", "all"): ["pay (t0c0): not_happened"],
        ("before", "handler t0c0", "tool"): ["pay (t0c0): not_happened"],
        ("after", "handler t0c0", "all"): ["pay (t0c0): happened"],
        ("after", "handler t0c0", "tool"): ["pay (t0c0): happened"],
        ("before", f"line {stage.line('return')} of t0c0", "all"): ["pay (t0c0): abandon"],
    }
    assert {"before", "after"} == {p["moment"] for p in done.points if p["key"] == "approval_decided t0c0"}
    assert any("pay is non_idempotent and has no reconcile probe" in t and "(6 here)" in t for t in done.advice)
    lines = stage.effects.read_text().split()
    assert len(lines) == len(set(lines)) == len(done.points) + 2


async def recorded(db: Path) -> None:
    """A store with a run that has been answered twice."""
    log = await open_log(db)
    await new_run(log, created(input="as it was"))
    epoch = await claim(log)
    call = request("non_idempotent")
    first = (TurnStarted(turn_index=0), AssistantMessage(turn_index=0, text="well", stop_reason="tool_use"), call)
    seq = (await accepted(log, Append(RUN, epoch, 2, first))).row.seq
    result = ToolResult(tool_call_id="t0c0", attempt=1, content='"paid"')
    last = AssistantMessage(turn_index=1, text="done", stop_reason="end_turn")
    end = RunCompleted(output="done", stop_reason="end_turn")
    await accepted(log, Append(RUN, epoch, seq, (result, TurnStarted(turn_index=1), last, end)))
    await log.close()


def test_an_interrupted_drill_leaves_nothing_behind(stage: Stage) -> None:
    stage.cast(SLOW, '{"tool_calls": [{"name": "wait"}]}\n{"text": "all done"}\n')
    process = stage.start("drill", "agent.py:agent", "hello", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    watch = select.poll()
    while not stage.effects.exists():
        assert process.poll() is None
        watch.poll(20)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    psutil.wait_procs([p for p in psutil.process_iter() if stage._ours(p)], timeout=10)
    assert stage.left() == []


COMMANDS = """
import contextlib, io, json, sys
from perdure.cli.app import root

def run(args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = root(args, standalone_mode=False)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()

print(json.dumps([run(args) for args in json.loads(sys.argv[1])]))
"""


def test_bad_input_is_one_line_and_nothing_is_run(stage: Stage) -> None:
    stage.cast(BLIND, '{"text": 1}\n')
    (stage.folder / "good").write_text('{"text": "fine"}\n')
    cases = {
        ("agent.py:nobody", "x"): "has no Agent named 'nobody'; it has agent",
        ("agent.py:agent", "x"): "the agent's model is no script: give its answers with --script FILE or --from RUN",
        ("agent.py:agent", "x", "--script", "script"): "line 1: text: Input should be a valid string",
        ("agent.py:agent", "x", "--script", "nowhere"): "cannot be read",
        ("agent.py:agent", "x", "--script", "good", "--from", "abcd"): "give one of them",
        ("agent.py:agent", "--script", "good"): "no INPUT: give one, or --from RUN",
        ("agent.py:agent", "x", "--script", "good"): "pay would run for real, once or more per crash point: give --yes",
        ("agent.py:agent", "--from", "abcd", "--db", "none.db"): "none.db",
    }
    command = [sys.executable, "-c", COMMANDS, json.dumps([["drill", *args] for args in cases])]
    env = os.environ | {"TMPDIR": str(stage.temporary)}
    shown = subprocess.run(command, cwd=stage.folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for (code, out, err), expected in zip(json.loads(shown.stdout), cases.values(), strict=True):
        assert (code, out) == (2, ""), err
        assert err.count("\n") == 1 and expected in err
    assert not stage.effects.exists()
    assert stage.left() == []


def test_an_undisturbed_run_that_fails_is_no_ground_for_a_drill(stage: Stage) -> None:
    stage.cast(GOOD, '{"tool_calls": [{"name": "note"}]}\n')
    done = stage.drill("hello")
    assert (done.code, done.said) == (2, [])
    assert "undisturbed, the run does not complete: it ends as failed: model_error" in done.err
    assert "has 1 turns, turn 2 was asked for" in done.err


def test_on_a_terminal_it_asks_before_it_acts_and_shows_a_table(stage: Stage) -> None:
    stage.cast(BLIND, '{"text": "nothing to do"}\n')
    ours, theirs = pty.openpty()
    process = stage.start(
        "drill", "agent.py:agent", "x", "--script", "script", stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = read_until(ours, "Go on?")
    os.write(ours, b"y\n")
    shown += read_until(ours, None)
    assert process.wait(30) == 0
    assert "pay will run for real" in shown
    assert "CRASH POINT" in shown and "before run_created" in shown
    assert "6 crash points, 6 kills: 6 ended as undisturbed, 0 effects doubled" in shown
    assert "the script calls pay never" in shown


def read_until(terminal: int, text: str | None) -> str:
    """What comes from a terminal up to a text, or to its end."""
    shown = b""
    while text is None or text.encode() not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # its other end is closed
            break
    return shown.decode()
