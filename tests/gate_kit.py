"""A run with its owner, its journal and its tools in one process, for tests of what people decide about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.actors import attempt as attempts
from perdure.actors.agent import Agent
from perdure.actors.attempt import Outcome, Work
from perdure.actors.journal import Journal, serve
from perdure.actors.machine import State, fold
from perdure.actors.model import ModelReply
from perdure.actors.pursuit import TaskDied
from perdure.actors.requests import Ended, Start
from perdure.actors.run import Owner
from perdure.actors.tools import Approval, Tool, ToolOptions
from perdure.store.events import (
    ApprovalDecided,
    Decision,
    RunRequeued,
    Settlement,
    ToolCallSettled,
    ToolCallStarted,
)
from perdure.store.log import Accepted, Claim, Decide, Expire, Requeue, Settle
from perdure.store.memory import MemoryLog
from perdure.store.rows import CallRow, RunRow

from .fakes import (
    LEASE,
    RUN,
    ManualClock,
    NoProcesses,
    Tape,
    accepted,
    check_projection,
    created,
    held,
    loader,
    new_run,
)
from .shapes import asks, says


@dataclass
class Tools(NoProcesses):
    """Runs handlers at once, but for tools that a test holds; a tool named in `killed` dies with its handler run."""

    agent: Agent
    journal: Journal = field(init=False)
    works: list[Work] = field(default_factory=list)
    holding: dict[str, asyncio.Event] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        tool = self.agent.tool(work.name)
        assert tool
        if work.probe:
            return attempts._probe(work, tool)
        self.works.append(work)
        if refusal := await self.journal.begin(work.run_id, work.tool_call_id, work.attempt, "node", self._mark(work)):
            return Outcome(kind="refused", content=refusal)
        if gate := self.holding.get(work.name):
            await gate.wait()
        call = tool.bind(tool.handler, attempts._context(work), work.arguments)
        outcome = attempts._run(work, call)
        if work.name in self.killed:
            raise TaskDied("it was killed")
        return outcome

    def _mark(self, work: Work) -> ToolCallStarted | None:
        if work.effect != "non_idempotent":
            return None
        return ToolCallStarted(
            tool_call_id=work.tool_call_id,
            attempt=work.attempt,
            nonce=f"{work.tool_call_id}.{work.attempt}",
            node="node",
            boot_id="boot",
            pid=1,
            pid_started=1.0,
            lock=f"/nowhere/{work.tool_call_id}.{work.attempt}",
            hold_s=1.0,
        )

    def dispatched(self) -> list[tuple[str, int]]:
        return [(work.tool_call_id, work.attempt) for work in self.works]


class Office:
    """One run, and the person who decides about it."""

    def __init__(self, turns: Sequence[ModelReply], *tools: Tool, metadata: dict[str, Any] | None = None) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(self.clock)
        self.tape = Tape(turns)
        self.agent = Agent(name="a", model=self.tape, tools=tools)
        self.metadata = metadata or {}
        self.tools: Tools
        self.journal: Journal
        self.owner: Owner
        self.new_journal()

    def new_journal(self) -> None:
        """A journal that knows nothing of the one before, nor of its tasks."""
        self.tools = Tools(self.agent)
        self.journal = self.tools.journal = Journal(self.log, self.tools, "store", self.clock, self.clock.sleep)

    async def start(self) -> asyncio.Task[Ended]:
        """Claim the run for a new owner, which drives it."""
        if await self.log.run(RUN) is None:
            await new_run(self.log, created(metadata=self.metadata))
        row = await self.row()
        done = await accepted(self.log, Claim(RUN, f"claim {row.epoch}", LEASE, row.epoch))
        start = Start(RUN, done.row.epoch, tuple(await self.log.read(RUN)))
        self.owner = Owner(start, self.ask, loader(self.agent))
        return asyncio.create_task(self.owner.drive())

    async def ask(self, payload: Any) -> Any:
        """What the owner asks of its journal."""
        return await serve(self.journal, payload)

    async def drive(self) -> str:
        """Drive the run until it ends or waits; its status then."""
        ended: Ended = await held(await self.start())
        assert ended.outcome in ("ended", "waits")
        assert ended.status is (await self.row()).status
        return ended.status.value

    async def row(self) -> RunRow:
        row = await self.log.run(RUN)
        assert row
        return row

    async def call(self, number: int = 0) -> CallRow:
        return (await self.log.calls(RUN))[number]

    async def decision(self, decision: Decision = "approve", number: int = 0, **fields: Any) -> Decide:
        """An answer to the question that is open about a call."""
        call = await self.call(number)
        values = {"question": call.question, "digest": call.digest, "by": "ann"} | fields
        return Decide(RUN, ApprovalDecided(tool_call_id=call.tool_call_id, decision=decision, **values))

    async def decide(self, decision: Decision = "approve", number: int = 0, **fields: Any) -> None:
        await accepted(self.log, await self.decision(decision, number, **fields))

    async def settle(self, outcome: Settlement, content: str = "", reason: str = "") -> None:
        call = await self.call()
        event = ToolCallSettled(
            tool_call_id=call.tool_call_id,
            attempt=call.attempt,
            question=call.question,
            outcome=outcome,
            by="ann",
            reason=reason,
        )
        await accepted(self.log, Settle(RUN, event, content))

    async def expire(self) -> Accepted:
        """What the supervisor's timer does."""
        return await accepted(self.log, Expire(RUN, LEASE))

    async def resume(self) -> None:
        await accepted(self.log, Requeue(RUN, RunRequeued(by="me")))

    async def events(self, kind: type[Any]) -> list[Any]:
        return [stored.event for stored in await self.log.read(RUN) if isinstance(stored.event, kind)]

    async def state(self) -> State:
        return fold(await self.log.read(RUN))

    def seen(self) -> list[dict[str, Any]]:
        """The results that the model was shown last, with their content parsed."""
        results = self.tape.asked[-1][1][-1]["results"]
        return [result | {"content": json.loads(result["content"])} for result in results]

    async def check(self) -> None:
        check_projection(await self.log.read(RUN), await self.row(), await self.log.calls(RUN))


ALWAYS, NEVER = Approval("always"), Approval()


def pay(x: int) -> str:
    return f"paid {x}"


def look(x: int) -> str:
    return f"seen {x}"


def paying(approval: Approval = ALWAYS, effect: Any = "idempotent_write") -> Tool:
    return Tool(pay, ToolOptions(effect), "pay", approval)


LOOK = Tool(look, ToolOptions("read_only"), "look")
ONE = (asks("pay"), says("done"))
