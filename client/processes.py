"""Processes that we started, named for good by pid and start time, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import psutil
from pydantic import BaseModel, ConfigDict

from ..actors.kernel import process_started

POLL_S: Final = 0.05
MARK: Final = "PERDURE_CLUSTER"
"""Environment variable that names the folder of the cluster that a process belongs to."""


class Known(BaseModel):
    """A process: its pid alone would name another one after a while."""

    model_config = ConfigDict(frozen=True)
    pid: int
    started: float
    name: str = ""

    @property
    def lives(self) -> bool:
        """Whether that very process still runs."""
        return self.started > 0 and process_started(self.pid) == self.started


def known(process: psutil.Process) -> Known:
    """A running process; its `started` is 0 when it is gone already."""
    name = ""
    with contextlib.suppress(psutil.Error):
        name = process.name()
    return Known(pid=process.pid, started=process_started(process.pid), name=name)


def processes_of(folder: str, roots: Iterable[Known] = ()) -> list[Known]:
    """The processes that were started with `folder` as their MARK, those of `roots`, and the children of all of them.

    The environment tells, since Ray's workers and agents have command lines that name no folder.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in found and process.environ().get(MARK) == folder:
                _add_tree(process, found)
    for root in roots:
        if root.lives:
            with contextlib.suppress(psutil.Error):
                _add_tree(psutil.Process(root.pid), found)
    found.pop(psutil.Process().pid, None)
    return [one for one in map(known, found.values()) if one.started]


@contextlib.contextmanager
def marked(folder: str) -> Iterator[None]:
    """Every process that is started inside the block has the mark of this folder, and so have its descendants."""
    before = os.environ.get(MARK)
    os.environ[MARK] = folder
    try:
        yield
    finally:
        del os.environ[MARK]
        if before is not None:
            os.environ[MARK] = before


def _add_tree(process: psutil.Process, found: dict[int, psutil.Process]) -> None:
    found[process.pid] = process
    for child in process.children(recursive=True):
        found[child.pid] = child


def end(processes: Sequence[Known], term_s: float, kill_s: float) -> list[Known]:
    """SIGTERM, and SIGKILL for those that are left after `term_s`. Returns what still runs after `kill_s` more."""
    return kill(_signal(processes, "terminate", term_s), kill_s)


def kill(processes: Sequence[Known], timeout_s: float) -> list[Known]:
    """SIGKILL. Returns what still runs after that time."""
    return _signal(processes, "kill", timeout_s)


def _signal(processes: Sequence[Known], how: str, timeout_s: float) -> list[Known]:
    for one in processes:
        with contextlib.suppress(psutil.Error):
            if one.lives:
                getattr(psutil.Process(one.pid), how)()
    deadline = time.monotonic() + timeout_s
    while (left := [one for one in processes if one.lives]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left
