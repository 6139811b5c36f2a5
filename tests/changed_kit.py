"""A tool that changes, and a run whose code changes with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.actors.agent import Agent
from perdure.actors.journal import serve
from perdure.actors.loading import LoadedAgent
from perdure.actors.model import ModelReply
from perdure.actors.requests import Ended, Start
from perdure.actors.run import Owner
from perdure.actors.tools import Approval, Tool, ToolOptions
from perdure.store.errors import UsageError
from perdure.store.events import AgentRef, CodeChanged, Effect, ToolResult
from perdure.store.log import Claim

from .fakes import AGENT, LEASE, RUN, accepted, created, new_run, settle_down, until
from .gate_kit import ONE, Office

NEW = AgentRef(ref=AGENT.ref, digest="e")


def pay(x: int) -> str:
    return f"paid {x}"


def pay_in(x: int, currency: str) -> str:
    return f"paid {x} {currency}"


def tool_of(effect: Effect, handler: Any = pay, approval: Any = "never", **options: Any) -> Tool:
    return Tool(handler, ToolOptions(effect, settles_after_s=0.0, **options), "pay", Approval(approval))


def with_note(x: int, note: str = "") -> str:
    return f"paid {x}{note}"


class Shop(Office):
    """One run whose agent's code is replaced between its owners."""

    def __init__(self, tool: Tool, turns: Sequence[ModelReply] = ONE) -> None:
        super().__init__(turns, tool)
        self.code, self.unavailable = AGENT, False

    def deploy(self, *tools: Tool, digest: str = "e") -> None:
        """Other code from the next claim on."""
        self.agent = Agent(name="a", model=self.tape, tools=tools)
        self.tools.agent = self.agent
        self.code = AgentRef(ref=AGENT.ref, digest=digest)

    def _load(self, ref: str, digest: str) -> LoadedAgent:
        assert (ref, digest) == (self.code.ref, self.code.digest)
        if self.unavailable:
            raise UsageError("the agent is gone")
        return LoadedAgent(self.agent, self.code, Path("."))

    async def start(self) -> asyncio.Task[Ended]:
        if await self.log.run(RUN) is None:
            await new_run(self.log, created(config=self.agent.snapshot()))
        row = await self.row()
        done = await accepted(self.log, Claim(RUN, f"claim {row.epoch}", LEASE, row.epoch))
        start = Start(RUN, done.row.epoch, tuple(await self.log.read(RUN)), agent=self.code)
        return asyncio.create_task(Owner(start, lambda ask: serve(self.journal, ask), self._load).drive())

    async def kinds(self) -> list[str]:
        return [stored.event.type for stored in await self.log.read(RUN)]

    async def change(self) -> CodeChanged:
        """The one note of a change; it is the first thing that an owner appends."""
        (event,) = await self.events(CodeChanged)
        kinds = await self.kinds()
        at = kinds.index("code_changed")
        assert kinds[at - 1] == "run_claimed"
        assert isinstance(event, CodeChanged)
        return event

    async def interrupted(self, works: int = 1) -> None:
        """The run's first owner and its journal die in the middle of that many-th call."""
        gate = self.tools.holding["pay"] = asyncio.Event()
        driving = await self.start()
        for number in range(1, works + 1):
            await until(lambda count=number: len(self.tools.works) == count)  # type: ignore[misc]
            await settle_down()
            if number < works:
                self.tools.holding["pay"] = asyncio.Event()
                gate.set()
        driving.cancel()
        self.new_journal()

    async def joined(self, *tools: Tool) -> asyncio.Task[Ended]:
        """A second owner, of other code, that has joined the call which runs in a task of the first one's code."""
        self.tools.holding["pay"] = asyncio.Event()
        first = await self.start()
        await until(lambda: bool(self.tools.works))
        await settle_down()
        first.cancel()
        self.deploy(*tools)
        driving = await self.start()
        await until(lambda: "code_changed" in [stored.event.type for stored in self.log._events[RUN]])
        await settle_down()
        return driving

    async def message(self, turn: int = 0) -> str:
        """What the model was told of a call that could not go on."""
        (result, *_) = [event for event in await self.events(ToolResult) if event.tool_call_id == f"t{turn}c0"]
        assert result.is_error and result.source == "validation"
        return str(json.loads(result.content)["message"])
