"""What `perdure drill` makes of what it has seen: points, doubled effects, the person's answers, advice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.actors.tools import tool
from perdure.drill.advice import advice
from perdure.drill.ledger import Ledger, Note, What
from perdure.drill.person import answer, truth
from perdure.drill.points import Point, append_keys
from perdure.drill.script import replies
from perdure.drill.verdict import Trace, duplicates, judge
from perdure.store.events import (
    ApprovalDecided,
    AssistantMessage,
    Decision,
    Effect,
    Event,
    RunClaimed,
    RunCompleted,
    Stored,
    ToolResult,
    TurnStarted,
)
from perdure.store.log import Accepted, Append, Claim, Command, Create, Leave
from perdure.store.memory import MemoryLog
from perdure.store.rows import RunRow
from perdure.store.states import Status

from .ask_kit import gated
from .drill_kit import request
from .fakes import RUN, accepted, created


def note(what: What, attempt: int = 1, text: str = "", key: str = "k") -> Note:
    return Note(what, tool="pay", call="t0c0", attempt=attempt, text=text, key=key, at=float(attempt))


def trace(effect: Effect, *notes: Note, events: Sequence[Event] = (), lines: int | None = None) -> Trace:
    row = RunRow(RUN, Status.COMPLETED, 1, 1, "a", "d", None, None, 0, 0.0, 0.0)
    every = (request(effect), *events, RunCompleted(output="done", stop_reason="end_turn"))
    stored = [Stored(seq, float(seq), 1, event) for seq, event in enumerate(every, start=1)]
    return Trace(row, stored, notes, lines=lines)


TWICE = note("entered"), note("entered", 2)


@pytest.mark.parametrize(
    ("effect", "notes", "doubled"),
    [
        ("non_idempotent", TWICE, "nobody had said that attempt 1 did not happen"),
        ("non_idempotent", (*TWICE, note("probed", 1, "unknown")), "nobody had said"),
        ("non_idempotent", (*TWICE, note("probed", 1, "did_not_happen")), ""),
        ("non_idempotent", (*TWICE, note("answered", 1, "not_happened")), ""),
        ("non_idempotent", (*TWICE, note("returned"), note("returned", 2)), "returned 2 times"),
        ("idempotent_write", TWICE, ""),
        ("idempotent_write", (note("entered"), note("entered", 2, key="other")), "2 idempotency keys"),
        ("read_only", (*TWICE, note("returned"), note("returned", 2)), ""),
    ],
)
def test_what_counts_as_doubled(effect: Effect, notes: tuple[Note, ...], doubled: str) -> None:
    reasons = list(duplicates(trace(effect, *notes), None))
    assert len(reasons) == bool(doubled)
    assert all(doubled in reason for reason in reasons)


def test_more_lines_are_doubled_effects_and_fewer_are_a_different_end() -> None:
    clean = trace("read_only", lines=1)
    more = judge(trace("read_only", lines=2), Point("before", "run_created"), clean, ())
    assert more.bad and len(more.duplicates) == 1
    fewer = judge(trace("read_only", lines=0), Point("before", "run_created"), clean, ())
    assert fewer.bad and (fewer.duplicates, fewer.differences) == ((), ("effects in the ledger",))


def test_a_different_end_is_excused_by_a_question_or_by_varying_anyhow() -> None:
    clean, point = trace("non_idempotent"), Point("after", "handler t0c0")
    result = ToolResult(tool_call_id="t0c0", attempt=1, content='"abandoned"', is_error=True)
    other = trace("non_idempotent", events=[result])
    assert judge(other, point, clean, ()).bad
    assert not judge(other, point, clean, ("result of t0c0",)).bad
    asked = replace(other, notes=[note("answered", 1, "abandon")])
    verdict = judge(asked, point, clean, ())
    assert not verdict.bad and verdict.differences == ("result of t0c0",)
    assert verdict.questions == ("pay (t0c0): abandon",)


def test_a_run_that_was_given_up_is_told_from_one_that_ended() -> None:
    clean = trace("read_only")
    verdict = judge(replace(clean, codes=(-9, -9)), Point("before", "run_created"), clean, ())
    assert verdict.bad and verdict.status == "completed, no end in time"


@pytest.mark.parametrize(("decision", "status"), [("approve", "awaiting_tool"), ("reject", "running")])
async def test_a_person_of_the_drill_decides_as_told(tmp_path: Path, decision: Decision, status: str) -> None:
    log = MemoryLog()
    await gated(log, RUN, ["c1", "c2"])

    async def commit(command: Command) -> Accepted:
        return await accepted(log, command)

    await answer(await log.calls(RUN), commit, Ledger(tmp_path / "ledger"), decision)
    row = await log.run(RUN)
    assert row and row.status.value == status
    decided = [one.event for one in await log.read(RUN) if isinstance(one.event, ApprovalDecided)]
    assert [(event.decision, event.by) for event in decided] == [(decision, "perdure drill")] * 2


def test_a_person_of_the_drill_never_guesses() -> None:
    assert truth([], "t0c0", 1) == ("not_happened", "")
    assert truth([note("entered"), note("returned", text='"ok"')], "t0c0", 1) == ("happened", '"ok"')
    assert truth([note("entered")], "t0c0", 1) == ("abandon", "")
    assert truth([note("entered"), note("raised")], "t0c0", 1) == ("abandon", "")
    assert truth([note("entered")], "t0c0", 2) == ("not_happened", "")


def test_points_are_named_by_what_is_appended() -> None:
    message = AssistantMessage(turn_index=3, text="", stop_reason="tool_use")
    turn = Append(RUN, 1, 1, (TurnStarted(turn_index=3), message, request("read_only")))
    assert append_keys(turn) == ["assistant_message 3", "turn_started 3", "tool_call_requested 0 t0c0"]
    assert append_keys(Create(RUN, created())) == ["run_created"]
    assert append_keys(Claim(RUN, "c", "l", seen_epoch=4)) == ["run_claimed 5"]
    assert append_keys(Append(RUN, 1, 1)) == append_keys(Leave(RUN, "t0c0", 1)) == []


def test_a_note_that_was_cut_off_by_a_kill_is_no_note(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.write(note("entered"))
    with open(tmp_path / "ledger", "a") as file:
        file.write('\n{"what": "returned", "te')
    ledger.write(note("entered", 2))
    assert ledger.read() == [note("entered"), note("entered", 2)]


def test_a_log_tells_the_script_that_was_played() -> None:
    call = request("read_only").model_copy(update={"arguments": '{"x":1}', "provider_id": "call_0"})
    events: list[Event] = [
        RunClaimed(epoch=1, owner="o", reason="start"),
        AssistantMessage(turn_index=0, text="let me see", stop_reason="tool_use"),
        call,
        AssistantMessage(turn_index=1, text="done", stop_reason="end_turn"),
    ]
    first, last = replies(Stored(seq, 0.0, 1, event) for seq, event in enumerate(events, start=1))
    assert (first.text, first.tool_calls[0].name, first.tool_calls[0].arguments) == ("let me see", "pay", {"x": 1})
    assert (first.tool_calls[0].id, last.text, last.tool_calls) == ("call_0", "done", ())


def test_what_a_tool_lacks_is_told() -> None:
    @tool(effect="idempotent_write", attempts_max=1)
    def put(x: int) -> None: ...

    told = list(advice([put], {"put"}, [], counted=False))
    assert [text.partition(" ")[0] for text in told] == ["put", "put", "what"]
    assert "takes no ToolContext" in told[0] and "attempts_max=1" in told[1] and "--ledger" in told[2]
    assert list(advice([put], set(), [], counted=True))[-1].startswith("the script calls put never")
