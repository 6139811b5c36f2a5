"""What the operating system is trusted with: tried on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.actors.kernel import (
    AttemptLock,
    boot_id,
    kill_process,
    left_result,
    lock_if_free,
    process_started,
    prove_dead,
    remove_lock,
    runtime_folder,
)

HOLD = """
import os, sys, time
from pathlib import Path
from perdure.actors.kernel import AttemptLock
lock = AttemptLock(Path(sys.argv[1]))
{then}
"""
HOLDS = "print('held', flush=True); time.sleep(60)"
LETS_GO = "lock.release(); print('free', flush=True); time.sleep(60)"
FORKS = """
child = os.fork()
if child == 0:
    os.setsid(); time.sleep(60)
print(child, flush=True); os._exit(0)
"""
DEADLINE = """
import sys, time, os, signal
from perdure.actors.kernel import Deadline
deadline = Deadline(float(sys.argv[1]))
{then}
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python process, and the first line that it printed."""
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


def test_a_lock_that_nobody_holds_is_a_proof_and_a_missing_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not prove_dead(str(path), timeout_s=0)
    AttemptLock(path).release()
    assert prove_dead(str(path), timeout_s=0)
    remove_lock(str(path))
    remove_lock(str(path))
    assert not path.exists()


def test_a_lock_is_free_once_it_is_released(tmp_path: Path) -> None:
    lock = AttemptLock(tmp_path / "lock")
    with lock_if_free(lock.path) as free:
        assert not free
    lock.release()
    with lock_if_free(lock.path) as free:
        assert free
    with lock_if_free(tmp_path / "nothing") as free:
        assert not free


def test_a_lock_whose_file_is_swept_away_while_it_is_taken_has_a_file_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    AttemptLock(path).release()
    with ThreadPoolExecutor(1) as pool:
        with lock_if_free(path) as free:
            assert free
            taken = pool.submit(AttemptLock, path)
            path.unlink()
        lock = taken.result(10)
    with lock_if_free(path) as free:
        assert not free
    lock.release()


def test_the_proof_kills_what_still_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process(HOLD.format(then=HOLDS), str(path)) as (holder, line):
        assert line == "held" and holder.poll() is None
        assert prove_dead(str(path))
        assert holder.wait(10) == -signal.SIGKILL


def test_the_proof_kills_a_holder_that_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process(HOLD.format(then=HOLDS), str(path)) as (holder, _):
        holder.send_signal(signal.SIGSTOP)
        assert prove_dead(str(path))
        assert holder.wait(10) == -signal.SIGKILL


def test_a_process_that_has_let_go_of_the_lock_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process(HOLD.format(then=LETS_GO), str(path)) as (worker, line):
        assert line == "free"
        assert prove_dead(str(path))
        assert worker.poll() is None, "it may serve another attempt by now"


def test_a_child_that_inherited_the_lock_keeps_it_after_the_death_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with process(HOLD.format(then=FORKS), str(path)) as (parent, line):
        assert parent.wait(10) == 0
        child = int(line)
        started = process_started(child)
        with lock_if_free(path) as free:
            assert not free
        assert started, "the child is gone already"
        assert prove_dead(str(path)), "the child is a holder like any other"
        assert process_started(child) != started


def test_the_holder_is_found_through_a_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    path = tmp_path / "link" / "lock"
    with process(HOLD.format(then=HOLDS), str(path)) as (holder, _):
        assert prove_dead(str(path))
        assert holder.wait(10) == -signal.SIGKILL


def test_only_a_whole_result_is_found(tmp_path: Path) -> None:
    lock = AttemptLock(tmp_path / "lock")
    assert left_result(str(lock.path)) is None
    lock.leave(b'{"a": 1}')
    assert left_result(str(lock.path)) == b'{"a": 1}'
    lock.release()
    lock.path.write_bytes(b'{"a": ')
    assert left_result(str(lock.path)) is None
    assert left_result(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize(
    "then",
    ["time.sleep(60)", "os.kill(os.getpid(), signal.SIGSTOP)", "sum(iter(int, 1))", "signal.pause()"],
    ids=["asleep", "stopped", "busy in C", "paused"],
)
def test_the_deadline_ends_a_process_whatever_it_does(then: str) -> None:
    done = subprocess.run([sys.executable, "-c", DEADLINE.format(then=then), "0.2"], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_deadline_that_was_disarmed_ends_nothing() -> None:
    then = "deadline.disarm(); time.sleep(0.5); print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", DEADLINE.format(then=then), "0.3"], timeout=30, check=False, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"alive\n")


def test_a_process_is_killed_only_if_it_still_is_the_one_that_was_meant(tmp_path: Path) -> None:
    with process(HOLD.format(then=HOLDS), str(tmp_path / "lock")) as (holder, _):
        started = process_started(holder.pid)
        assert kill_process(holder.pid, started - 1.0)
        assert holder.poll() is None
        assert kill_process(holder.pid, started)
        assert process_started(holder.pid) != started
        assert kill_process(holder.pid, started), "what is gone is gone"
    assert process_started(holder.pid) == 0.0


def test_a_process_and_a_boot_keep_their_names() -> None:
    assert process_started(os.getpid()) == process_started(os.getpid()) > 0
    assert boot_id() == boot_id() != ""


def test_the_folder_of_locks_is_private() -> None:
    folder = runtime_folder("a-test-of-the-kernel")
    assert folder.stat().st_mode & 0o077 == 0
    folder.rmdir()
