"""Processes that attempts of tools start, and how all of them are ended.

Three things find a descendant. While the attempt's process lives, everything below it is its child: it takes in the
orphans of its descendants, daemons in sessions of their own too. After its death, the mark in the environment, which
whatever is executed inherits; and a file that names each process which was forked and executes nothing, and what a
finished attempt leaves without a mark. Whoever watches the attempt from outside remembers what was below it. Not found
is what clears its environment right before its worker is killed from outside.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from .kernel import call_libc, process_started, runtime_folder
from .stopping import Stopped

if TYPE_CHECKING:
    from .tools import Cancelled

MARK = "PERDURE_ATTEMPT"
"""The environment variable. A run inside a tool of another run has marks of both, joined by commas."""
TERM_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
KILL_S = 3.0
"""How long killed processes are waited for."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OUTER = os.environ.get(MARK, "")
_OUTER_MARKS = frozenset(_OUTER.split(","))
_ENTRY = f"{MARK}=".encode()

Named = tuple[int, float]
"""A process for good: its pid and when it started."""


def mark_of(store: str, run_id: str, tool_call_id: str = "", attempt: int = 0) -> str:
    """The mark of an attempt, or what the marks of all attempts of a run begin with."""
    return f"{store}.{run_id}" + (f".{tool_call_id}.{attempt}" if tool_call_id else "")


def store_of(mark: str) -> str:
    """The store's name in a mark."""
    return mark.partition(".")[0]


def within(mark: str, wanted: str) -> bool:
    """Whether a mark is this one, or that of an attempt of this run."""
    return mark == wanted or mark.startswith(f"{wanted}.")


# -- in the process of the attempt ------------------------------------------------------------------------


class Children:
    """What an attempt has started, seen from its own process. Costs two system calls if that is nothing."""

    def __init__(self, store: str, run_id: str, tool_call_id: str, attempt: int) -> None:
        global _attempt
        self.mark = mark_of(store, run_id, tool_call_id, attempt)
        os.environ[MARK] = f"{_OUTER},{self.mark}" if _OUTER else self.mark
        _attempt = (store, self.mark)
        self._older = frozenset(_descendants()) if _has_children() else frozenset()

    def found(self) -> list[Named]:
        """Those that live. A child of an earlier attempt is not of this one."""
        if not _has_children():
            return []
        new = [each for each in _descendants() if each not in self._older]
        return [each for each in new if not (marks := _marks(each[0])) or self.mark in marks]

    def end(self, patience_s: float = 0.0) -> bool:
        """End all of them that do not end by themselves within this time. True when none is left."""
        if patience_s and _has_children():
            _await_end(self.found(), patience_s)
        return not _has_children() or end_all(self.found)

    def leave(self, *processes: Named) -> None:
        """Name processes that go on when the attempt is over, so that they are found from outside."""
        if processes:
            _name(*processes)


_attempt: tuple[str, str] | None = None
"""Store and mark of the newest attempt in this process."""


@functools.cache
def adopt_orphans() -> None:
    """From now on this process is the parent of descendants whose parent has died, and takes down those it forks."""
    if sys.platform == "linux":
        call_libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.register_at_fork(after_in_child=_take_down)


def _take_down() -> None:
    """A forked process has the environment of its parent's beginning, so it is named in a file. SIGTERM is to end it,
    and not to be handled as Ray has its workers do."""
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _name((os.getpid(), process_started(os.getpid())))


def _name(*processes: Named) -> None:
    """Name processes in the file of the attempt that this process serves, or has served last."""
    if _attempt is None:
        return
    store, mark = _attempt
    path = _forks(store, mark)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(file, "".join(f"{pid} {started}\n" for pid, started in processes).encode())
    os.close(file)


def _has_children() -> bool:
    """Whether this process has any child, dead or alive; one system call."""
    if sys.platform != "linux":
        return bool(psutil.Process().children())
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descendants() -> list[Named]:
    """The living processes below this one; its dead children are buried."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if started := process_started(process.pid):
            found.append((process.pid, started))
        else:
            _bury(process.pid)
    return found


def _bury(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # not ours, or buried by whoever started it
        os.waitpid(pid, os.WNOHANG)


def run_process(
    argv: Sequence[str],
    cancelled: Cancelled,
    input: str | None,
    cwd: str | Path | None,
    env: Mapping[str, str] | None,
    check: bool,
) -> subprocess.CompletedProcess[str]:
    """`ToolContext.run_process`."""
    everything = None if env is None else {**env, MARK: os.environ.get(MARK, "")}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # files, not pipes: a pipe stays open as long as a grandchild in the background holds it
        given.write((input or "").encode())
        given.seek(0)
        process = subprocess.Popen(
            argv,
            stdin=given,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=everything,
            process_group=0,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )
        try:
            while process.poll() is None:
                if cancelled.came:
                    raise Stopped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        except BaseException:
            end_group(process)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
    done = subprocess.CompletedProcess(argv, process.returncode, *texts)
    if check:
        done.check_returncode()
    return done


def die_with(parent: int) -> None:
    """In the child, before it executes: it is killed when its parent dies."""
    if sys.platform == "linux":
        call_libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the process group, and SIGKILL after the grace time to what is left of it."""
    for number, wait_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


# -- from outside -----------------------------------------------------------------------------------------


def marked(wanted: str) -> list[Named]:
    """The living processes on this machine with this mark, or one that begins with it and a dot."""
    return [each for mark, each in all_marked(store_of(wanted)) if within(mark, wanted)]


def all_marked(store: str) -> list[tuple[str, Named]]:
    """The living processes on this machine with a mark of this store, each with its mark."""
    found = [(mark, (pid, 0.0)) for pid in psutil.pids() for mark in _marks(pid) if mark.startswith(f"{store}.")]
    living = [(mark, (pid, started)) for mark, (pid, _) in found if (started := process_started(pid))]
    for path in runtime_folder(store).glob("*.forks"):
        mark = f"{store}.{path.stem}"
        living += [(mark, each) for each in alive(forked(path))]
    return [(mark, each) for mark, each in dict.fromkeys(living) if each[0] != os.getpid()]


def end_marked(wanted: str) -> bool:
    """End all processes on this machine with such a mark; blocks for some seconds if they resist. True when none is
    left."""
    if not end_all(functools.partial(marked, wanted)):
        return False
    store = store_of(wanted)
    for path in runtime_folder(store).glob("*.forks"):
        if within(f"{store}.{path.stem}", wanted):
            path.unlink(missing_ok=True)
    return True


def below(pid: int) -> list[Named]:
    """The living descendants of a process of this machine, as far as their parents live."""
    return trees({pid: ""}, foreign=True)[pid]


def trees(workers: Mapping[int, str], foreign: bool = False) -> dict[int, list[Named]]:
    """The living descendants of these processes of this machine, as far as their parents live. Those with other marks
    than the one given for each are of earlier attempts, and left out unless they are wanted."""
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process.pid)
    found: dict[int, list[Named]] = {}
    for worker, mark in workers.items():
        pids = list(children.get(worker, ()))
        for pid in pids:
            pids += children.get(pid, ())
        own = (pid for pid in pids if foreign or not (marks := _marks(pid)) or mark in marks)
        found[worker] = [(pid, started) for pid in own if (started := process_started(pid))]
    return found


def look(store: str) -> tuple[str, list[tuple[str, Named]]]:
    """The name of this machine, and its processes with a mark of this store."""
    return socket.gethostname(), all_marked(store)


def end_these(processes: Sequence[Named]) -> bool:
    """End processes of this machine, whatever they have started since. True when none of them is left."""
    return end_all(functools.partial(alive, processes))


def forked(path: Path) -> Iterator[Named]:
    """The processes that a file of forks names."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            pid, started = line.split()
            yield int(pid), float(started)


def end_all(find: Callable[[], Iterable[Named]]) -> bool:
    """SIGTERM to all that are found, SIGKILL after the grace time, until nothing is found. True when nothing is."""
    number, end = signal.SIGTERM, time.monotonic() + TERM_GRACE_S + KILL_S
    while found := list(find()):
        if time.monotonic() > end:
            return False
        for pid, started in found:
            _signal(pid, started, number)
        _await_end(found, TERM_GRACE_S if number == signal.SIGTERM else 0.5)
        number = signal.SIGKILL
    return True


def _signal(pid: int, started: float, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process_started(pid) == started:
            os.kill(pid, number)


def alive(found: Iterable[Named]) -> list[Named]:
    """Those that still run."""
    return [(pid, started) for pid, started in found if process_started(pid) == started]


def _await_end(found: Iterable[Named], wait_s: float) -> None:
    end, pause_s = time.monotonic() + wait_s, 0.002
    while (found := alive(found)) and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _marks(pid: int) -> frozenset[str]:
    """The marks of a process that this one does not have itself; none where they cannot be read."""
    value = ""
    try:
        if sys.platform == "linux":
            data = Path(f"/proc/{pid}/environ").read_bytes()
            if _ENTRY in data:
                value = next((e.decode() for e in data.split(b"\0") if e.startswith(_ENTRY)), "").partition("=")[2]
        else:
            value = psutil.Process(pid).environ().get(MARK, "")
    except (OSError, psutil.Error, UnicodeDecodeError):
        return frozenset()  # gone, or another user's
    return frozenset(value.split(",")) - _OUTER_MARKS - {""}


def _forks(store: str, mark: str) -> Path:
    return runtime_folder(store) / f"{mark.removeprefix(store + '.')}.forks"
