"""The command line on real clusters: the streams, a ledger outside, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from .cli_kit import Place, lines_until, place, until

__all__ = ["place"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
BLANK_LINES = 100_000
"""At the end of a data set they make reading it take a while."""


def test_a_scripted_run_speaks_only_json_and_leaves_nothing_behind(place: Place) -> None:
    turns = [{"tool_calls": [{"name": "pay"}]}, {"text": "bye \x1b[31m", "usage": {"output_tokens": 5}}]
    (place.folder / "turns.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    code, out, err = place.run("run", "agent.py:agent", "hello", "--model", "script:turns.jsonl", "--json")
    assert code == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    run_id = told[0]["run_id"]
    assert err == f"run {run_id}\n"
    assert [event["seq"] for event in told[:-1]] == list(range(1, len(told)))
    assert (told[-1]["type"], told[-1]["output"]) == ("outcome", "bye \x1b[31m")
    assert place.entries() == [run_id]
    assert not place.left() and not place.clusters()


def killed_when(process: subprocess.Popen[str], condition: Callable[[], Any]) -> str:
    """Kill a command as soon as something is true; what it has said on stderr."""
    until(condition)
    os.kill(process.pid, signal.SIGKILL)
    return process.communicate()[1]


def reads(process: subprocess.Popen[str], name: str) -> bool:
    """Whether a process has a file of this name open."""
    return any(file.path.endswith(name) for file in psutil.Process(process.pid).open_files())


def test_a_batch_whose_driver_is_killed_again_and_again_is_finished_by_the_same_command(place: Place) -> None:
    samples = [json.dumps({"id": n, "input": f"q{n}"}) + "\n" for n in range(30)]
    (place.folder / "data.jsonl").write_text("".join(samples) + BLANK_LINES * "\n")
    command = "batch", "agent.py:agent", "data.jsonl", "--name", "b", "--actors", "2", "--output", "out.jsonl"
    killed_when(place.start(*command), lambda: len(place.entries()) >= 9)
    planning = place.start(*command)
    assert killed_when(planning, lambda: reads(planning, "data.jsonl")) == "", "it had done with planning"
    assert len(place.entries()) < 30, "the driver was killed too late to prove anything"
    killed_when(place.start(*command), lambda: len(place.entries()) >= 18)
    assert len(place.entries()) < 30, "the driver was killed too late to prove anything"
    assert not (place.folder / "out.jsonl").exists()

    code, out, err = place.run(*command)
    assert code == 0, err
    assert out.startswith("30 completed; ") and "30/30: 30 completed" in err
    assert "Traceback" not in err and "chatter" not in out + err and "raylet" not in out + err
    assert Counter(place.entries()).most_common(1)[0][1] == 1, "a sample was paid twice"
    results = [json.loads(line) for line in (place.folder / "out.jsonl").read_text().splitlines()]
    assert [result["id"] for result in results] == [str(n) for n in range(30)]
    assert [result["output"] for result in results] == [f"done with q{n}" for n in range(30)]
    assert {result["run_id"] for result in results} == set(place.entries())
    assert sum(result["usage"]["input_tokens"] for result in results) == 7 * 30, "a turn was paid twice"

    code, out, err = place.run(*command, "--json")
    assert (code, len(out.splitlines())) == (0, 30)
    assert "30 samples, 30 done" in err
    assert len(place.entries()) == 30


def test_ctrl_c_keeps_a_run_resumable_and_resume_finishes_it(place: Place) -> None:
    process = place.start("run", "agent.py:agent", "wait")
    run_id = lines_until(process, "turn_started")[0].split()[1]
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    (*_, told) = lines_until(process, "resumable")
    said_after = time.monotonic() - began
    assert f"perdure --db runs.db resume {run_id[:12]}" in told.replace("resumable: perdure --db", "perdure --db")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said_after < 1.0 and time.monotonic() - began < 8.0
    assert (out, err) == ("", "")
    assert not place.left() and not place.clusters()
    assert [row["status"] for row in place.rows()] == ["running"]

    place.gate.touch()
    code, out, err = place.run("resume", run_id[:8])
    assert (code, out) == (0, "done with wait\n"), err
    assert "run_created" not in err, "what was told before is not told again"
    assert not place.left()


def test_a_run_that_was_approved_while_nobody_worked_goes_on_with_the_next_command(place: Place) -> None:
    code, out, err = place.run("run", "agent.py:agent", "gift")
    assert (code, out) == (3, "") and "question    t0c0: may give run?" in err
    (run_id,) = [row["run_id"] for row in place.rows()]
    assert not place.entries() and not place.left()
    assert "nobody works on this store now" in place.run("approve", run_id, "--by", "ann")[1]
    code, out, err = place.run("resume", run_id)
    assert (code, out) == (0, "done with gift\n"), err
    assert place.entries() == [f"{run_id}:5"]
    assert not place.left() and not place.clusters()


def test_a_standing_supervisor_serves_commands_until_it_is_taken_down(place: Place) -> None:
    code, out, err = place.run("up", "--concurrency", "2")
    assert code == 0 and out.startswith("up at "), err
    assert err == ""
    state = json.loads(place.run("status", "--json")[1])
    assert state["state"] == "up" and len(state["pids"]) >= 2
    assert "up already" in place.run("up")[2]

    code, out, err = place.run("run", "agent.py:agent", "hello")
    assert (code, out) == (0, "done with hello\n"), err
    waiting = place.start("run", "agent.py:agent", "wait")
    run_id = lines_until(waiting, "turn_started")[0].split()[1]
    code, out, err = place.run("cancel", run_id)
    assert (code, out, err) == (0, f"run {run_id}: cancelled\n", f"being cancelled: run {run_id}\n")
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 4, err

    code, out, err = place.run("run", "agent.py:agent", "gift")
    assert code == 3, err
    run_id = err.split()[1]
    approved = place.run("approve", run_id, "--by", "ann")[1]
    assert approved == f"run {run_id}, call t0c0: approved by ann\n"
    until(lambda: place.entries()[-1:] == [f"{run_id}:5"])

    code, out, err = place.run("down")
    assert code == 0 and out.startswith("down"), err
    assert not place.left() and not place.clusters()
    assert json.loads(place.run("status", "--json")[1])["state"] == "down"
    assert not list(place.folder.glob("*.up.*"))
