"""What a program with a Runtime leaves on the machine, seen from outside: after its end, Ctrl-C and kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from perdure.actors.kernel import AttemptLock
from perdure.client.cluster import namespace_digest, store_url

from .cli_kit import Place, place, until
from .ray_kit import AGENT

__all__ = ["place"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

PROGRAM = """
import asyncio
import sys

from perdure import Runtime

WORK = {"a" * 32: ("send", "act,first-kill"), "b" * 32: ("put", "first-kill,act"), "c" * 32: ("send", "wait,act")}


async def main(agent, folder):
    async with Runtime("runs.db", actors=2) as runtime:
        runs = []
        for run_id, (name, do) in WORK.items():
            turns = {"turns": [[{"name": name, "arguments": {"do": do}}]]}
            runs.append(await runtime.launch(agent, turns, run_id=run_id, metadata={"dir": folder}))
        for run in runs:
            print((await run.outcome()).status)


asyncio.run(main(*sys.argv[1:]))
"""
LEAVES_S = 10.0
DIES_S = 15.0
HELPERS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent", "default_worker.py"}
"""Processes of Ray that run nothing of ours: its agents, and workers that were being started and find no raylet."""


class Program:
    """The program under test and what it does to the machine."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.locks = Path(place.temporary, f"perdure-{os.getuid()}")
        (place.folder / "program.py").write_text(PROGRAM)

    def start(self) -> subprocess.Popen[str]:
        return self.place.python("program.py", AGENT, str(self.place.folder))

    def start_and_wait(self) -> subprocess.Popen[str]:
        """Start it and wait until its third tool is at work and the others are done."""
        process = self.start()
        until(lambda: len(self.ledger("effect")) == 2 and len(self.ledger("begin", "c")) == 1)
        return process

    def ledger(self, kind: str, run: str = "") -> list[str]:
        path = self.place.folder / "ledger"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(f"{kind},{run}")]

    def finish(self, process: subprocess.Popen[str]) -> None:
        """Let the tool go on, and see that all ends well and every effect was had once."""
        (self.place.folder / "go").touch()
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out.split()) == (0, ["completed"] * 3), err
        assert len(self.ledger("effect")) == 3

    def titles(self) -> set[str]:
        """The processes of the program and of its cluster, by what they call themselves."""
        found = set()
        for process in self.place.left():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue  # gone meanwhile
            if line:
                starting = any(part.endswith("default_worker.py") for part in line)
                found.add("default_worker.py" if starting else line[0])
        return found

    def lock_files(self) -> list[str]:
        return [path.name for path in self.locks.rglob("*") if path.is_file()]

    def nothing_is_left(self) -> bool:
        return not self.titles() and not self.place.clusters() and not self.locks.exists()


@pytest.fixture
def program(place: Place) -> Program:
    return Program(place)


def kill_a_run_actor(place: Place) -> None:
    actors = [process for process in place.left() if process.cmdline()[:1] == ["ray::RunActor"]]
    actors[0].kill()


def test_a_program_that_ends_leaves_nothing_though_its_actor_and_its_tools_were_killed(
    program: Program, place: Place
) -> None:
    process = program.start_and_wait()
    kill_a_run_actor(place)
    digest = namespace_digest(store_url(place.db))
    AttemptLock(program.locks / digest / f"{'a' * 32}.t0c0.9.unmarked").release()
    program.finish(process)
    until(program.nothing_is_left, LEAVES_S)


def test_a_program_that_is_interrupted_leaves_only_what_its_open_call_needs(program: Program) -> None:
    process = program.start_and_wait()
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=LEAVES_S)
    assert process.returncode != 0
    until(lambda: not program.titles() and not program.place.clusters(), LEAVES_S - (time.monotonic() - began))
    (lock,) = program.lock_files()
    assert lock.startswith("c" * 32)
    program.finish(program.start())
    until(program.nothing_is_left, LEAVES_S)


def test_what_a_killed_program_leaves_is_gone_after_the_next_one(program: Program) -> None:
    process = program.start_and_wait()
    process.kill()
    process.communicate()
    until(lambda: program.titles() <= HELPERS, DIES_S)
    (folder,) = program.place.clusters()
    again = program.start()
    until(lambda: folder not in program.place.clusters())
    program.finish(again)
    until(program.nothing_is_left, LEAVES_S)
