"""Which lock files are swept, and which processes, on a log in memory."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from perdure.actors import leftovers
from perdure.actors.kernel import AttemptLock, own_start
from perdure.actors.leftovers import sweep_locks, watch_strays
from perdure.actors.proof import Looked
from perdure.store.events import CancelRequested
from perdure.store.log import Cancel
from perdure.store.memory import MemoryLog
from perdure.store.rows import CallRow

from .fakes import NoProcesses, accepted, new_run


class CallsLog(MemoryLog):
    """A log with given calls."""

    rows: tuple[CallRow, ...] = ()

    async def calls(self, run_id: str) -> list[CallRow]:
        return [row for row in self.rows if row.run_id == run_id]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user" / "store"
    folder.mkdir(parents=True)
    monkeypatch.setattr(leftovers, "runtime_folder", lambda name: folder)
    return folder


def started(path: Path, attempt: int = 1, **changes: object) -> CallRow:
    """The row of a call whose attempt 1 was marked with this lock."""
    values: dict[str, object] = {"attempt": attempt, "started_attempt": 1, "lock": str(path)} | changes
    return CallRow("r.1", "t0c0", 0, "send", "non_idempotent", **values)  # type: ignore[arg-type]


async def test_only_a_file_that_an_open_started_call_needs_is_kept(folder: Path) -> None:
    log = CallsLog()
    for number, (kept, changes) in enumerate(
        [(True, {}), (False, {"attempt": 2}), (False, {"result_seq": 7}), (False, {"lock": "another"})]
    ):
        path = folder / f"r.1.t0c0.1.{number}"
        AttemptLock(path).release()
        log.rows = (started(path, **changes),)  # type: ignore[arg-type]
        await sweep_locks(log, "store")
        assert path.exists() is kept
        path.unlink(missing_ok=True)


async def test_a_lock_that_is_held_is_left_alone_and_the_empty_folder_goes(folder: Path) -> None:
    lock = AttemptLock(folder / "gone.t0c0.1.0")
    await sweep_locks(CallsLog(), "store")
    assert lock.path.exists()
    lock.release()
    await sweep_locks(CallsLog(), "store")
    assert not folder.parent.exists()


class Processes(NoProcesses):
    """Marked processes of one node."""

    def __init__(self, *marks: str) -> None:
        self.living = set(marks)
        self.looks: list[bool] = []

    async def look(self, store: str, everywhere: bool = True) -> list[Looked]:
        self.looks.append(everywhere)
        return [Looked("here", ("node",), tuple((mark, (1, 1.0)) for mark in self.living))]

    async def end_children(self, wanted: str, nodes: Collection[str]) -> None:
        assert nodes == ["node"]
        self.living.remove(wanted)


async def test_a_new_journal_ends_what_belongs_to_no_attempt_that_runs_and_to_no_finished_one_of_a_run_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leftovers, "LOOKS_S", (0.0, 0.0, 0.0))
    log = CallsLog()
    await new_run(log, run_id="live")
    await new_run(log, run_id="over")
    await accepted(log, Cancel("over", CancelRequested(by="me")))
    log.rows = (
        CallRow("live", "finished", 0, "send", "read_only", result_seq=7),
        CallRow("live", "runs", 0, "send", "read_only"),
        CallRow("live", "died", 0, "send", "read_only"),
        CallRow("live", "again", 0, "send", "read_only", attempt=2),
        CallRow("over", "finished", 0, "send", "read_only", result_seq=7),
    )
    kept = {"store.live.finished.1", "store.live.runs.1", "store.live.again.2"}
    ended = {"store.live.died.1", "store.live.again.1", "store.over.finished.1", "store.unknown.runs.1"}
    found = Processes(*kept, *ended)
    runs = {("live", "runs", 1), ("live", "again", 2)}
    await watch_strays(log, found, "store", lambda *attempt: attempt in runs)
    assert found.living == kept
    assert found.looks == [False, True, False]


async def test_a_file_that_names_forked_processes_goes_when_none_of_them_lives(folder: Path) -> None:
    forks = folder / "r.1.t0c0.1.forks"
    forks.write_text(f"{os.getpid()} {own_start()}\n")
    await sweep_locks(CallsLog(), "store")
    assert forks.exists()
    forks.write_text(f"{os.getpid()} {own_start() - 1}\n")
    await sweep_locks(CallsLog(), "store")
    assert not forks.exists()
