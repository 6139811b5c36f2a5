"""Random histories of one run: whatever the commands and their order, machine and store stay of one mind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.actors.agent import Agent
from perdure.actors.machine import Ask, CallModel, Execute, Finish, State, Wait, fold, messages, next_step
from perdure.actors.model import ModelReply, ToolUse
from perdure.actors.standing import judged
from perdure.actors.tools import Approval, Tool, ToolOptions
from perdure.actors.turn import asked_again, turn_events
from perdure.store.events import (
    ApprovalDecided,
    CancelRequested,
    Effect,
    Event,
    NoticeInjected,
    RunFailed,
    RunRequeued,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolResult,
    TurnStarted,
    Usage,
)
from perdure.store.log import (
    Abandon,
    Accepted,
    Answer,
    Append,
    Cancel,
    Claim,
    Command,
    Decide,
    Expire,
    Leave,
    Mark,
    Refused,
    Requeue,
    Result,
    Retry,
    Settle,
    Unsettle,
)
from perdure.store.memory import MemoryLog
from perdure.store.states import Status

from .fakes import LEASE, RUN, ManualClock, check_messages, check_projection, created, named, new_run

EFFECTS: tuple[Effect, ...] = ("read_only", "idempotent_write", "non_idempotent")
GATES = {
    "gated": ToolOptions("non_idempotent"),
    "gated_read": ToolOptions("read_only"),
    "gated_write": ToolOptions("idempotent_write"),
    "gated_for_long": ToolOptions("non_idempotent"),
}
APPROVALS = (
    Approval("always", timeout_s=5.0),
    Approval("always", timeout_s=5.0, default="approve"),
    Approval("always", timeout_s=9.0, default="reject"),
    Approval("always"),
)
TOOLS = (
    *(Tool(lambda x=0: x, ToolOptions(effect), effect) for effect in EFFECTS),
    *(Tool(lambda x=0: x, options, name, rule) for (name, options), rule in zip(GATES.items(), APPROVALS, strict=True)),
)
AGENT = Agent(name="a", model="script:x", tools=TOOLS)
replies = st.builds(
    ModelReply,
    text=st.sampled_from(["", "hm"]),
    tool_calls=st.lists(
        st.builds(
            ToolUse,
            name=st.sampled_from([*EFFECTS, *GATES, "unknown"]),
            arguments=st.sampled_from([{}, {"x": 1}, {"y": 1}]),
            id=st.sampled_from(["", "call_0"]),
        ),
        max_size=3,
    ).map(tuple),
    usage=st.builds(Usage, input_tokens=st.integers(0, 9), cache_read_input_tokens=st.integers(0, 9)),
)


@dataclass
class Story:
    """A run that lives through whatever is drawn."""

    data: st.DataObject
    clock: ManualClock = field(default_factory=ManualClock)
    sent: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = MemoryLog(self.clock)

    def pick(self, of: list[Any]) -> Any:
        return self.data.draw(st.sampled_from(of))

    async def state(self) -> State:
        return fold(await self.log.read(RUN))

    async def owners(self, state: State) -> Append:
        """The owner's next append, sometimes of an old owner or from an old position."""
        step = next_step(state)
        events: tuple[Event, ...] = ()
        if isinstance(step, CallModel):
            start: tuple[Event, ...] = () if step.started else (TurnStarted(turn_index=step.turn_index),)
            if step.notice:
                start = (NoticeInjected(turn_index=step.turn_index, text=step.notice), *start)
            judge = partial(judged, state.limits, state.turns, state.resumed)
            answer = await turn_events(RUN, step.turn_index, self.data.draw(replies), AGENT, judge=judge)
            events = self.pick([(*start, *answer), start or tuple(answer)])
        elif isinstance(step, Finish):
            events = step.events
        elif isinstance(step, Ask):
            events = tuple(asked_again(step.calls, AGENT))
        elif state.open_calls and self.pick([False, False, False, True]):
            events = (RunFailed(code="internal_error", message="m", phase="p"),)
        stale = self.pick([0, 0, 0, 0, 1])
        return Append(RUN, state.epoch - stale, state.seq - self.pick([0, 0, 0, 0, 1]), events)

    async def about_a_call(self, state: State) -> Command:
        calls = list(named(state).values())
        if not calls:
            return await self.owners(state)
        call = self.pick(calls[-3:])
        attempt, call_id = max(0, call.attempt - self.pick([0, 0, 0, 1])), call.tool_call_id
        result = ToolResult(tool_call_id=call_id, attempt=attempt, content='"x"', is_error=self.pick([True, False]))
        mark = ToolCallStarted(
            tool_call_id=call_id,
            attempt=attempt,
            nonce=self.pick(["a", "b"]),
            node="node",
            boot_id="boot",
            pid=1,
            pid_started=1.0,
            lock="/lock",
            hold_s=1.0,
        )
        retried = ToolCallRetried(tool_call_id=call_id, attempt=attempt + 1, reason="gone")
        unsettled = ToolCallUnsettled(tool_call_id=call_id, attempt=attempt, why="who knows")
        command: Command = self.pick(
            [
                Mark(RUN, mark),
                Leave(RUN, call_id, attempt),
                Retry(RUN, state.epoch, self.pick([call.started_attempt, 0]), retried),
                Result(RUN, result),
                Unsettle(RUN, unsettled),
                Answer(RUN, result),
            ]
        )
        return command

    async def persons(self, state: State) -> Command:
        """What a person answers to a question, the newest of a call or another; or that nobody has in time."""
        calls = await self.log.calls(RUN)
        if not calls:
            return await self.owners(state)
        call = self.pick([call for call in calls if call.waits] or calls[-3:])
        self.clock.now += self.pick([0.0, 0.0, 2.0, 6.0])
        question = self.pick([call.question] * 5 + ["another"])
        approval = ApprovalDecided(
            tool_call_id=call.tool_call_id,
            question=question,
            digest=self.pick([call.digest] * 5 + ["another"]),
            decision=self.pick(["approve", "approve", "reject"]),
            by=self.pick(["ann", "bob"]),
            arguments=self.pick([None, '{"x":7}']),
        )
        settlement = ToolCallSettled(
            tool_call_id=call.tool_call_id,
            attempt=call.attempt,
            question=question,
            outcome=self.pick(["happened", "not_happened", "abandon"]),
            by=self.pick(["ann", "bob"]),
        )
        answer = Settle(RUN, settlement, '"seen"') if call.unsettled else Decide(RUN, approval)
        others = [Settle(RUN, settlement, "0"), Decide(RUN, approval), Expire(RUN, LEASE), Expire(RUN, "another")]
        command: Command = self.pick([answer] * 5 + others)
        return command

    def decision(self, state: State) -> Command:
        number = len(self.sent)
        command: Command = self.pick(
            [
                Claim(RUN, f"claim {number}", self.pick([LEASE, LEASE, "another"]), state.epoch),
                Claim(RUN, f"claim {number}", LEASE, state.epoch, "respawn", charged=True),
                Cancel(RUN, CancelRequested(by="me")),
                Requeue(RUN, RunRequeued(by="me", limits=self.pick([None, {"max_turns": 50}]))),
                Abandon(RUN, LEASE, state.epoch, RunFailed(code="crash_loop", message="m", phase="p")),
            ]
        )
        return command

    async def next(self) -> None:
        """Send one more command, or one of the old ones again."""
        state = await self.state()
        if state.status is Status.QUEUED and self.pick([True, True, False]):
            command: Command = Claim(RUN, f"claim {len(self.sent)}", LEASE, state.epoch)
        elif state.status.is_terminal and self.pick([True, False]):
            command = Requeue(RUN, RunRequeued(by="me"))
        else:
            kind = self.pick(["owner"] * 4 + ["call"] * 6 + ["person"] * 4 + ["decision", "again"])
            if kind == "again" and self.sent:
                command = self.pick(self.sent)
            elif kind == "decision":
                command = self.decision(state)
            else:
                makers = {"owner": self.owners, "call": self.about_a_call, "person": self.persons}
                command = await makers.get(kind, self.owners)(state)
        self.sent.append(command)
        before = await self.log.read(RUN), await self.log.run(RUN), await self.log.calls(RUN)
        verdict = (await self.log.commit([command]))[0]
        after = await self.log.read(RUN), await self.log.run(RUN), await self.log.calls(RUN)
        if isinstance(verdict, Refused) or not verdict.events or verdict.already:
            assert after == before, f"{verdict} has written something"
        else:
            assert after[0][len(before[0]) :] == list(verdict.events)[-(len(after[0]) - len(before[0])) :]

    async def check(self) -> None:
        row = await self.log.run(RUN)
        assert row is not None
        state = check_projection(await self.log.read(RUN), row, await self.log.calls(RUN))
        assert state == await self.state(), "a fold has to be a function of its log"
        step = next_step(state)
        assert step == next_step(state) or isinstance(step, Finish)
        if isinstance(step, CallModel):
            check_messages(messages(state))
        if isinstance(step, Execute):
            assert step.calls, "an owner has nothing to do and nobody else has"
            assert step.calls == tuple(call for call in state.open_calls if not call.waits)
        if state.status is Status.AWAITING_APPROVAL:
            assert isinstance(step, Wait)
            assert all(call.waits for call in state.open_calls)
        if state.status is Status.TIMED_OUT:
            assert any(call.gate == "expired" for call in state.open_calls)
        elif state.status.is_terminal and state.status is not Status.FAILED:
            assert not state.open_calls, "a run has ended and left a call without a result"


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_machine_and_store_agree_on_every_prefix_of_every_history(data: st.DataObject) -> None:
    async def live() -> None:
        story = Story(data)
        limits = {"max_turns": data.draw(st.sampled_from([1, 2, 3, 50])), "max_tokens": 40}
        await new_run(story.log, created(config={"limits": limits}))
        for _ in range(data.draw(st.integers(5, 40))):
            await story.next()
            if (await story.state()).status is Status.COMPLETED and story.pick([True, False]):
                break
        await story.check()

    asyncio.run(live())


@settings(max_examples=100, deadline=None)
@given(st.lists(replies, max_size=6))
def test_every_model_answer_becomes_a_valid_conversation(answers: list[ModelReply]) -> None:
    async def live() -> None:
        log = MemoryLog(ManualClock())
        await new_run(log, created())
        await log.commit([Claim(RUN, "claim", LEASE, 0)])
        for answer in answers:
            state = fold(await log.read(RUN))
            step = next_step(state)
            if not isinstance(step, CallModel):
                break
            check_messages(messages(state))
            events = (TurnStarted(turn_index=step.turn_index), *await turn_events(RUN, step.turn_index, answer, AGENT))
            done = (await log.commit([Append(RUN, 1, state.seq, events)]))[0]
            assert isinstance(done, Accepted)
            for call in done.calls:
                reported = ToolResult(tool_call_id=call.tool_call_id, attempt=1, content="1")
                await log.commit([Result(RUN, reported)])
        state = fold(await log.read(RUN))
        if isinstance(next_step(state), CallModel):
            check_messages(messages(state))
        keys = [call.request.idempotency_key for call in named(state).values()]
        assert len(set(keys)) == len(keys)

    asyncio.run(live())
