"""The signal to stop, from the journal to an attempt that runs in another process.

It is a Unix signal, since nothing else wakes a plain handler that sleeps or waits; and a file that names the attempt
beside it, since the process may serve another one by the time the signal is there. Whoever reads it arms the kernel's
timer: an attempt that goes on in spite of it is killed when the grace time is over, and nothing else is. One that is
in C code does not read it; its task is killed by whoever sent the signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .kernel import Deadline, runtime_folder
from .tools import Cancelled

SIGNAL = signal.SIGUSR1
GRACE_S = 5.0
"""Time between the signal to stop, or a tool's timeout, and SIGKILL."""

AGAIN_S = 0.005


class Again(threading.Timer):
    """Gives a lost signal once more; a thread that no handler has left."""


class Stopped(KeyboardInterrupt):
    """Interrupts a plain handler that is to stop."""


class TimedOut(BaseException):
    """Interrupts a plain handler at its timeout. Not an Exception, so that no handler swallows it by habit."""


class Stoppable:
    """The attempt that this process serves."""

    def __init__(self, store: str, run_id: str, tool_call_id: str, attempt: int, deadline: Deadline) -> None:
        self._deadline = deadline
        # made here, since a signal can come while another is handled, and the lock of `tempfile` be held by then
        self._file = f"{runtime_folder(store)}/{name_of(run_id, tool_call_id, attempt)}"
        self.cancelled = Cancelled()
        self._interruptible = self._lost = False
        self._cancel_task: Callable[[], object] | None = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, the signal raises Stopped; unless the handler has asked whether it was given."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Inside, which runs in an asyncio task, the signal cancels that task, with the same exception."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel_task = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            yield
        finally:
            self._cancel_task = None

    def is_told(self) -> None:
        """The signal has come; it may be for an earlier attempt."""
        try:
            os.unlink(self._file)
        except FileNotFoundError:
            if not self._lost:
                return
        self._lost = False
        self.cancelled.came = True
        self._deadline.shorten(GRACE_S)
        if self.cancelled.asked:
            return
        if self._cancel_task:
            self._cancel_task()
        elif self._interruptible:
            raise Stopped

    def is_told_again(self) -> None:
        """The exception was raised where Python drops every exception. It is raised once more, a little later."""
        self._lost = True
        Again(AGAIN_S, os.kill, (os.getpid(), SIGNAL)).start()


serving: Stoppable | None = None
"""Set while this process serves an attempt."""


@contextmanager
def served(attempt: Stoppable) -> Iterator[None]:
    """This process serves the attempt."""
    global serving
    _listen()
    serving = attempt
    try:
        yield
    finally:
        serving = None


@functools.cache
def _listen() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(SIGNAL, _come)
        sys.unraisablehook = functools.partial(_dropped, sys.unraisablehook)


def _come(signum: int, frame: FrameType | None) -> None:
    if serving:
        serving.is_told()


def _dropped(hook: Callable[[sys.UnraisableHookArgs], object], what: sys.UnraisableHookArgs) -> None:
    """Python drops an exception: one that was raised in __del__, or at a fork, where an interrupt may come as well."""
    if isinstance(what.exc_value, TimedOut):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    elif isinstance(what.exc_value, Stopped) and serving:
        serving.is_told_again()
    else:
        hook(what)


def stopped_by(error: BaseException | None) -> bool:
    """Whether an exception is the signal's, or was raised on account of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (Stopped, asyncio.CancelledError)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


# -- the sender -------------------------------------------------------------------------------------------


def name_of(run_id: str, tool_call_id: str, attempt: int) -> str:
    """The file that says whom the signal is for."""
    return f"{run_id}.{tool_call_id}.{attempt}.stop"


def tell(store: str, run_id: str, tool_call_id: str, attempt: int, pid: int) -> None:
    """Give an attempt in a process of this machine the signal; nothing if it is over."""
    path = runtime_folder(store) / name_of(run_id, tool_call_id, attempt)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    if not _listens(pid):
        path.unlink(missing_ok=True)
        return
    _send(pid)


def tell_again(store: str, run_id: str, tool_call_id: str, attempt: int, pid: int) -> None:
    """Give the signal once more if it was not read: one that comes right before a handler goes to sleep does not wake
    it, but the next one does."""
    if (runtime_folder(store) / name_of(run_id, tool_call_id, attempt)).exists() and _listens(pid):
        _send(pid)


def _send(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, SIGNAL)


def forget(store: str, run_id: str, tool_call_id: str, attempt: int) -> None:
    """Take back a signal that was never read."""
    (runtime_folder(store) / name_of(run_id, tool_call_id, attempt)).unlink(missing_ok=True)


def _listens(pid: int) -> bool:
    """Whether a process handles the signal: any other would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return not Path("/proc/self").exists()
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)
