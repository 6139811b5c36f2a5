"""What commands say of runs that wait for people, and the receipts of their calls, without a cluster."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.cli import resume as resume_command
from perdure.cli import run as run_command
from perdure.store.events import (
    ApprovalDecided,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallUnsettled,
    ToolResult,
    TurnStarted,
)
from perdure.store.log import Accepted, Append, Claim, Decide, Mark, Result, Retry, Settle, Unsettle
from perdure.store.sql import SqlLog, open_log

from .ask_kit import ARGUMENTS, ParkingDoor, asks, begin, done, finish, gated, wants
from .batch_kit import LEASE, write_agent
from .command_kit import create, no_cluster, perdure, within
from .store_kit import message, started

__all__ = ["no_cluster"]

pytestmark = pytest.mark.usefixtures("no_cluster")
HOUR = 3600.0


# -- receipts -----------------------------------------------------------------------------------------------


def test_show_calls_tells_the_whole_story_of_a_call(tmp_path: Path) -> None:
    path, now = tmp_path / "runs.db", [1000.0]

    async def story(log: SqlLog) -> None:
        await gated(log, "long1111", timeout_s=HOUR, reason="always")
        (call,) = await log.calls("long1111")
        decided = ApprovalDecided(
            tool_call_id="c1",
            question=call.question,
            digest=call.digest,
            decision="approve",
            by="ann",
            reason="less",
            arguments='{"order_id":"18"}',
        )
        now[0] += 60
        await done(log, Decide("long1111", decided))
        opened = ToolCallRetried(tool_call_id="c1", attempt=1, reason="approved by ann")
        await done(log, Retry("long1111", 1, 0, opened), Mark("long1111", started()))
        now[0] += 5
        why = ToolCallUnsettled(event_id="q2", tool_call_id="c1", attempt=1, why="no probe")
        await done(log, Unsettle("long1111", why))
        settled = ToolCallSettled(tool_call_id="c1", attempt=1, question="q2", outcome="not_happened", by="bob")
        now[0] += 60
        again = ToolCallRetried(tool_call_id="c1", attempt=2, reason="settled as not happened by bob")
        await done(log, Settle("long1111", settled), Retry("long1111", 1, 0, again))
        await done(log, Mark("long1111", started(attempt=2, nonce="task-2")))
        late = ToolResult(tool_call_id="c1", attempt=1, content='"late"', is_error=True)
        now[0] += 2
        report = ToolResult(tool_call_id="c1", attempt=2, content='"paid"', node="node-b", pid=9, took_s=1.5)
        await done(log, Result("long1111", late), Result("long1111", report))

    within(path, story, clock=lambda: now[0])
    (receipt,) = json.loads(perdure("show", "long1111", "--calls", "--json", "--db", path).stdout)["calls"]
    assert (receipt["requested_at"], receipt["arguments"], receipt["idempotency_key"]) == (1000.0, ARGUMENTS, "key-c1")
    (approval,) = receipt["approvals"]
    assert (approval["asked_at"], approval["due_at"], approval["reason"]) == (1000.0, 1000.0 + HOUR, "always")
    assert approval["decided"] == {
        "at": 1060.0,
        "decision": "approve",
        "by": "ann",
        "reason": "less",
        "arguments": '{"order_id":"18"}',
    }
    first, second = receipt["attempts"]
    assert (first["attempt"], first["epoch"], first["started_at"], first["node"]) == (1, 1, 1060.0, "node-a")
    assert first["owner"] == second["owner"] == LEASE.nonce
    assert first["ended_at"] == 1065.0 and first["evidence"][0]["content"] == '"late"'
    assert first["unsettled"][0]["settled"] == {"at": 1125.0, "outcome": "not_happened", "by": "bob", "reason": ""}
    assert (second["ended_at"], second["took_s"], second["node"], second["pid"]) == (1127.0, 1.5, "node-b", 9)
    assert (receipt["result"]["source"], receipt["result"]["attempt"]) == ("tool", 2)

    labels = ["intended", "asked", "approved", "attempt 1", "started", "unsettled", "settled", "attempt 2", "started"]
    text = perdure("show", "long1111", "--calls", "--db", path).stdout
    story_lines = text[text.index("    intended") :].splitlines()
    assert [line[4:16].strip() for line in story_lines] == [*labels, "late", "result"]
    assert 'by ann: less, with other arguments: {"order_id":"18"}' in text
    assert "attempt 1, not happened, by bob" in text
    assert 'attempt 2, by tool, process 9 on node node-b, took 1.5 s: "paid"' in text


def test_a_call_that_was_never_dispatched_has_no_attempt(tmp_path: Path) -> None:
    denied = ToolResult(tool_call_id="c1", attempt=1, content='"denied"', is_error=True, source="policy")
    path = tmp_path / "runs.db"
    within(path, lambda log: begin(log, "deny1111", wants(), denied))
    within(path, lambda log: gated(log, "gate1111"))
    for run_id in ("deny1111", "gate1111"):
        (receipt,) = json.loads(perdure("show", run_id, "--calls", "--json", "--db", path).stdout)["calls"]
        assert receipt["attempts"] == []


# -- commands that meet a question --------------------------------------------------------------------------


@pytest.fixture
def parking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works on the store brings a new run to its question at once, one whose call was rejected to its end."""

    @contextlib.asynccontextmanager
    async def door(db: str, *_: Any, **__: Any) -> AsyncIterator[ParkingDoor]:
        log = await open_log(db)
        await finish(log)
        try:
            yield ParkingDoor(log)
        finally:
            await log.close()

    for module in (run_command, resume_command):
        monkeypatch.setattr(module, "open_door", door)
    monkeypatch.setattr("perdure.cli.batch.open_door", door)


@pytest.mark.usefixtures("parking")
def test_a_run_that_parks_says_what_it_waits_for_and_how_to_answer(tmp_path: Path) -> None:
    db, agent = tmp_path / "runs.db", write_agent(tmp_path / "code")
    done = perdure("run", agent, "x", "--db", db)
    assert (done.exit_code, done.stdout) == (3, "")
    (run_id,) = [row.run_id for row in within(db, lambda log: log.runs())]
    assert f"run {run_id} waits for a person; a question is open:" in done.stderr
    assert f"answer      perdure --db {db} approve {run_id} c1" in done.stderr
    again = perdure("resume", run_id, "--db", db)
    assert again.exit_code == 3 and "question    c1: may refund run?" in again.stderr
    told = perdure("run", agent, "x", "--db", db, "--json")
    last = json.loads(told.stdout.splitlines()[-1])
    assert (told.exit_code, last["type"], last["status"]) == (3, "outcome", "awaiting_approval")
    assert [question["tool_call_id"] for question in last["questions"]] == ["c1"]
    ids = [row.run_id for row in within(db, lambda log: log.runs())]
    many = perdure("resume", *ids, "--db", db)
    assert many.exit_code == 3 and many.stderr.count("waits for a person: perdure") == 2


@pytest.mark.usefixtures("parking")
def test_a_run_that_nobody_decides_about_in_time_exits_with_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParkingDoor, "in_time", False)
    done = perdure("run", write_agent(tmp_path / "code"), "x", "--db", tmp_path / "runs.db")
    assert done.exit_code == 5
    assert "timed_out (nobody decided in time about call c1 (refund))" in done.stderr.splitlines()[-1]


def test_resume_without_runs_tells_who_waits(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    within(path, lambda log: gated(log, "gate1111"))
    done = perdure("resume", "--db", path)
    assert done.exit_code == 0
    assert done.stderr == f"nothing to resume; 1 waiting for a person: perdure --db {path} questions\n"


@pytest.mark.usefixtures("parking")
def test_a_batch_counts_who_waits_and_goes_on_after_the_decisions(tmp_path: Path) -> None:
    db, agent, data = tmp_path / "runs.db", write_agent(tmp_path / "code"), tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"id": {n}, "input": "q{n}"}}\n' for n in range(3)))
    command = "batch", agent, data, "--name", "week", "--db", db
    done = perdure(*command, "--json")
    assert done.exit_code == 3
    assert [json.loads(line)["status"] for line in done.stdout.splitlines()] == ["awaiting_approval"] * 3
    assert (
        f"3 wait for a person; what is asked, and how to answer: perdure --db {db} questions --batch week"
        in done.stderr
    )
    assert "3 awaiting_approval" in done.stderr.splitlines()[-1]
    asked = [
        json.loads(line) for line in perdure("questions", "--batch", "week", "--json", "--db", db).stdout.splitlines()
    ]
    assert sorted(question["sample"] for question in asked) == ["0", "1", "2"]
    still = perdure(*command)
    assert still.exit_code == 3 and "3 samples, 3 waiting for a person" in still.stderr

    for question in asked[:2]:
        perdure("reject", question["run_id"], "-m", "no", "--db", db)
    done = perdure(*command, "--json")
    assert "3 samples, 1 waiting for a person, 0 new, 2 interrupted" in done.stderr
    assert sorted(json.loads(line)["status"] for line in done.stdout.splitlines()) == [
        "awaiting_approval",
        "completed",
        "completed",
    ]
    assert done.exit_code == 3 and "1 waits for a person" in done.stderr
    perdure("reject", asked[2]["run_id"], "-m", "no", "--db", db)
    assert perdure(*command).exit_code == 0


def test_in_ten_thousand_waiting_runs_reading_and_deciding_takes_well_below_a_second(tmp_path: Path) -> None:
    async def park(log: SqlLog) -> None:
        await log.take_lease(LEASE, None)
        turn = (TurnStarted(turn_index=0), message(), wants(), asks())
        for start in range(0, 10_000, 500):
            creates = [create(f"{number:08x}", batch="b") for number in range(start, start + 500)]
            claims = [Claim(one.run_id, f"claim-{one.run_id}", LEASE.nonce, 0) for one in creates]
            turns = [Append(one.run_id, 1, 2, turn) for one in creates]
            assert all(isinstance(one, Accepted) for one in await log.commit([*creates, *claims, *turns]))

    path = tmp_path / "runs.db"
    within(path, park)
    approve = ["approve", "00000f0f", "--arguments", '{"order_id": "1"}']
    for command in (["list"], ["list", "--batch", "b"], ["questions"], ["show", "00000f0f"], ["status"], approve):
        began = time.process_time()
        assert perdure(*command, "--db", path).exit_code == 0
        assert time.process_time() - began < 0.5, command
