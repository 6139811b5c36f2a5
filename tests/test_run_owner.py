"""The owner of a run: what it asks of the model and the journal, and what it makes of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from perdure.actors import run as owners
from perdure.actors.agent import Agent
from perdure.actors.guards import Limits
from perdure.actors.loading import LoadedAgent
from perdure.actors.machine import fold
from perdure.actors.model import ModelReply, ModelRequest, ToolUse
from perdure.actors.requests import Ended, Execute, Executed, Start
from perdure.actors.run import Owner
from perdure.actors.tools import Tool, ToolOptions
from perdure.actors.turn import checked_arguments, turn_events
from perdure.store.errors import PerdureError, UsageError
from perdure.store.events import (
    CancelRequested,
    RunCompleted,
    RunFailed,
    RunRequeued,
    ToolResult,
    TurnStarted,
)
from perdure.store.log import Append, Cancel, Requeue, Result
from perdure.store.memory import MemoryLog
from perdure.store.states import Status

from .fakes import AGENT, RUN, ManualClock, Tape, accepted, claim, created, held, loader, new_run, until
from .shapes import asks, says


def look(x: int = 0) -> int:
    return x


LOOK = Tool(look, ToolOptions("read_only"))


class PlainJournal:
    """A journal without a process: appends, and answers every open call with its own number."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.asked: list[Execute] = []
        self.before: Callable[[Execute], Any] | None = None
        """Called with each request before it is served; an exception is the answer to that request."""

    async def __call__(self, payload: Any) -> Any:
        if not isinstance(payload, Execute):
            run_id, after, limit = payload
            return await self.log.read(run_id, after, limit)
        self.asked.append(payload)
        if self.before:
            error = self.before(payload)
            if asyncio.iscoroutine(error):
                error = await error
            if isinstance(error, Exception):
                raise error
        done = (await self.log.commit([Append(RUN, payload.epoch, payload.expected_seq, payload.events)]))[0]
        if isinstance(done, Exception):
            raise done
        for call in () if done.row.status.is_terminal else done.calls:
            content = f'"{call.tool_call_id}"'
            await accepted(
                self.log, Result(RUN, ToolResult(tool_call_id=call.tool_call_id, attempt=1, content=content))
            )
        return Executed(tuple(await self.log.read(RUN, payload.expected_seq)))


def log_of(log: MemoryLog) -> list[str]:
    """The types of the run's events so far."""
    return [stored.event.type for stored in log._events[RUN]]


class Case:
    """A claimed run with an owner that can be driven."""

    def __init__(self, model: Any, tools: tuple[Tool, ...] = (LOOK,), max_turns: int = 50) -> None:
        self.log = MemoryLog(ManualClock())
        self.journal = PlainJournal(self.log)
        self.agent = Agent(name="a", model=model, tools=tools, limits=Limits(max_turns=max_turns))

    async def owner(self, load: Callable[[str, str], LoadedAgent] | None = None) -> Owner:
        if await self.log.run(RUN) is None:
            await new_run(self.log, created(config={"limits": {"max_turns": self.agent.limits.max_turns}}))
        epoch = await claim(self.log)
        start = Start(RUN, epoch, tuple(await self.log.read(RUN)))
        return Owner(start, self.journal, load or loader(self.agent))

    async def drive(self, load: Callable[[str, str], LoadedAgent] | None = None) -> Ended:
        ended: Ended = await held((await self.owner(load)).drive())
        return ended

    async def end(self) -> Any:
        return (await self.log.read(RUN))[-1].event


async def test_a_turn_with_tools_costs_one_request_to_the_journal() -> None:
    case = Case(Tape((asks("look", "look"), asks("look"), says("done"))))
    ended = await case.drive()
    assert ended.status is Status.COMPLETED
    assert len(case.journal.asked) == 3
    assert [type(event).__name__ for event in case.journal.asked[0].events] == [
        "TurnStarted",
        "AssistantMessage",
        "ToolCallRequested",
        "ToolCallRequested",
    ]


async def test_the_start_of_a_turn_is_durable_while_a_slow_model_thinks() -> None:
    go, sent = asyncio.Event(), asyncio.Event()

    async def slow(request: ModelRequest) -> str:
        await go.wait()
        return "at last"

    case = Case(slow)
    driving = asyncio.create_task(case.drive())
    case.journal.before = lambda asked: sent.set()
    await held(sent.wait())
    await until(lambda: log_of(case.log)[-1] == "turn_started")
    assert fold(await case.log.read(RUN)).turn_started
    assert not driving.done()
    go.set()
    assert (await driving).status is Status.COMPLETED
    assert sum(isinstance(stored.event, TurnStarted) for stored in await case.log.read(RUN)) == 1


async def test_a_model_is_asked_once_for_a_turn_whose_append_met_a_conflict() -> None:
    tape = Tape((asks("look"), says("done")))
    case = Case(tape)

    async def behind(asked: Execute) -> None:
        case.journal.before = None
        foreign = TurnStarted(turn_index=0)  # the start of the turn got through on another way
        await accepted(case.log, Append(RUN, asked.epoch, asked.expected_seq, (foreign,)))

    case.journal.before = behind
    assert (await case.drive()).status is Status.COMPLETED
    assert [turn for turn, _ in tape.asked] == [0, 1]


async def test_a_cancel_that_comes_while_the_model_thinks_ends_the_run_and_its_answer_is_not_used() -> None:
    async def model(request: ModelRequest) -> ModelReply:
        await accepted(case.log, Cancel(RUN, CancelRequested(by="me", reason="enough")))
        return asks("look")

    case = Case(model)
    assert (await case.drive()).status is Status.CANCELLED
    row = await case.log.run(RUN)
    assert row is not None and (row.error, row.turns) == ("enough", 0)
    assert await case.log.calls(RUN) == []


async def test_an_owner_that_was_replaced_appends_nothing_more_and_says_that_it_lost_the_run() -> None:
    async def model(request: ModelRequest) -> str:
        await claim(case.log)
        return "too late"

    case = Case(model)
    ended = await case.drive()
    assert (ended.outcome, ended.epoch) == ("lost", 1)
    assert [stored.event.type for stored in await case.log.read(RUN)] == ["run_created", "run_claimed", "run_claimed"]


async def test_a_run_that_was_ended_by_another_hand_and_requeued_is_lost_to_its_old_owner() -> None:
    async def model(request: ModelRequest) -> str:
        await accepted(case.log, Append(RUN, 1, 2, (RunFailed(code="crash_loop", message="m", phase="p"),)))
        await accepted(case.log, Requeue(RUN, RunRequeued(by="me")))
        await claim(case.log)
        return "too late"

    case = Case(model)
    assert (await case.drive()).outcome == "lost"


ODD: dict[str, tuple[Any, str]] = {
    "raises": (ValueError("no key"), "ValueError: no key"),
    "exits": (SystemExit(1), "SystemExit"),
    "interrupts": (KeyboardInterrupt(), "KeyboardInterrupt"),
    "cancels": (asyncio.CancelledError(), "CancelledError"),
    "number": (7, "not an assistant turn"),
    "unknown key": ({"txt": "hello"}, "txt"),
}


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "plain"])
@pytest.mark.parametrize("odd", ODD)
async def test_whatever_a_model_does_the_run_ends_and_says_what(odd: str, asynchronous: bool) -> None:
    what, text = ODD[odd]

    def plain(request: ModelRequest) -> Any:
        if isinstance(what, BaseException):
            raise what
        return what

    async def model(request: ModelRequest) -> Any:
        return plain(request)

    case = Case(model if asynchronous else plain)
    assert (await case.drive()).status is Status.FAILED
    end = await case.end()
    assert end.code == "model_error" and text in end.message


async def test_an_owner_that_is_cancelled_while_its_model_thinks_is_cancelled() -> None:
    thinking = asyncio.Event()

    async def model(request: ModelRequest) -> str:
        thinking.set()
        await asyncio.Event().wait()
        return ""

    case = Case(model)
    driving = asyncio.create_task((await case.owner()).drive())
    await held(thinking.wait())
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held(driving)
    assert (await case.end()).type in ("run_claimed", "turn_started")


async def test_a_run_whose_agent_is_gone_fails_and_says_so() -> None:
    def gone(ref: str, digest: str) -> LoadedAgent:
        raise UsageError("there is no file agents.py")

    case = Case(Tape(()))
    assert (await case.drive(gone)).status is Status.FAILED
    end = await case.end()
    assert (end.code, end.message) == ("agent_unavailable", "there is no file agents.py")


async def test_a_run_whose_agent_is_gone_while_a_call_is_open_fails_too_and_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners, "CONFLICT_PAUSE_S", 0)
    case = Case(Tape((asks("look"), says("done"))))
    await new_run(case.log, created())
    epoch = await claim(case.log)
    events = await turn_events(RUN, 0, asks("look"), case.agent)
    await accepted(case.log, Append(RUN, epoch, 2, (TurnStarted(turn_index=0), *events)))

    def gone(ref: str, digest: str) -> LoadedAgent:
        raise UsageError("there is no file agents.py")

    assert (await case.drive(gone)).status is Status.FAILED
    assert (await case.end()).code == "agent_unavailable"
    await accepted(case.log, Requeue(RUN, RunRequeued(by="me")))
    assert (await case.drive()).status is Status.COMPLETED


async def test_an_error_of_the_journal_is_tried_again_and_then_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "CONFLICT_PAUSE_S", 0)
    case = Case(Tape((says("done"),)))
    case.journal.before = lambda asked: None if isinstance(asked.events[-1], RunFailed) else PerdureError("a bug")
    assert (await case.drive()).status is Status.FAILED
    end = await case.end()
    assert (end.code, end.message) == ("internal_error", "a bug")
    assert len(case.journal.asked) == owners.FAILURES_MAX + 2


async def test_a_hiccup_of_the_journal_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "CONFLICT_PAUSE_S", 0)
    case = Case(Tape((asks("look"), says("done"))))
    hiccups = [PerdureError("a hiccup"), None, PerdureError("another"), None]
    case.journal.before = lambda asked: hiccups.pop(0) if hiccups else None
    assert (await case.drive()).status is Status.COMPLETED


async def test_the_limit_of_turns_ends_a_run_after_the_last_results_are_recorded() -> None:
    case = Case(Tape((asks("look"),)), max_turns=1)
    assert (await case.drive()).status is Status.FAILED
    assert (await case.end()).code == "max_turns"
    assert all(call.result_seq for call in await case.log.calls(RUN))


async def test_repeated_ids_of_the_provider_are_kept_beside_ids_that_are_unique() -> None:
    tape = Tape((asks("look", "look", provider_id="call_0"), asks("look", provider_id="call_0"), says("done")))
    case = Case(tape)
    await case.drive()
    requests = [s.event for s in await case.log.read(RUN) if s.event.type == "tool_call_requested"]
    assert [(r.tool_call_id, r.provider_id) for r in requests] == [
        ("t0c0", "call_0"),
        ("t0c1", "call_0"),
        ("t1c0", "call_0"),
    ]
    assert len({r.idempotency_key for r in requests}) == 3
    last = tape.asked[-1][1]
    assert [r["content"] for m in last if m["role"] == "tool" for r in m["results"]] == ['"t0c0"', '"t0c1"', '"t1c0"']


BAD: dict[str, tuple[ToolUse, str]] = {
    "unknown tool": (ToolUse(name="nothing"), "available: look"),
    "wrong type": (ToolUse(name="look", arguments={"x": "many"}), "x: "),
    "unknown argument": (ToolUse(name="look", arguments={"y": 1}), "y: "),
    "no object": (ToolUse(name="look", arguments=[1]), "InvalidArguments"),
    "NaN": (ToolUse(name="look", arguments={"x": float("nan")}), "not JSON"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_call_that_cannot_run_is_an_error_for_the_model_and_not_of_the_run(bad: str) -> None:
    use, text = BAD[bad]
    tape = Tape((ModelReply(tool_calls=(use,)), says("sorry")))
    case = Case(tape)
    assert (await case.drive()).status is Status.COMPLETED
    (seen,) = tape.asked[-1][1][-1]["results"]
    assert seen["is_error"] and text in seen["content"], "the model is not told"
    results = [s.event for s in await case.log.read(RUN) if isinstance(s.event, ToolResult)]
    assert len(results) == 1 and results[0].is_error and results[0].source == "validation"
    assert text in results[0].content
    end = await case.end()
    assert isinstance(end, RunCompleted) and end.output == "sorry"


def test_equal_arguments_are_written_equally() -> None:
    agent = Agent(name="a", model="script:x", tools=(Tool(lambda a, b: a, ToolOptions("read_only"), "look"),))
    one = checked_arguments(ToolUse(name="look", arguments={"b": 1, "a": "é"}), agent)
    other = checked_arguments(ToolUse(name="look", arguments={"a": "é", "b": 1}), agent)
    assert one == other == ('{"a":"é","b":1}', agent.tools[0])
    assert AGENT.ref == "agents.py:agent"


async def test_a_long_log_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "LOAD_EVENTS", 2)
    case = Case(Tape((asks("look"), says("done"))))
    await new_run(case.log)
    for _ in range(5):
        epoch = await claim(case.log)
    owner = Owner(Start(RUN, epoch), case.journal, loader(case.agent))
    assert (await held(owner.drive())).status is Status.COMPLETED
