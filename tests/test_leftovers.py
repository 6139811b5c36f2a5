"""Which lock files are swept, on a log in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.actors import leftovers
from perdure.actors.kernel import AttemptLock
from perdure.actors.leftovers import sweep_locks
from perdure.store.log import CallRow
from perdure.store.memory import MemoryLog


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
