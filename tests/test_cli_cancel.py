"""`perdure cancel` on stores without a cluster: what it says of each run and each call, and what it waits for."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.client.cancel import call_ends, cancel, certificate
from perdure.store.events import Event, Machine, ProcessesChecked, RunCancelled, RunFailed, ToolResult
from perdure.store.log import Append, Claim, Mark
from perdure.store.log import Result as ToolDone
from perdure.store.projections import closing_results
from perdure.store.rows import RunRow
from perdure.store.sql import SqlLog, open_log

from .ask_kit import begin, done, gated, wants
from .batch_kit import LEASE
from .cli_kit import lines_until
from .command_kit import create, fill, no_cluster, perdure, refusal, within
from .store_kit import request, result, started

__all__ = ["no_cluster"]

pytestmark = pytest.mark.usefixtures("no_cluster")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run that has completed, one that is queued, and one that waits for a person; two of them of a batch."""
    path = fill(tmp_path / "runs.db", [create("aaaa1111", batch="b")], create("bbbb1111", batch="b"))
    within(path, lambda log: gated(log, "cccc1111", ["c1", "c2"]))
    return path


def works(path: Path) -> None:
    """Let the store look as if a supervisor worked on it, on another machine."""

    async def hold(log: SqlLog) -> None:
        lease = replace(LEASE, boot_id="another", expires_at=time.time() + 3600)
        assert await log.take_lease(lease, LEASE.nonce)

    within(path, hold)


def driven(path: Path, run_id: str, *events: Event) -> None:
    """A run with an owner, whose first turn has these events."""
    within(path, lambda log: begin(log, run_id, *events))


class OwnerThread:
    """Stands for the owner of a run: ends it, as `end` says, once it is being cancelled."""

    def __init__(self, path: Path, run_id: str, end: Callable[[SqlLog, RunRow], Any]) -> None:
        self._path, self._run_id, self._end = path, run_id, end
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()))

    async def _work(self) -> None:
        log = await open_log(self._path)
        async with asyncio.timeout(30):
            while not (row := await log.run(self._run_id)) or not row.cancel:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
            await self._end(log, row)
        await log.close()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._thread.join(40)
        assert not self._thread.is_alive()


async def closes(log: SqlLog, row: RunRow) -> None:
    """The owner's last append."""
    row = await log.run(row.run_id) or row
    calls = [call for call in await log.calls(row.run_id) if call.result_seq is None]
    end = RunCancelled(reason="wrong order"), ProcessesChecked(asked=2, machines=(Machine(host="box", nodes=("n",)),))
    await done(log, Append(row.run_id, row.epoch, row.seq, (*closing_results(calls), *end)))


# -- at once ------------------------------------------------------------------------------------------------


def test_a_queued_run_is_cancelled_at_once_and_again_without_harm(store: Path) -> None:
    assert perdure("cancel", "bbbb1111", "--db", store).stdout == "run bbbb1111: cancelled\n"
    again = perdure("cancel", "bbbb", "--db", store)
    assert (again.exit_code, again.stdout) == (0, "run bbbb1111: was cancelled before\n")
    kinds = [
        json.loads(line)["type"]
        for line in perdure("events", "bbbb", "--json", "--db", store).stdout.split("\n")
        if line
    ]
    assert kinds == ["run_created", "cancel_requested", "run_cancelled"]


def test_a_run_that_waits_for_a_person_is_cancelled_at_once_and_each_call_is_accounted_for(store: Path) -> None:
    told = perdure("cancel", "cccc1111", "-m", "wrong order", "--by", "ann", "--json", "--db", store)
    (answer,) = [json.loads(line) for line in told.stdout.splitlines()]
    calls, processes = answer.pop("calls"), answer.pop("processes")
    assert processes == {"at": None, "asked": 0, "machines": [], "gone": []}, "no call had begun"
    assert answer == {
        "run_id": "cccc1111",
        "answer": "cancelled",
        "again": False,
        "status": "cancelled",
        "reason": "wrong order",
        "supervised": False,
    }
    assert [(call["tool_call_id"], call["name"], call["fate"]) for call in calls] == [
        ("c1", "refund", "never started"),
        ("c2", "refund", "never started"),
    ]
    assert "by ann" in perdure("events", "cccc1111", "--db", store).stdout


def test_a_run_that_has_ended_is_refused_and_so_is_an_unknown_one_and_nothing_else_is_done(store: Path) -> None:
    assert "has already ended as completed; nothing was cancelled" in refusal("cancel", "aaaa1111", "--db", store)
    assert "no run 'zzzz1111'" in refusal("cancel", "bbbb1111", "zzzz1111", "--db", store)
    assert json.loads(perdure("show", "bbbb1111", "--json", "--db", store).stdout)["status"] == "queued"
    mixed = perdure("cancel", "aaaa1111", "bbbb1111", "--db", store)
    assert (mixed.exit_code, mixed.stdout) == (2, "run bbbb1111: cancelled\n")
    told = perdure("cancel", "aaaa1111", "--json", "--db", store)
    assert told.exit_code == 2
    assert [json.loads(line)["answer"] for line in told.stdout.splitlines()] == ["ended"]


def test_a_batch_is_cancelled_whole_but_for_what_has_ended(store: Path) -> None:
    within(store, lambda log: done(log, *[create(f"more{n}", batch="b") for n in range(3)]))
    told = perdure("cancel", "--batch", "b", "--db", store)
    said = [f"run {run_id}: cancelled" for run_id in ("bbbb1111", "more0", "more1", "more2")]
    assert (told.exit_code, sorted(told.stdout.splitlines())) == (0, said)
    again = perdure("cancel", "--batch", "b", "--db", store)
    assert (again.exit_code, again.stdout, again.stderr) == (
        0,
        "",
        "nothing to cancel: every run of the batch has ended\n",
    )
    assert "no batch 'c'" in refusal("cancel", "--batch", "c", "--db", store)
    assert json.loads(perdure("show", "cccc1111", "--json", "--db", store).stdout)["status"] == "awaiting_approval"


@pytest.mark.parametrize("arguments", [[], ["bbbb1111", "--batch", "b"]])
def test_runs_or_a_batch_are_named(store: Path, arguments: list[str]) -> None:
    assert "give runs or --batch NAME" in refusal("cancel", *arguments, "--db", store)


def test_who_cancels_has_a_name(store: Path) -> None:
    assert "1 to 200 printable characters" in refusal("cancel", "bbbb1111", "--by", " ", "--db", store)
    assert json.loads(perdure("show", "bbbb1111", "--json", "--db", store).stdout)["status"] == "queued"


# -- runs that are driven -----------------------------------------------------------------------------------


def test_where_nobody_works_it_says_so_and_does_not_wait(tmp_path: Path) -> None:
    path = fill(tmp_path / "live.db", [], create("dddd1111"), Claim("dddd1111", "claim", LEASE.nonce, 0))
    assert "a cancel is requested; nobody works on this store now" in perdure("cancel", "dddd", "--db", path).stdout
    assert "a cancel was requested before" in perdure("cancel", "dddd", "--db", path).stdout
    assert json.loads(perdure("show", "dddd", "--db", path, "--json").stdout)["cancel"] is True


def test_it_waits_for_the_end_and_tells_what_became_of_each_call(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    effects = ("non_idempotent", "non_idempotent", "non_idempotent", "idempotent_write", "read_only")
    requests = [request(f"c{n}", effect) for n, effect in enumerate(effects)]  # type: ignore[arg-type]
    driven(path, "dddd1111", *requests)
    marks = [started(f"c{n}", nonce=f"n{n}") for n in (1, 2)]
    within(path, lambda log: done(log, *[Mark("dddd1111", mark) for mark in marks]))
    works(path)

    async def end(log: SqlLog, row: RunRow) -> None:
        await done(log, ToolDone(row.run_id, result("c2")))
        await closes(log, row)

    with OwnerThread(path, "dddd1111", end):
        told = perdure("cancel", "dddd1111", "-m", "wrong order", "--db", path)
    assert told.exit_code == 0
    assert told.stderr == "being cancelled: run dddd1111\n"
    head, *lines = told.stdout.splitlines()
    assert head == "run dddd1111: cancelled"
    assert [line.split(": ")[1] for line in lines] == [
        "never started",
        "outcome unknown",
        "finished all the same",
        "outcome unknown",
        "stopped",
        "0 left, looked for on 2 machines, box among them at " + lines[-1].rpartition(" at ")[2],
    ]
    shown = perdure("show", "dddd1111", "--db", path).stdout
    assert "\n".join(line.strip() for line in lines) in shown


def test_a_run_that_fails_before_its_owner_acts_is_told_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    driven(path, "dddd1111")
    works(path)

    async def end(log: SqlLog, row: RunRow) -> None:
        failed = RunFailed(code="internal_error", message="the disk is full", phase="journal")
        await done(log, Append(row.run_id, row.epoch, row.seq, (failed,)))

    with OwnerThread(path, "dddd1111", end):
        told = perdure("cancel", "dddd1111", "--db", path)
    assert (told.exit_code, told.stdout) == (1, "run dddd1111: ended as failed: internal_error\n")


def test_it_does_not_wait_when_told_so_nor_when_the_supervisor_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.db"
    driven(path, "dddd1111", wants())
    works(path)
    told = perdure("cancel", "dddd1111", "--no-wait", "--db", path)
    assert (told.exit_code, told.stdout) == (0, "run dddd1111: a cancel is requested; its owner acts on it\n")
    answers = iter([False, True])

    async def nobody(log: SqlLog) -> bool:
        return next(answers)

    monkeypatch.setattr("perdure.cli.cancel.nobody_works", nobody)
    monkeypatch.setattr("perdure.cli.cancel.CHECK_S", 0.0)
    told = perdure("cancel", "dddd1111", "--db", path)
    assert told.exit_code == 0
    assert told.stdout.startswith("run dddd1111: a cancel was requested before; nobody works on this store now")


def test_an_interrupted_wait_leaves_the_cancel_standing(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    driven(path, "dddd1111", wants())
    works(path)
    command = [sys.executable, "-m", "perdure", "cancel", "dddd1111", "--db", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines_until(process, "being cancelled")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err == f"\ninterrupted; the cancel stands: perdure --db {path} show dddd1111\n"
    assert json.loads(perdure("show", "dddd1111", "--json", "--db", path).stdout)["cancel"] is True


# -- the certificate ----------------------------------------------------------------------------------------


async def test_evidence_of_a_success_that_came_after_the_end_counts_as_finished(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    log = await open_log(path)
    row = await begin(log, "dddd1111", request("c1"), request("c2"))
    marks = [Mark(row.run_id, started(call, nonce=call)) for call in ("c1", "c2")]
    await done(log, *marks)
    assert call_ends(await log.read(row.run_id)) == (), "nobody has cancelled it"
    (cancelling,) = await cancel(log, [row.run_id, row.run_id])
    assert cancelling.answer == "cancelling"
    assert [end.fate for end in (await certificate(log, row.run_id)).calls] == ["open", "open"]
    await closes(log, row)
    assert [end.fate for end in (await certificate(log, row.run_id)).calls] == ["unknown", "unknown"]
    late = ToolResult(tool_call_id="c2", attempt=1, content='"paid"')
    await done(log, ToolDone(row.run_id, late))
    assert [end.fate for end in (await certificate(log, row.run_id)).calls] == ["unknown", "finished"]
    await log.close()
