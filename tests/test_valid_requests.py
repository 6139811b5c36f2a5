"""A thousand histories with limits, cancels, crashes and resumes at random points: every model request is valid.

Each history is an owner at work on one run. It may die before or after any append, a person may cancel, the model may
fail, and what has ended may be resumed with higher limits. All of it follows from the number of the history.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from perdure.actors import run as owners
from perdure.actors.ceilings import GOES_ON, is_final_notice
from perdure.actors.machine import messages
from perdure.actors.model import ModelReply, ModelRequest
from perdure.actors.requests import Ended, Execute, Executed
from perdure.store.events import CancelRequested, Event, NoticeInjected, RunFailed, ToolCallRequested, ToolResult
from perdure.store.log import Accepted, Append, Cancel, Result
from perdure.store.rows import RunRow
from perdure.store.states import Status

from .fakes import RUN, accepted, check_messages, check_projection
from .limit_kit import Play, call, echo, same, turn

HISTORIES = 1_000
RESUMES_MAX = 3


class Killed(BaseException):
    """The owner's process died."""


class History(Play):
    """The run of one number."""

    def __init__(self, number: int) -> None:
        self.chance = random.Random(number)
        limits: dict[str, Any] = {
            "max_turns": self.chance.randint(1, 7),
            "max_tool_calls": self.chance.choice([None, None, 2, 5]),
            "max_tool_calls_per_turn": self.chance.choice([None, None, 1, 2]),
            "max_tokens": self.chance.choice([None, None, 60, 200]),
            "max_repeats": self.chance.choice([None, 3, 3, 4]),
        }
        self.dull = self.chance.random() < 0.5
        super().__init__([self._reply() for _ in range(40)], same if self.dull else echo, **limits)
        self.deaths = 0

    def _reply(self) -> ModelReply:
        if self.dull and self.chance.random() < 0.7:
            return turn(call("look"), input_tokens=5)
        if self.chance.random() < 0.15:
            return turn(text=self.chance.choice(["", "done", '{"partial": true}']), input_tokens=3, output_tokens=2)
        uses = [call(self.chance.choice(["look", "look", "gone"])) for _ in range(self.chance.choice([1, 1, 1, 2, 3]))]
        if self.chance.random() < 0.3:
            uses[-1] = call("poke", x=self.chance.choice([1, "many"]))
        return turn(*uses, text=self.chance.choice(["", "hm"]), input_tokens=5, output_tokens=self.chance.randint(0, 9))

    async def _model(self, request: ModelRequest) -> ModelReply:
        check_messages(request.messages)
        self.shown.append(request)
        final = request.notice is not None and is_final_notice(request.notice)
        assert (request.tools == []) == final, "tools are withheld in the last turn and in no other"
        assert request.messages[-1]["content"] == request.notice if request.notice else True
        if self.chance.random() < 0.05:
            raise ValueError("no connection")
        return self.turns[request.turn_index]

    async def _journal(self, asked: Execute) -> Executed:
        await self._may_be_cancelled()
        self._may_die()
        done = (await self.log.commit([Append(RUN, asked.epoch, asked.expected_seq, asked.events)]))[0]
        if not isinstance(done, Accepted):
            raise done
        self._may_die()
        row = await self._may_be_cancelled() or done.row
        requests = {event.tool_call_id: event for event in asked.events if isinstance(event, ToolCallRequested)}
        requests |= {known.tool_call_id: known for known in asked.known}
        for open_call in () if done.row.status.is_terminal else done.calls:
            if row.cancel and self.chance.random() < 0.5:
                continue  # it was stopped in time
            self._may_die()
            content, is_error = self.results(requests[open_call.tool_call_id])
            result = ToolResult(tool_call_id=open_call.tool_call_id, attempt=1, content=content, is_error=is_error)
            await accepted(self.log, Result(RUN, result))
        return Executed(tuple(await self.log.read(RUN, asked.expected_seq)))

    async def _may_be_cancelled(self) -> RunRow | None:
        if self.chance.random() < 0.06:
            await self.log.commit([Cancel(RUN, CancelRequested(by="me"))])
        return await self.log.run(RUN)

    def _may_die(self) -> None:
        if self.chance.random() < 0.04:
            raise Killed

    async def live(self) -> list[Event]:
        """The run to its last end; its events."""
        resumes = 0
        status = await self._driven(self.drive())
        while status is not Status.COMPLETED and resumes < RESUMES_MAX:
            resumes += 1
            limits = (await self.state()).limits
            raised = {"max_turns": limits.max_turns + self.chance.randint(0, 3)}
            status = await self._driven(self.resume(**raised if self.chance.random() < 0.7 else {}))
        return await self.events()

    async def _driven(self, driving: Coroutine[Any, Any, Ended]) -> Status:
        while True:
            try:
                return (await driving).status
            except Killed:
                self.deaths += 1
            row = await self.log.run(RUN)
            assert row is not None
            if row.status.is_terminal:
                return row.status
            driving = self.drive()


async def test_whatever_befalls_a_run_its_next_model_request_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "CONFLICT_PAUSE_S", 0)
    seen: Counter[str] = Counter()
    for number in range(HISTORIES):
        history = History(number)
        try:
            events = await history.live()
            row = await history.log.run(RUN)
            assert row is not None
            state = check_projection(await history.log.read(RUN), row, await history.log.calls(RUN))
            if state.turn and state.turn.calls and not state.open_calls:
                check_messages(messages(state))
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"history {number}: {error}") from error
        seen["deaths"] += history.deaths
        for event in events:
            seen[event.type] += 1
            if isinstance(event, ToolResult):
                seen[event.source] += 1
            elif isinstance(event, RunFailed):
                seen[event.code] += 1
                assert event.code != "model_error" or "no connection" in event.message, f"history {number}: {event}"
            elif isinstance(event, NoticeInjected) and event.text == GOES_ON:
                seen["goes on"] += 1
    wanted = {"deaths", "limit", "loop", "validation", "cancel", "max_turns", "budget_exceeded", "loop_detected"}
    wanted |= {"goes on", "model_error", "run_completed", "run_cancelled", "run_requeued"}
    print(dict(seen))
    assert wanted <= set(seen) and "internal_error" not in seen, seen
