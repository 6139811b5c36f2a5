"""A journal whose tasks, proofs and time are in the hand of a test."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.actors.agent import Agent
from perdure.actors.attempt import Outcome, Work
from perdure.actors.journal import Journal
from perdure.actors.machine import fold
from perdure.actors.pursuit import TaskDied
from perdure.actors.requests import Execute, Executed
from perdure.actors.tools import Settled, Tool, ToolOptions
from perdure.actors.turn import turn_events
from perdure.store.events import (
    Effect,
    ToolCallStarted,
    ToolResult,
    TurnStarted,
)
from perdure.store.log import Result
from perdure.store.memory import MemoryLog
from perdure.store.rows import CallRow

from .fakes import AGENT, RUN, ManualClock, NoProcesses, accepted, check_projection, claim, new_run, until
from .shapes import asks

CALL = "t0c0"


@dataclass
class Hand:
    """One task, ended by the test."""

    work: Work
    end: asyncio.Future[Outcome]

    def returns(self, content: str, is_error: bool = False) -> None:
        self.end.set_result(Outcome(kind="result", content=content, is_error=is_error))

    def dies(self) -> None:
        self.end.set_exception(TaskDied("it was killed"))


@dataclass
class HandTasks(NoProcesses):
    """`Tasks` whose every answer is given by the test."""

    tasks: list[Hand] = field(default_factory=list)
    dead: bool = False
    proofs: int = 0
    told: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        self.tasks.append(Hand(work, asyncio.get_running_loop().create_future()))
        return await self.tasks[-1].end

    async def prove_dead(self, call: CallRow) -> bool:
        assert call.lock, "a proof was asked without knowing of what"
        self.proofs += 1
        return self.dead

    async def stop(self, run_id: str, tool_call_id: str) -> None:
        self.told.append(tool_call_id)

    def kill(self, run_id: str, tool_call_id: str) -> None:
        self.killed.append(tool_call_id)


class Case:
    """A run with one open call, and journals that come and go."""

    def __init__(self, folder: Path, effect: Effect = "non_idempotent", probe: bool = True) -> None:
        self.clock = ManualClock()
        self.log: Any = MemoryLog(self.clock)
        self.lock = folder / "lock"
        self.lock.write_bytes(b"")
        tool = Tool(lambda x: x, ToolOptions(effect, timeout_s=10.0, settles_after_s=30.0), "pay")
        if probe:
            tool.reconcile(lambda x: Settled.unknown("?"))
        self.tool = tool
        self.agent = Agent(name="a", model="script:x", tools=(tool,))
        self.epoch = 0

    async def begin(self) -> asyncio.Task[Executed]:
        """The first journal, with the call's first attempt dispatched."""
        await new_run(self.log)
        self.epoch = await claim(self.log)
        events = (TurnStarted(turn_index=0), *await turn_events(RUN, 0, asks("pay"), self.agent))
        return await self.journal_with(events)

    async def successor(self) -> asyncio.Task[Executed]:
        """A new journal, asked by the owner for the open call."""
        return await self.journal_with(())

    async def journal_with(self, events: Any) -> asyncio.Task[Executed]:
        self.tasks = HandTasks()
        self.journal = Journal(self.log, self.tasks, "store", self.clock, self.sleep)
        self.waking = asyncio.Event()
        state = fold(await self.log.read(RUN))
        known = tuple(call.request for call in state.open_calls)
        ask = Execute(RUN, self.epoch, state.seq, events, known, AGENT, {}, {"pay": self.tool.options})
        return asyncio.create_task(self.journal.execute(ask))

    async def sleep(self, seconds: float) -> None:
        """Time passes when the test lets it."""
        await self.waking.wait()
        self.waking.clear()
        await self.clock.sleep(seconds)

    async def dispatched(self, number: int = 1) -> Hand:
        await until(lambda: len(self.tasks.tasks) == number)
        return self.tasks.tasks[-1]

    async def mark(self, work: Work, nonce: str = "n1") -> str | None:
        mark = ToolCallStarted(
            tool_call_id=CALL,
            attempt=work.attempt,
            nonce=nonce,
            node="node",
            boot_id="boot",
            pid=1,
            pid_started=1.0,
            lock=str(self.lock),
            hold_s=15.0,
        )
        return await self.journal.begin(RUN, CALL, work.attempt, "node", mark)

    async def reports(self, attempt: int, content: str = '"paid"', is_error: bool = False) -> str:
        """What became of a report: result or evidence."""
        event = ToolResult(tool_call_id=CALL, attempt=attempt, content=content, is_error=is_error)
        done = await accepted(self.log, Result(RUN, event))
        return done.events[-1].event.type

    async def call(self) -> CallRow:
        calls: list[CallRow] = await self.log.calls(RUN)
        return calls[0]

    async def check(self) -> None:
        check_projection(await self.log.read(RUN), await self.log.run(RUN), await self.log.calls(RUN))
