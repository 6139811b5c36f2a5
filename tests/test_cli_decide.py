"""Questions and decisions on the command line: what is asked, what is answered, and what a wrong answer is told."""

from __future__ import annotations

import asyncio
import json
import shlex
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.store.events import (
    ApprovalDecided,
    Event,
    ToolCallSettled,
    ToolResult,
)
from perdure.store.log import Expire
from perdure.store.rows import RunRow
from perdure.store.sql import SqlLog, open_log
from perdure.store.states import Status

from .ask_kit import ARGUMENTS, SCHEMA, begin, done, doubtful, gated, wants
from .batch_kit import LEASE
from .command_kit import create, no_cluster, perdure, refusal, within

__all__ = ["no_cluster"]

pytestmark = pytest.mark.usefixtures("no_cluster")
HOUR = 3600.0


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A run with one open approval, one with two, one whose call was interrupted, one without a question."""

    async def work(log: SqlLog) -> None:
        await gated(log, "gate1111", reason="over \x1b[31m100", timeout_s=HOUR)
        await gated(log, "twos1111", ["c1", "c2"])
        await doubtful(log, "what1111")
        await begin(log, create("free1111", batch="b", sample="1"), wants())

    path = tmp_path / "runs.db"
    within(path, work)
    return path


def events_of(path: Path, run_id: str, *kinds: type[Event]) -> list[Any]:
    """The run's events of these kinds."""
    stored = within(path, lambda log: log.read(run_id), read_only=True)
    return [one.event for one in stored if isinstance(one.event, kinds)]


def row_of(path: Path, run_id: str) -> RunRow:
    row: RunRow = within(path, lambda log: log.run(run_id), read_only=True)
    return row


def unchanged(path: Path, *args: str | Path) -> str:
    """What a refused command says; it must change nothing."""

    async def everything(log: SqlLog) -> list[Any]:
        rows = await log.runs()
        return [(row, await log.read(row.run_id), await log.calls(row.run_id)) for row in rows]

    before = within(path, everything, read_only=True)
    said = refusal(*args, "--db", path)
    assert within(path, everything, read_only=True) == before
    return said


# -- what is asked ------------------------------------------------------------------------------------------


def test_questions_are_listed_with_the_commands_that_answer_them(db: Path) -> None:
    text = perdure("questions", "--db", db).stdout
    blocks = text.split("\n\n")
    assert [block.split()[1] for block in blocks] == ["gate1111", "twos1111", "twos1111", "what1111"]
    assert "question    c1: may refund run? (non_idempotent, turn 0)" in blocks[0]
    assert f"arguments   {ARGUMENTS}" in blocks[0]
    assert "reason      over \\x1b[31m100" in blocks[0] and "then the run times out" in blocks[0]
    assert f"answer      perdure --db {db} approve gate1111 c1" in blocks[0]
    assert "question    c1: did refund happen?" in blocks[3] and "by process 7 on node node-a" in blocks[3]
    assert f"answer      perdure --db {db} settle what1111 c1 --not-happened" in blocks[3]
    one = perdure("questions", "gate", "--db", db).stdout
    assert one.rstrip() == blocks[0]


def test_questions_are_json_and_limited(db: Path) -> None:
    found = [json.loads(line) for line in perdure("questions", "--json", "--db", db).stdout.splitlines()]
    assert [(one["run_id"], one["tool_call_id"], one["kind"]) for one in found] == [
        ("gate1111", "c1", "approval"),
        ("twos1111", "c1", "approval"),
        ("twos1111", "c2", "approval"),
        ("what1111", "c1", "settlement"),
    ]
    assert (found[0]["arguments"], found[0]["arguments_schema"]) == (ARGUMENTS, SCHEMA)
    assert found[0]["due_at"] == found[0]["asked_at"] + HOUR
    few = perdure("questions", "--json", "--limit", "2", "--db", db)
    assert len(few.stdout.splitlines()) == 2 and "--limit shows more" in few.stderr
    assert perdure("questions", "--batch", "b", "--db", db).stderr == "no questions are open\n"
    assert perdure("questions", "free1111", "--db", db).stderr == "no questions are open\n"


def test_the_answer_that_a_question_shows_is_an_answer(db: Path) -> None:
    text = perdure("questions", "what1111", "--db", db).stdout
    (command,) = [line.partition("answer")[2] for line in text.splitlines() if "--abandon" in line]
    answered = perdure(*shlex.split(command)[1:])
    assert answered.exit_code == 0 and "abandoned by" in answered.stdout


def test_show_says_what_a_waiting_run_waits_for(db: Path) -> None:
    text = perdure("show", "gate1111", "--db", db).stdout
    assert "status      awaiting_approval" in text
    assert "question    c1: may refund run?" in text and f"perdure --db {db} reject gate1111 c1 -m WHY" in text
    facts = json.loads(perdure("show", "what1111", "--json", "--db", db).stdout)
    assert [(one["kind"], one["attempt"], one["pid"]) for one in facts["questions"]] == [("settlement", 1, 7)]
    assert facts["waits_for"] == "did refund happen?"
    assert json.loads(perdure("show", "free1111", "--json", "--db", db).stdout)["questions"] == []


def test_events_of_people_are_told_in_few_words(db: Path) -> None:
    perdure("approve", "gate1111", "--by", "ann", "--arguments", '{"order_id": "18"}', "-m", "less", "--db", db)
    perdure("settle", "what1111", "--abandon", "--by", "bob", "--db", db)
    text = perdure("events", "gate1111", "--db", db).stdout + perdure("events", "what1111", "--db", db).stdout
    text = " ".join(text.split())
    assert f"approval_requested c1 refund({ARGUMENTS}), non_idempotent: over" in text
    assert 'approval_decided c1 approve by ann, with {"order_id":"18"}: less' in text
    assert "tool_call_settled c1 attempt 1 abandon by bob" in text


def test_list_shows_what_waiting_runs_wait_for(db: Path) -> None:
    lines = {line.split()[0]: line for line in perdure("list", "--db", db).stdout.splitlines()}
    assert lines["gate1111"].endswith("may refund run?")
    assert lines["twos1111"].endswith("may refund run?, may refund run?")
    assert lines["what1111"].endswith("did refund happen?")
    assert lines["free1111"].split()[-1] == "1"
    rows = [json.loads(line) for line in perdure("list", "--json", "--db", db).stdout.splitlines()]
    waits = {row["run_id"]: row["waits_for"] for row in rows}
    assert waits["what1111"] == "did refund happen?" and waits["free1111"] is None


# -- what is answered ---------------------------------------------------------------------------------------


def test_an_approval_is_recorded_and_says_how_the_run_goes_on(db: Path) -> None:
    said = perdure("approve", "gate", "--by", "ann", "-m", "fine", "--db", db)
    assert (said.exit_code, said.stderr) == (0, "")
    told = "run gate1111, call c1: approved by ann; nobody works on this store now: perdure"
    assert said.stdout == f"{told} --db {db} resume gate1111\n"
    (event,) = events_of(db, "gate1111", ApprovalDecided)
    assert (event.decision, event.by, event.reason, event.arguments) == ("approve", "ann", "fine", None)
    assert row_of(db, "gate1111").status is Status.AWAITING_TOOL


def test_each_call_of_a_turn_is_decided_by_itself(db: Path) -> None:
    first = perdure("reject", "twos1111", "c2", "-m", "too dear", "--by", "bob", "--db", db).stdout
    assert first == f"run twos1111, call c2: rejected by bob; more is asked: perdure --db {db} questions twos1111\n"
    told = json.loads(perdure("approve", "twos1111", "--by", "ann", "--json", "--db", db).stdout)
    assert (told["tool_call_id"], told["decision"], told["by"]) == ("c1", "approve", "ann")
    assert (told["status"], told["supervised"], told["arguments"]) == ("awaiting_tool", False, None)
    (result,) = events_of(db, "twos1111", ToolResult)
    assert result.tool_call_id == "c2" and "too dear" in result.content


@pytest.mark.parametrize("in_a_file", [False, True])
def test_edited_arguments_come_from_the_command_or_a_file(db: Path, tmp_path: Path, in_a_file: bool) -> None:
    text = '{"order_id": "18",\n "amount": 5}'
    if in_a_file:
        (tmp_path / "edited.json").write_text(text)
        text = f"@{tmp_path / 'edited.json'}"
    said = perdure("approve", "gate1111", "--arguments", text, "--by", "ann", "--db", db)
    assert "approved with edited arguments by ann" in said.stdout, said.output
    (event,) = events_of(db, "gate1111", ApprovalDecided)
    assert event.arguments == '{"amount":5,"order_id":"18"}'


@pytest.mark.parametrize(
    ("options", "outcome", "content"),
    [
        (["--happened", '{"id": 5}'], "happened", '"{\\"id\\": 5}"'),
        (["--happened", '{"id": 5}', "--result-json"], "happened", '{"id":5}'),
        (["--abandon", "-m", "no log"], "abandon", "no log"),
        (["--not-happened"], "not_happened", None),
    ],
    ids=["text", "json", "abandon", "not"],
)
def test_an_interrupted_call_is_settled(db: Path, options: list[str], outcome: str, content: str | None) -> None:
    said = perdure("settle", "what1111", "c1", *options, "--by", "ann", "--db", db)
    assert said.exit_code == 0 and " by ann; nobody works" in said.stdout, said.output
    (event,) = events_of(db, "what1111", ToolCallSettled)
    assert (event.outcome, event.by) == (outcome, "ann")
    results = events_of(db, "what1111", ToolResult)
    assert [content is not None and content in result.content for result in results] == [True] * (content is not None)


def test_a_supervisor_is_nudged_after_a_decision_is_durable(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Status | None]] = []

    def knock(given: str) -> None:
        connection = sqlite3.connect(given)
        (found,) = connection.execute("SELECT status FROM runs WHERE run_id = 'gate1111'")
        connection.close()
        seen.append((given, Status(found[0])))

    monkeypatch.setattr("perdure.cli.decide.nudge", knock)
    monkeypatch.setattr("perdure.cli.cancel.nudge", knock)
    perdure("approve", "gate1111", "--db", db)
    refusal("approve", "gate1111", "--db", db)
    perdure("cancel", "twos1111", "--db", db)
    assert seen == [(str(db), Status.AWAITING_TOOL)] * 2


def test_cancelling_a_waiting_run_closes_it(db: Path) -> None:
    said = perdure("cancel", "gate1111", "-m", "wrong order", "--db", db).stdout
    told = "  c1 refund: never started\n  processes: none, no tool call of it has begun\n"
    assert said == f"run gate1111: cancelled\n{told}"
    assert "the run is cancelled" in unchanged(db, "approve", "gate1111", "c1")


# -- mistakes -----------------------------------------------------------------------------------------------

ANSWERS = [["approve"], ["reject", "-m", "no"], ["settle", "--abandon"]]


@pytest.mark.parametrize("command", [*ANSWERS, ["questions"]], ids=lambda command: command[0])
def test_a_run_that_is_not_there_is_told(db: Path, tmp_path: Path, command: list[str]) -> None:
    assert "no run 'zzzz'" in unchanged(db, *command, "zzzz")
    assert "at least the first 4" in unchanged(db, *command, "ga")
    assert "no runs here yet" in refusal(*command, "gate1111", "--db", tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("command", ANSWERS, ids=lambda command: command[0])
def test_a_call_that_asks_nothing_is_told(db: Path, command: list[str]) -> None:
    what = "settlement" if command[0] == "settle" else "approval"
    assert f"no call of run free1111 waits for {what}" in unchanged(db, *command, "free1111")
    assert "nothing is asked about it" in unchanged(db, *command, "free1111", "c1")
    assert "has no call 'c9'" in unchanged(db, *command, "free1111", "c9")
    assert "has no call '\\x1b'" in unchanged(db, *command, "free1111", "\x1b")


@pytest.mark.parametrize("command", ANSWERS[:2], ids=lambda command: command[0])
def test_which_of_two_calls_is_meant_has_to_be_said(db: Path, command: list[str]) -> None:
    told = unchanged(db, *command, "twos1111")
    assert "2 open questions, name the call: c1 refund" in told and ", c2 refund" in told


def test_an_answer_to_another_kind_of_question_names_the_right_command(db: Path) -> None:
    assert "perdure settle what1111 c1" in unchanged(db, "approve", "what1111")
    assert "perdure approve gate1111 c1" in unchanged(db, "settle", "gate1111", "--not-happened")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("{", "--arguments is not JSON"),
        ("[1]", "--arguments is not a JSON object"),
        ('"order_id"', "--arguments is not a JSON object"),
        ('{"order_id": NaN}', "NaN is not JSON"),
        ("{}", "'order_id' is a required property"),
        ('{"order_id": "1", "amount": "\\u2028"}', "is not of type 'integer'"),
        ("@/no/such/file", "the file cannot be read"),
        ("@", "the file cannot be read"),
    ],
)
def test_arguments_that_will_not_do_are_told(db: Path, arguments: str, told: str) -> None:
    assert told in unchanged(db, "approve", "gate1111", "--arguments", arguments)


def test_options_that_do_not_fit_are_told(db: Path) -> None:
    assert "a rejection needs a reason" in unchanged(db, "reject", "gate1111")
    assert "say one of --happened RESULT" in unchanged(db, "settle", "what1111", "c1")
    assert "say one of --happened RESULT" in unchanged(db, "settle", "what1111", "--abandon", "--not-happened")
    assert "--result-json goes with --happened" in unchanged(db, "settle", "what1111", "--abandon", "--result-json")
    told = unchanged(db, "settle", "what1111", "--happened", "{", "--result-json")
    assert "the result is not JSON" in told
    assert "who decides is named" in unchanged(db, "approve", "gate1111", "--by", " ")
    assert "not both" in unchanged(db, "questions", "gate1111", "--batch", "b")


def test_who_decides_twice_is_told_how_it_was_decided(db: Path) -> None:
    perdure("approve", "gate1111", "--by", "ann", "--db", db)
    assert "call c1: it was approved by ann at " in unchanged(db, "approve", "gate1111")
    assert "it was approved by ann at " in unchanged(db, "reject", "gate1111", "c1", "-m", "no")
    perdure("settle", "what1111", "--happened", "paid", "--by", "bob", "--db", db)
    assert "by bob at " in unchanged(db, "settle", "what1111", "c1", "--not-happened")


def test_who_decides_late_is_told_to_resume(db: Path) -> None:
    async def later(work: Callable[[SqlLog], Awaitable[Any]]) -> None:
        log = await open_log(db, clock=lambda: time.time() + 2 * HOUR)
        await work(log)
        await log.close()

    asyncio.run(later(lambda log: done(log, Expire("gate1111", LEASE.nonce))))
    assert row_of(db, "gate1111").status is Status.TIMED_OUT
    assert "the time to decide has passed; `perdure resume gate1111` asks anew" in unchanged(db, "approve", "gate1111")
    assert perdure("questions", "gate1111", "--db", db).stderr == "no questions are open\n"
    text = perdure("show", "gate1111", "--db", db).stdout
    assert "status      timed_out" in text and "nobody decided in time about call c1" in text


def test_asking_and_deciding_imports_no_ray(db: Path) -> None:
    code = (
        "import sys\nfrom perdure.cli.app import root\n"
        "for words in (['questions'], ['approve', 'gate1111', '--arguments', '{\"order_id\": \"1\"}']):\n"
        "    root([*words, '--db', sys.argv[1]], standalone_mode=False)\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'ray']\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, db], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
