"""What people decide, on every log: which question, how, by whom, and what the one who comes second is told."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from perdure import UsageError
from perdure.cli.app import COMMANDS
from perdure.client import decisions, questions
from perdure.client.decisions import approve, reject, settle
from perdure.client.questions import open_questions
from perdure.store.errors import NotFound
from perdure.store.events import ApprovalDecided, CancelRequested, RunRequeued, ToolCallSettled, ToolResult
from perdure.store.log import Append, Cancel, Claim, Command, EventLog, Expire, Requeue, Result, Verdict
from perdure.store.memory import MemoryLog
from perdure.store.states import Status

from .ask_kit import ARGUMENTS, SCHEMA, asks, begin, done, doubtful, gated, wants
from .batch_kit import LEASE
from .store_kit import Clock

RUN = "run-1"


async def refused(log: EventLog, decision: Awaitable[Any], run_id: str = RUN) -> str:
    """What a decision is refused with; it must leave no trace."""
    before = await log.run(run_id), await log.read(run_id), await log.calls(run_id)
    with pytest.raises(UsageError) as caught:
        await decision
    assert before == (await log.run(run_id), await log.read(run_id), await log.calls(run_id))
    assert "\n" not in caught.value.message
    return caught.value.message


async def last(log: EventLog, kind: type[Any]) -> Any:
    """The newest event of a kind."""
    return [one.event for one in await log.read(RUN) if isinstance(one.event, kind)][-1]


# -- questions ----------------------------------------------------------------------------------------------


async def test_an_approval_question_says_all_that_one_has_to_know(log: EventLog) -> None:
    await gated(log, RUN, reason="more than 100", timeout_s=60.0, default="reject")
    (question,) = await questions.questions(log, RUN)
    assert (question.kind, question.tool_call_id, question.tool) == ("approval", "c1", "refund")
    assert (question.arguments, question.effect, question.reason) == (ARGUMENTS, "non_idempotent", "more than 100")
    assert (question.asked_at, question.due_at, question.default) == (1000.0, 1060.0, "reject")
    assert (question.digest, question.arguments_schema) == ("digest-c1", SCHEMA)


async def test_a_settlement_question_says_where_it_ran_and_with_what(log: EventLog) -> None:
    await doubtful(log, RUN)
    (question,) = await questions.questions(log, RUN)
    assert (question.kind, question.reason, question.attempt) == ("settlement", "it has no probe", 1)
    assert (question.node, question.pid, question.started_at) == ("node-a", 7, 1000.0)
    assert (question.arguments, question.due_at) == (ARGUMENTS, None)


async def test_questions_are_found_at_the_end_of_a_log_and_far_from_it(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gated(log, RUN, ["c1", "c2"])
    for tail in (1, 4, 200):
        monkeypatch.setattr(questions, "TAIL", tail)
        assert [one.tool_call_id for one in await questions.questions(log, RUN)] == ["c1", "c2"]


async def test_only_what_can_be_answered_is_a_question(log: EventLog, clock: Clock) -> None:
    await gated(log, RUN, ["c1", "c2"])
    await approve(log, RUN, "c2")
    assert [one.tool_call_id for one in await questions.questions(log, RUN)] == ["c1"]
    await done(log, Cancel(RUN, CancelRequested(by="ann")))
    assert await questions.questions(log, RUN) == []
    await gated(log, "late", timeout_s=5.0)
    clock.now += 5
    await done(log, Expire("late", LEASE.nonce))
    assert await questions.questions(log, "late") == []
    with pytest.raises(NotFound):
        await questions.questions(log, "none")


async def test_questions_of_all_runs_come_oldest_first_also_of_runs_where_something_runs(
    log: EventLog, clock: Clock
) -> None:
    for number, run_id in enumerate(("b", "a", "c")):
        clock.now += number
        if run_id == "a":
            await doubtful(log, "a", "c1", wants("c2"))
        else:
            await gated(log, run_id, ["c1", "c2"] if run_id == "b" else ["c1"])
    row = await log.run("a")
    assert row and row.status is Status.AWAITING_TOOL
    assert [(one.run_id, one.tool_call_id) for one in await open_questions(log)] == [
        ("b", "c1"),
        ("b", "c2"),
        ("a", "c1"),
        ("c", "c1"),
    ]
    assert [one.run_id for one in await open_questions(log, limit=3)] == ["b", "b", "a"]
    assert await open_questions(log, batch="none") == []


async def test_the_questions_of_many_runs_take_a_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    log, asked = MemoryLog(), list[str]()
    for number in range(25):
        await gated(log, f"run-{number:02}")

    class Counted:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(log, name)

    monkeypatch.setattr(questions, "PAGE", 10)
    found = await open_questions(cast(EventLog, Counted()))
    assert [one.run_id for one in found] == [f"run-{number:02}" for number in range(25)]
    assert asked == ["runs", "runs", *["open_calls", "read_after"] * 3]
    asked.clear()
    assert len(await open_questions(cast(EventLog, Counted()), limit=5)) == 5
    assert asked == ["runs", "runs", "open_calls", "read_after"]


# -- approve and reject -------------------------------------------------------------------------------------


async def test_an_approval_names_who_gave_it_and_releases_the_call(log: EventLog) -> None:
    await gated(log, RUN)
    decided = await approve(log, RUN, reason="fine")
    assert (decided.row.status, decided.question.tool_call_id) == (Status.AWAITING_TOOL, "c1")
    event = await last(log, ApprovalDecided)
    assert (event.decision, event.reason, event.arguments) == ("approve", "fine", None)
    assert event.by == decided.by == f"{getpass.getuser()}@{socket.gethostname()}"


async def test_a_user_without_a_name_is_named_by_number(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("no such user")

    monkeypatch.setattr(getpass, "getuser", nobody)
    await gated(log, RUN)
    assert (await approve(log, RUN)).by == f"{os.getuid()}@{socket.gethostname()}"


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 201, "\x1b[31m"])
async def test_a_decider_needs_a_printable_name(log: EventLog, name: str) -> None:
    await gated(log, RUN)
    assert "who decides" in await refused(log, approve(log, RUN, by=name))


async def test_a_rejection_closes_the_call_with_its_reason(log: EventLog) -> None:
    await gated(log, RUN)
    assert "needs a reason" in await refused(log, reject(log, RUN, reason=" "))
    assert (await reject(log, RUN, reason="too dear", by="bob")).row.status is Status.RUNNING
    result = await last(log, ToolResult)
    assert (result.source, result.is_error) == ("rejection", True)
    assert "bob" in result.content and "too dear" in result.content


async def test_edited_arguments_are_recorded_canonically_and_only_if_they_differ(log: EventLog) -> None:
    await gated(log, RUN, ["c1", "c2"])
    done = await approve(log, RUN, "c1", arguments={"order_id": "18", "amount": 5})
    assert done.arguments == (await last(log, ApprovalDecided)).arguments == '{"amount":5,"order_id":"18"}'
    assert (await approve(log, RUN, "c2", arguments=json.loads(ARGUMENTS))).arguments is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "'order_id' is a required property"),
        ({"order_id": 17}, "order_id: 17 is not of type 'string'"),
        ({"order_id": "17", "amount": "x" * 1000}, "amount: 'xxx"),
        ({"order_id": "17", "more": 1}, "'more' was unexpected"),
        ({"order_id": float("nan")}, "cannot be written as JSON"),
        ({"order_id": {1, 2}}, "cannot be written as JSON"),
        (["17"], "arguments are a JSON object"),
    ],
)
async def test_arguments_that_break_the_schema_are_refused(log: EventLog, arguments: Any, told: str) -> None:
    await gated(log, RUN)
    message = await refused(log, approve(log, RUN, arguments=arguments))
    assert told in message and len(message) < 700


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"$ref": "http://127.0.0.1:1/x"}, {"properties": {"order_id": {"pattern": "(?q)"}}}],
)
async def test_a_schema_that_cannot_be_applied_lets_no_edited_arguments_through(log: EventLog, schema: Any) -> None:
    await gated(log, RUN, arguments_schema=schema)
    told = await refused(log, approve(log, RUN, arguments={"order_id": "17"}))
    assert "the tool's schema cannot be applied" in told
    await approve(log, RUN)


async def test_which_call_is_meant_is_told_or_asked(log: EventLog) -> None:
    await gated(log, RUN, ["c1", "c2"])
    told = await refused(log, approve(log, RUN))
    assert "2 open questions, name the call: c1 refund(" in told and f"c2 refund({ARGUMENTS})" in told
    assert "has no call 'c3'" in await refused(log, approve(log, RUN, "c3"))
    await approve(log, RUN, "c2", by="ann")
    assert (await approve(log, RUN)).question.tool_call_id == "c1"
    with pytest.raises(NotFound):
        await approve(log, "none")


# -- who comes second ---------------------------------------------------------------------------------------


async def test_who_decides_again_is_told_how_it_was_decided(log: EventLog) -> None:
    await gated(log, RUN, ["c1", "c2"])
    await approve(log, RUN, "c1", by="ann")
    assert "call c1 of run run-1: it was approved by ann" in await refused(log, reject(log, RUN, "c1", reason="no"))
    await reject(log, RUN, "c2", reason="too dear", by="bob")
    assert "it was rejected by bob" in await refused(log, approve(log, RUN, "c2"))
    told = await refused(log, approve(log, RUN))
    assert "no call of run run-1 waits for approval; call c2: it was rejected by bob" in told


class Interfered:
    """A log where somebody else is always a moment faster."""

    def __init__(self, log: EventLog, faster: Callable[[], Awaitable[Any]]) -> None:
        self._log, self._faster = log, faster

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        await self._faster()
        return await self._log.commit(commands)


async def interfered(
    log: EventLog, decide: Callable[[EventLog], Awaitable[Any]], faster: Callable[[], Awaitable[Any]]
) -> str:
    """What a decision is refused with that somebody else overtakes after it has read the question."""
    seen: Any = Interfered(log, faster)
    with pytest.raises(UsageError) as caught:
        await decide(seen)
    return caught.value.message


async def ask_anew(log: EventLog, clock: Clock) -> None:
    """The question's time passes, the run times out, is resumed and asks again."""
    clock.now += 60
    await done(log, Expire(RUN, LEASE.nonce), Requeue(RUN, RunRequeued(by="ann")))
    row = await log.run(RUN)
    assert row
    (claimed,) = await done(log, Claim(RUN, "claim-2", LEASE.nonce, row.epoch))
    await done(log, Append(RUN, claimed.row.epoch, claimed.row.seq, (asks(),)))


async def test_a_question_that_is_asked_anew_is_not_answered_by_an_old_look_at_it(log: EventLog, clock: Clock) -> None:
    await gated(log, RUN, timeout_s=60.0)
    told = await interfered(log, lambda seen: approve(seen, RUN), lambda: ask_anew(log, clock))
    assert "an older question" in told and "look at what is asked now: `perdure questions run-1`" in told
    assert [one.asked_at for one in await questions.questions(log, RUN)] == [clock.now], "it still is to be answered"


async def test_a_cancel_that_is_faster_than_a_decision_is_told(log: EventLog) -> None:
    await gated(log, RUN)
    cancel = Cancel(RUN, CancelRequested(by="x"))
    assert "is cancelled" in await interfered(log, lambda seen: approve(seen, RUN), lambda: done(log, cancel))


async def test_of_simultaneous_deciders_one_wins_and_the_others_are_told_how(log: EventLog) -> None:
    for number in range(20):
        run_id = f"run-{number}"
        await gated(log, run_id)
        deciders = [approve(log, run_id, by=name) for name in ("ann", "eve")]
        deciders.insert(1, reject(log, run_id, reason="no", by="bob"))
        told = await asyncio.gather(*deciders, return_exceptions=True)
        winners = [one for one in told if not isinstance(one, BaseException)]
        losers = [str(one) for one in told if isinstance(one, UsageError)]
        assert (len(winners), len(losers)) == (1, 2)
        events = [one.event for one in await log.read(run_id) if isinstance(one.event, ApprovalDecided)]
        assert [event.by for event in events] == [winners[0].by]
        assert all(f"by {winners[0].by}" in loser for loser in losers), losers


async def test_a_late_decision_is_refused_and_told_to_ask_anew(log: EventLog, clock: Clock) -> None:
    await gated(log, RUN, timeout_s=60.0)
    clock.now += 60
    told = await refused(log, approve(log, RUN))
    assert "the time to decide has passed; once the run has timed out, `perdure resume run-1` asks anew" in told
    await done(log, Expire(RUN, LEASE.nonce))
    told = await refused(log, approve(log, RUN, "c1"))
    assert "the time to decide has passed; `perdure resume run-1` asks anew" in told
    assert "`perdure resume run-1` asks anew" in await refused(log, reject(log, RUN, reason="no"))
    await done(log, Requeue(RUN, RunRequeued(by="ann")))
    assert "it is asked for when the run goes on" in await refused(log, approve(log, RUN))


async def test_a_resumed_run_that_has_asked_anew_can_be_decided_about(log: EventLog, clock: Clock) -> None:
    await gated(log, RUN, timeout_s=60.0)
    await ask_anew(log, clock)
    assert (await approve(log, RUN)).row.status is Status.AWAITING_TOOL


async def test_nothing_is_decided_about_a_run_that_is_cancelled_or_asks_nothing(log: EventLog) -> None:
    await gated(log, RUN)
    await done(log, Cancel(RUN, CancelRequested(by="ann")))
    assert "call c1 of run run-1: the run is cancelled" in await refused(log, approve(log, RUN, "c1"))
    await begin(log, "live", wants(), wants("c2"), asks("c2"))
    await done(log, Cancel("live", CancelRequested(by="ann")))
    told = await refused(log, approve(log, "live", "c2"), "live")
    assert "the run is being cancelled" in told
    await begin(log, "free", wants())
    told = await refused(log, approve(log, "free"), "free")
    assert "no call of run free waits for approval; the run is awaiting_tool" in told
    assert "nothing is asked about it" in await refused(log, approve(log, "free", "c1"), "free")


# -- settle -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "value", "status", "content"),
    [
        ("happened", {"id": 5}, Status.RUNNING, '{"id":5}'),
        ("happened", None, Status.RUNNING, "null"),
        ("abandon", None, Status.RUNNING, "abandoned by ann"),
        ("not_happened", None, Status.AWAITING_TOOL, None),
    ],
)
async def test_a_person_settles_what_became_of_an_attempt(
    log: EventLog, outcome: Any, value: Any, status: Status, content: str | None
) -> None:
    await doubtful(log, RUN)
    decided = await settle(log, RUN, outcome, result=value, by="ann", reason="I looked")
    assert (decided.row.status, decided.decision) == (status, outcome)
    event = await last(log, ToolCallSettled)
    assert (event.outcome, event.by, event.reason, event.attempt) == (outcome, "ann", "I looked", 1)
    (call,) = await log.calls(RUN)
    if content is None:
        assert (call.result_seq, call.attempt, call.unsettled) == (None, 1, False)
    else:
        result = await last(log, ToolResult)
        assert result.source == "person" and content in result.content
    assert "it was " in await refused(log, settle(log, RUN, "abandon", "c1"))


async def test_a_settlement_has_to_make_sense(log: EventLog) -> None:
    await doubtful(log, RUN)
    word: Any = "perhaps"
    assert "'perhaps' settles nothing" in await refused(log, settle(log, RUN, word))
    assert "only a call that happened" in await refused(log, settle(log, RUN, "abandon", result=1))
    assert "cannot be written as JSON" in await refused(log, settle(log, RUN, "happened", result=float("inf")))
    told = await refused(log, approve(log, RUN, "c1"))
    assert "it is asked whether it happened: `perdure settle run-1 c1`" in told
    await gated(log, "other")
    told = await refused(log, settle(log, "other", "not_happened"), "other")
    assert "it waits for approval: `perdure approve other c1`" in told


async def test_a_result_that_comes_meanwhile_is_not_settled_over(log: EventLog) -> None:
    await doubtful(log, RUN)
    late = Result(RUN, ToolResult(tool_call_id="c1", attempt=1, content='"paid"'))
    told = await interfered(log, lambda seen: settle(seen, RUN, "not_happened"), lambda: done(log, late))
    assert "has its result already; nothing is left to decide" in told
    (call,) = await log.calls(RUN)
    assert (call.attempt, call.result_seq is None) == (1, False)


def test_the_advice_after_a_refusal_names_commands_that_exist() -> None:
    for advice in decisions._NEXT.values():
        words = advice.split("`perdure ")
        assert all(word.split()[0] in COMMANDS for word in words[1:]), advice
