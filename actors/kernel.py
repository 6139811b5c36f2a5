"""What the operating system guarantees about an attempt: a deadline that cannot be slept through, and a proof of death.

Deadline: a POSIX timer with SIGKILL ends the process on time even while it is stopped. Proof: a lock on a file
named by the attempt is held by the attempt's process and by the children it was passed to, so whoever can take
the lock knows that all of them are gone; a pid would prove nothing about a worker process that is reused.

A virtual machine that is paused may not count the pause on its clocks; the deadline then slips by as much.
Where there is no `timer_create` (macOS) a thread sends the signal, which a stopped process outlives until it thaws.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil


@functools.cache
def boot_id() -> str:
    """Names this boot of this machine."""
    path = Path("/proc/sys/kernel/random/boot_id")
    if path.exists():
        return path.read_text().strip()
    return f"{uuid.getnode():x}-{psutil.boot_time():.0f}"


def process_started(pid: int) -> float:
    """When a process started: with the pid it names the process for good. 0.0 for one that does not run."""
    try:
        if sys.platform == "linux":  # in clock ticks since boot, which no change of the clock moves
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return 0.0 if fields[0] in "ZX" else float(fields[19])
        return psutil.Process(pid).create_time()
    except (OSError, psutil.Error):
        return 0.0


def kill_process(pid: int, started: float, timeout_s: float = 5.0) -> bool:
    """SIGKILL the process if it still is the one that started then, and wait. True when it is gone."""
    try:
        process = psutil.Process(pid)
        if process_started(pid) != started:
            return True
        process.kill()
        process.wait(timeout_s)
    except psutil.NoSuchProcess:
        return True
    except (psutil.TimeoutExpired, psutil.AccessDenied):
        pass  # the state of the process, asked below, is the answer
    return process_started(pid) != started


@functools.cache
def own_start() -> float:
    """When this process started, as `process_started` says it."""
    return process_started(os.getpid())


@functools.cache
def runtime_folder(name: str) -> Path:
    """A private folder for this user's lock files of one store."""
    folder = Path(tempfile.gettempdir()) / f"perdure-{os.getuid()}" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def locked_file(path: Path) -> int:
    """Create and lock a file of our own; its descriptor. Until it is locked a sweep may delete it: then once more."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


@contextlib.contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Whether nobody holds a file's lock; if so it is ours inside the block. False for a file that is not there."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


class AttemptLock:
    """The lock of one attempt, and the place where it leaves its result for whoever comes after.

    The file holds one line once the handler is done: the result, for the case that it never reaches the journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = locked_file(path)

    def leave(self, result: bytes) -> None:
        """Write the result down. Readers take it for whole when it ends with a newline."""
        os.pwrite(self._file, result + b"\n", 0)

    def release(self) -> None:
        """Close our descriptor; children that hold another keep the lock."""
        os.close(self._file)


def left_result(path: str) -> bytes | None:
    """What an attempt left in its lock file before it ended, if it got that far."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return None
    return data[:-1] if data.endswith(b"\n") else None


def remove_lock(path: str) -> None:
    """Delete a lock file whose attempt is recorded."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def prove_dead(path: str, timeout_s: float = 5.0) -> bool:
    """Kill what holds an attempt's lock, and say whether the lock is free: then nothing of the attempt is left.

    Blocks up to `timeout_s` while killed processes go. A missing file proves nothing. A process that has let go of
    the lock is not touched: it may serve another attempt by now.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        finally:
            os.close(descriptor)
        for process in _holders(path):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def _holders(path: str) -> list[psutil.Process]:
    """Processes that have the file open, this one left out."""
    found, path = [], os.path.realpath(path)  # which is how the kernel calls it
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(opened.path == path for opened in process.open_files()):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue  # another user's, or gone: it does not hold our lock
    return found


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0. Raises OSError."""
    if getattr(_libc(), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")


class _Sigevent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


_CLOCK_MONOTONIC = 1


class Deadline:
    """SIGKILL to this process after a time, unless it is disarmed. Armed by construction."""

    def __init__(self, after_s: float) -> None:
        self._ends_at = time.monotonic() + after_s
        self._thread: threading.Timer | None = None
        self._timer = ctypes.c_void_p()
        if sys.platform == "linux":
            event = _Sigevent(signo=signal.SIGKILL, notify=0)
            call_libc("timer_create", _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))
        self._set(after_s)

    def shorten(self, after_s: float) -> None:
        """Have it come that soon from now on, if it would come later."""
        if time.monotonic() + after_s < self._ends_at:
            self._ends_at = time.monotonic() + after_s
            self._set(after_s)

    def restart(self, after_s: float) -> None:
        """Have it come that much later than now."""
        self._ends_at = time.monotonic() + after_s
        self._set(after_s)

    def disarm(self) -> None:
        if sys.platform == "linux":
            call_libc("timer_delete", self._timer)
        elif self._thread:
            self._thread.cancel()

    def _set(self, after_s: float) -> None:
        if sys.platform == "linux":
            whole = int(after_s)
            spec = _Itimerspec(0, 0, whole, max(1, int((after_s - whole) * 1e9)))
            call_libc("timer_settime", self._timer, 0, ctypes.byref(spec), None)
            return
        if self._thread:
            self._thread.cancel()
        self._thread = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
        self._thread.daemon = True
        self._thread.start()
