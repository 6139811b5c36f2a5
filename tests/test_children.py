"""What attempts start, on real processes: found by tree, by mark and by file, and ended whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.actors import children
from perdure.actors.children import MARK, end_all, end_marked, mark_of, marked, within
from perdure.actors.kernel import process_started, runtime_folder

from .fakes import STORE

WORKER = """
import os, signal, subprocess, sys, time
from perdure.actors.children import Children, adopt_orphans
adopt_orphans()
signal.signal(signal.SIGTERM, lambda *_: sys.exit("as Ray has its workers do"))
what, store, run = sys.argv[1:4]
it = Children(store, run, "t0c0", 1)
def daemon():
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            time.sleep(60)
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))
def started(*argv, **more):
    return subprocess.Popen(argv, **more).pid
pids = {
    "plain": lambda: [started("sleep", "60")],
    "session": lambda: [started("sleep", "60", start_new_session=True)],
    "bare": lambda: [started("env", "-i", "sleep", "60", start_new_session=True)],
    "daemon": lambda: [int(subprocess.run(
        ["sh", "-c", "setsid sleep 60 >/dev/null & echo $!"], stdout=subprocess.PIPE).stdout)],
    "forked": lambda: [daemon()],
    "deaf": lambda: [started("sh", "-c", "trap '' TERM; sleep 60 & wait; sleep 60")],
    "stopped": lambda: [started("sh", "-c", "kill -STOP $$")],
    "nothing": lambda: [],
}[what]()
time.sleep(0.1)
found = {pid for pid, _ in it.found()}
print(*pids, *sorted(found - set(pids)), flush=True)
if not set(pids) <= found:
    sys.exit(f"{pids} not in {found}")
if sys.stdin.readline() == "end\\n":
    ended = it.end()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        left = "a child"
    except ChildProcessError:
        left = "nothing"
    print(ended, left, flush=True)
    sys.stdin.readline()
"""
KINDS = ["plain", "session", "bare", "daemon", "forked", "deaf", "stopped"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    runtime_folder.cache_clear()
    yield
    runtime_folder.cache_clear()


@contextmanager
def worker(what: str, run: str = "r1") -> Iterator[tuple[subprocess.Popen[str], list[tuple[int, float]]]]:
    """A process that serves an attempt, and what that has started."""
    argv = [sys.executable, "-c", WORKER, what, STORE, run]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pids = [int(pid) for pid in process.stdout.readline().split()]
        named = [(pid, process_started(pid)) for pid in pids]
        try:
            yield process, named
        finally:
            process.kill()
            for pid, started in named:
                if process_started(pid) == started:
                    os.kill(pid, signal.SIGKILL)


def gone(named: list[tuple[int, float]]) -> bool:
    return not children.alive(named)


@pytest.mark.parametrize("what", [*KINDS, "nothing"])
def test_an_attempt_ends_what_it_has_started_and_buries_it(what: str) -> None:
    with worker(what) as (process, named):
        assert bool(named) is (what != "nothing")
        assert not named or not gone(named)
        assert process.stdin and process.stdout
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True nothing\n"
        assert gone(named)


@pytest.mark.parametrize("what", [kind for kind in KINDS if kind != "bare"])
def test_what_outlives_a_killed_worker_is_found_and_ended_from_outside(what: str) -> None:
    with worker(what, "r1") as (process, named), worker("session", "r10") as (_, others):
        process.kill()
        process.wait()
        assert set(marked(mark_of(STORE, "r1", "t0c0", 1))) == set(children.alive(named))
        assert marked(mark_of(STORE, "r1", "t0c0", 2)) == []
        assert end_marked(mark_of(STORE, "r1"))
        assert gone(named) and marked(mark_of(STORE, "r1")) == []
        assert not gone(others), "another run's"
        assert not list(runtime_folder(STORE).glob("*.forks"))
        assert end_marked(STORE) and gone(others)


def test_a_mark_is_within_its_run_and_its_store_and_no_other() -> None:
    mark = mark_of(STORE, "r1", "t0c0", 1)
    assert within(mark, STORE) and within(mark, mark_of(STORE, "r1")) and within(mark, mark)
    assert not within(mark, mark_of(STORE, "r")) and not within(mark + "0", mark)


def test_what_resists_sigterm_is_killed_when_the_grace_time_is_over_and_not_before() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout and deaf.stdout.readline()
        named = (deaf.pid, process_started(deaf.pid))
        began = time.monotonic()
        assert end_all(lambda: children.alive([named]))
        assert time.monotonic() - began >= children.TERM_GRACE_S
        assert deaf.wait() == -signal.SIGKILL


def test_an_older_attempts_child_is_not_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "")
    first = children.Children(STORE, "r1", "t0c0", 1)
    with subprocess.Popen(["sleep", "60"]) as old:
        second = children.Children(STORE, "r1", "t0c1", 1)
        with subprocess.Popen(["sleep", "60"]) as new:
            assert old.pid in {pid for pid, _ in first.found()}
            assert [pid for pid, _ in second.found()] == [new.pid]
            assert second.end()
            assert old.poll() is None and process_started(new.pid) == 0.0
        old.kill()


RUNS = """
import sys, os, subprocess
from perdure.actors.tools import Cancelled, ToolContext
ctx = ToolContext("r", 0, "t0c0", 1, "key", 0.0)
{then}
"""


def program(then: str) -> subprocess.CompletedProcess[str]:
    """A program with a ToolContext `ctx`."""
    code = RUNS.format(then=then)
    where = tempfile.gettempdir()
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=where)


def test_run_process_gives_what_a_program_said_and_takes_input_environment_and_folder(tmp_path: Path) -> None:
    then = f"""
done = ctx.run_process(["sh", "-c", "cat; pwd; echo $A$B; echo no >&2; exit 3"],
                       input="in\\n", cwd={str(tmp_path)!r}, env={{"A": "a"}})
print(repr((done.returncode, done.stdout, done.stderr)))
try:
    ctx.run_process(["false"], check=True)
except subprocess.CalledProcessError as error:
    print(error.returncode)
"""
    expected = (3, f"in\n{tmp_path}\na\n", "no\n")
    assert program(then).stdout == f"{expected!r}\n1\n"


def test_run_process_does_not_wait_for_what_the_program_has_left_in_the_background() -> None:
    done = program('print(ctx.run_process(["sh", "-c", "sleep 20 & echo $!"]).stdout)')
    os.kill(int(done.stdout), signal.SIGKILL)


def test_run_process_ends_its_group_when_it_is_cancelled() -> None:
    then = """
import pathlib, threading
timer = threading.Timer(0.5, lambda: setattr(ctx.cancelled, "came", True))
timer.start()
try:
    ctx.run_process(["sh", "-c", "sleep 60 & echo $! $$ > pids; sleep 60"])
except KeyboardInterrupt:
    print(pathlib.Path("pids").read_text())
"""
    pids = [int(pid) for pid in program(then).stdout.split()]
    assert len(pids) == 2 and not any(process_started(pid) for pid in pids)


def test_a_child_of_run_process_dies_with_its_parent() -> None:
    then = """
import threading
def die():
    children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
    print(children, flush=True)
    os.kill(os.getpid(), 9)
threading.Timer(0.5, die).start()
ctx.run_process(["sleep", "60"])
"""
    done = program(then)
    assert done.returncode == -signal.SIGKILL
    (pid,) = map(int, done.stdout.split())
    end = time.monotonic() + 5
    while process_started(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not process_started(pid)
