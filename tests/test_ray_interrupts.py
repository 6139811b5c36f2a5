"""Ctrl-C as a terminal sends it, to the whole process group: once, twice, and while nothing is launched yet."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter

import pytest

from perdure.client.launching import Request, check_agent, create

from .cli_kit import Place, lines_until, place, until
from .command_kit import within

__all__ = ["place"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
SAMPLES = 6
AT_ONCE_S = 1.0
"""How soon a command answers Ctrl-C, and a second one ends it."""


PROGRAM = """
import sys

from perdure.__main__ import main

sys.argv[0] = "perdure"
print("up", flush=True)
main()
"""
"""The command, which says when it is begun: before that, Ctrl-C is the interpreter's."""


class Foreground:
    """A command with a process group of its own, like one that a shell has started in a terminal."""

    def __init__(self, place: Place, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--db", "runs.db", *args],
            cwd=place.folder,
            env=os.environ | {"TMPDIR": place.temporary, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        assert self.process.stdout and self.process.stdout.readline() == "up\n"

    def interrupt(self) -> float:
        """Ctrl-C; when."""
        os.killpg(self.process.pid, signal.SIGINT)
        return time.monotonic()

    def interrupt_and_hear(self) -> str:
        """Ctrl-C, and what the command says within a second."""
        began = self.interrupt()
        said = lines_until(self.process, "interrupted")[-1]
        assert time.monotonic() - began < AT_ONCE_S
        return said


def sound(place: Place) -> bool:
    """Whether the database is whole, and every log without a gap."""
    connection = sqlite3.connect(place.db)
    (whole,) = connection.execute("PRAGMA integrity_check").fetchone()
    gaps = connection.execute("SELECT run_id FROM events GROUP BY run_id HAVING max(seq) != count(*)").fetchall()
    behind = connection.execute(
        "SELECT run_id FROM runs r WHERE seq != (SELECT max(seq) FROM events e WHERE e.run_id = r.run_id)"
    ).fetchall()
    connection.close()
    return (whole, gaps, behind) == ("ok", [], [])


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_batch_says_how_to_go_on_and_the_same_command_finishes_it(place: Place, times: int) -> None:
    inputs = ["wait" if n % 2 else f"q{n}" for n in range(SAMPLES)]
    lines = [json.dumps({"id": n, "input": text}) + "\n" for n, text in enumerate(inputs)]
    (place.folder / "data.jsonl").write_text("".join(lines))
    command = ("batch", "agent.py:agent", "data.jsonl", "--name", "b", "--concurrency", "3")
    batch = Foreground(place, *command)
    until(lambda: len(place.entries()) >= 1)
    said = batch.interrupt_and_hear()
    assert f"of {SAMPLES} done; the rest stays resumable: perdure --db runs.db {' '.join(command)}" in said
    if times == 2:
        began = batch.interrupt()
        batch.process.wait(timeout=30)
        assert time.monotonic() - began < AT_ONCE_S
    out, err = batch.process.communicate(timeout=30)
    assert (batch.process.returncode, out) == (130, "")
    assert "Traceback" not in err
    until(lambda: not place.left() and not place.clusters(), deadline_s=10)
    assert sound(place)

    place.gate.touch()
    code, out, err = place.run(*command)
    assert code == 0, err
    assert out.startswith(f"{SAMPLES} completed")
    assert Counter(place.entries()).most_common(1)[0][1] == 1, "a sample was paid twice"
    assert len(place.entries()) == SAMPLES / 2


def test_a_command_that_is_interrupted_at_any_moment_of_its_start_leaves_at_once(place: Place) -> None:
    """Before and after the launch, once and twice: code 130, nothing left, and what was launched is resumable."""
    for pause_s, times in ((0.3, 1), (1.0, 1), (2.0, 2)):
        command = Foreground(place, "run", "agent.py:agent", "wait")
        with pytest.raises(subprocess.TimeoutExpired):
            command.process.wait(timeout=pause_s)  # at what moment that is, is the machine's matter
        command.interrupt()
        for _ in range(times - 1):
            with pytest.raises(subprocess.TimeoutExpired):
                command.process.wait(timeout=0.05)
            command.interrupt()
        out, err = command.process.communicate(timeout=15)
        assert (command.process.returncode, out) == (130, ""), err
        assert "Traceback" not in err
        until(lambda: not place.left() and not place.clusters(), deadline_s=10)
    rows = place.rows()
    assert {row["status"] for row in rows} <= {"queued", "running"}
    assert not rows or sound(place)


def test_resume_of_a_batch_names_the_batch_when_it_is_interrupted(place: Place) -> None:
    loaded = check_agent(f"{place.folder}/agent.py:agent")
    creates = [create(loaded, Request("wait", batch="b c")) for _ in range(2)]
    within(place.db, lambda log: log.commit(creates))
    resume = Foreground(place, "resume", "--batch", "b c")
    until(lambda: [row["status"] for row in place.rows()] == ["running"] * 2)
    assert resume.interrupt_and_hear().endswith("resumable: perdure --db runs.db resume --batch 'b c'\n")
    assert resume.process.wait(timeout=30) == 130
