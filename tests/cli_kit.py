"""The command line on real clusters, for tests: a folder with an agent, a store, a ledger, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

AGENT = """
import asyncio
from pathlib import Path

from perdure import Agent, Settled, ToolContext, tool

HERE = Path(__file__).parent
LEDGER, GATE = HERE / "ledger", HERE / "gate"


@tool(effect="non_idempotent", settles_after_s=0)
def pay(ctx: ToolContext) -> str:
    with open(LEDGER, "a") as file:
        file.write(ctx.run_id + "\\n")
    return "paid"


@pay.reconcile
def paid(ctx: ToolContext) -> Settled:
    done = LEDGER.exists() and ctx.run_id in LEDGER.read_text().split()
    return Settled.happened("paid") if done else Settled.did_not_happen()


@tool(effect="non_idempotent", approval="always")
def give(ctx: ToolContext, amount: int) -> str:
    with open(LEDGER, "a") as file:
        file.write(f"{ctx.run_id}:{amount}\\n")
    return "given"


async def ask(request):
    print("chatter of a model")
    if request.input == "wait":
        while not GATE.exists():
            await asyncio.sleep(0.02)
    elif request.input == "gift" and request.turn_index == 0:
        return {"tool_calls": [{"name": "give", "arguments": {"amount": 5}}]}
    elif request.turn_index == 0:
        return {"tool_calls": [{"name": "pay"}], "usage": {"input_tokens": 7}}
    return f"done with {request.input}"


agent = Agent(name="payer", model=ask, tools=(pay, give))
"""


class Place:
    """A folder with an agent, a store and a temporary folder of its own, and the commands that are given there."""

    def __init__(self, folder: Path, temporary: str) -> None:
        self.folder, self.temporary = folder, temporary
        self.db, self.ledger, self.gate = folder / "runs.db", folder / "ledger", folder / "gate"
        (folder / "agent.py").write_text(AGENT)

    def start(self, *args: str) -> subprocess.Popen[str]:
        return self.python("-m", "perdure", "--db", "runs.db", *args)

    def python(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *args],
            cwd=self.folder,
            env=os.environ | {"TMPDIR": self.temporary, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str) -> tuple[int, str, str]:
        process = self.start(*args)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def rows(self) -> list[dict[str, Any]]:
        if not self.db.exists():
            return []
        return [json.loads(line) for line in self.run("list", "--json", "--limit", "1000")[1].splitlines()]

    def left(self) -> list[psutil.Process]:
        """Processes whose command line, or whose folder, names our temporary folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self.temporary in " ".join(process.cmdline()) or process.environ().get("TMPDIR") == self.temporary:
                    found.append(process)
        return found

    def clusters(self) -> list[str]:
        """Folders of clusters in our temporary folder."""
        return [name for name in os.listdir(self.temporary) if name.startswith(("perdure-ray", "perdure-up"))]

    def entries(self) -> list[str]:
        return self.ledger.read_text().split() if self.ledger.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    temporary = tempfile.mkdtemp(prefix="p", dir="/tmp")  # short: sockets have short names
    here = Place(tmp_path, temporary)
    yield here
    for process in here.left():
        with contextlib.suppress(psutil.Error):
            process.kill()
    shutil.rmtree(temporary, ignore_errors=True)


def until(condition: Callable[[], Any], deadline_s: float = 60.0) -> Any:
    """The condition's value as soon as it is true."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
    return value


def lines_until(process: subprocess.Popen[str], word: str) -> list[str]:
    """What a process says on stderr, up to the line with this word."""
    assert process.stderr
    said = []
    for line in process.stderr:
        said.append(line)
        if word in line:
            return said
    raise AssertionError(f"{word!r} was never said: {said}")
