"""Runs with limits, driven by an owner over a log, where every tool call is answered at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perdure.actors.agent import Agent
from perdure.actors.guards import Limits
from perdure.actors.machine import State, fold
from perdure.actors.model import ModelReply, ModelRequest, ToolUse
from perdure.actors.requests import Ended, Execute, Executed, Start
from perdure.actors.run import Owner
from perdure.actors.tools import Tool, ToolOptions
from perdure.store.events import Event, RunRequeued, ToolCallRequested, ToolResult, Usage
from perdure.store.log import Append, EventLog, Refused, Requeue, Result
from perdure.store.memory import MemoryLog

from .fakes import RUN, ManualClock, accepted, check_messages, claim, created, held, loader, new_run, verdict

Answer = Callable[[ToolCallRequested], tuple[str, bool]]
"""Content and `is_error` of the result of a call."""


def call(name: str = "look", **arguments: Any) -> ToolUse:
    return ToolUse(name=name, arguments=arguments)


def turn(*calls: ToolUse, text: str = "", **usage: int) -> ModelReply:
    """A model's answer."""
    return ModelReply(text=text, tool_calls=calls, usage=Usage(**usage))


def echo(request: ToolCallRequested) -> tuple[str, bool]:
    """A result that is another for each call."""
    return f'"{request.tool_call_id}"', False


def same(request: ToolCallRequested) -> tuple[str, bool]:
    """A result that is always the same."""
    return '"nothing new"', False


def look(x: int = 0, y: int = 0) -> None: ...


TOOLS = tuple(Tool(look, ToolOptions("read_only"), name) for name in ("look", "poke"))


class Play:
    """A run of fixed turns under limits, which can be claimed, resumed and driven again and again."""

    def __init__(
        self,
        turns: Sequence[ModelReply],
        results: Answer = echo,
        log: EventLog | None = None,
        run_id: str = RUN,
        price_as: str | None = None,
        **limits: Any,
    ) -> None:
        self.turns, self.results, self.run_id = turns, results, run_id
        self.log = log or MemoryLog(ManualClock())
        self.fields: dict[str, Any] = {}
        """Further fields of run_created."""
        self.shown: list[ModelRequest] = []
        self.executed: list[str] = []
        """Ids of the calls that were executed."""
        self.agent = Agent(name="a", model=self._model, tools=TOOLS, limits=Limits(**limits), price_as=price_as)

    async def _model(self, request: ModelRequest) -> ModelReply:
        check_messages(request.messages)
        self.shown.append(request)
        return self.turns[request.turn_index]

    async def _journal(self, asked: Execute) -> Executed:
        done = await verdict(self.log, Append(self.run_id, asked.epoch, asked.expected_seq, asked.events))
        if isinstance(done, Refused):
            raise done
        requests = {event.tool_call_id: event for event in asked.events if isinstance(event, ToolCallRequested)}
        requests |= {known.tool_call_id: known for known in asked.known}
        for open_call in () if done.row.status.is_terminal else done.calls:
            self.executed.append(open_call.tool_call_id)
            content, is_error = self.results(requests[open_call.tool_call_id])
            result = ToolResult(tool_call_id=open_call.tool_call_id, attempt=1, content=content, is_error=is_error)
            await accepted(self.log, Result(self.run_id, result))
        return Executed(tuple(await self.log.read(self.run_id, asked.expected_seq)))

    async def drive(self) -> Ended:
        """Claim the run, which is created if it is not there yet, and drive it to its end."""
        if await self.log.run(self.run_id) is None:
            await new_run(self.log, created(config=self.agent.snapshot(), **self.fields), self.run_id)
        start = Start(self.run_id, await claim(self.log, self.run_id), tuple(await self.log.read(self.run_id)))
        ended: Ended = await held(Owner(start, self._journal, loader(self.agent)).drive())
        return ended

    async def resume(self, **limits: Any) -> Ended:
        """Requeue the run with these limits raised, and drive it."""
        await accepted(self.log, Requeue(self.run_id, RunRequeued(by="me", limits=limits or None)))
        return await self.drive()

    async def events(self) -> list[Event]:
        return [stored.event for stored in await self.log.read(self.run_id)]

    async def state(self) -> State:
        return fold(await self.log.read(self.run_id))

    async def sources(self) -> list[str]:
        """Where the results come from, in the order of their calls."""
        state = await self.state()
        return [one.result.source if one.result else "" for turn in state.turns for one in turn.calls]
