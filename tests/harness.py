"""A run of the plain core with processes that can be killed at any point, over a log that stays.

Killing a process lets nothing of it reach the log any more. Attempts of tools live in the journal's process, as Ray
tasks do; their effects are counted in a ledger out here, at which the person looks who is asked.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from perdure.actors import attempt as attempts
from perdure.actors.agent import Agent
from perdure.actors.attempt import Outcome, Work
from perdure.actors.courier import Courier, Desk, Numbered, Reply
from perdure.actors.journal import Journal, serve
from perdure.actors.pursuit import TaskDied
from perdure.actors.requests import Ended, Start
from perdure.actors.run import Owner
from perdure.actors.tools import Settled, Tool, ToolContext, ToolOptions
from perdure.store.events import ToolCallStarted
from perdure.store.log import Accepted, Command, EventLog, Verdict
from perdure.store.rows import CallRow

from .fakes import ManualClock, NoProcesses, Tape, loader, settle_down
from .person import Person
from .processes import Process
from .shapes import Shape, ToolShape

T = TypeVar("T")
Victims = Literal["still", "effect", "left", "zombie"]
"""What attempts that had begun do when their journal is killed: nothing more; take effect; take effect and leave
their result; live on for a while and then take effect and leave their result."""


@dataclass(frozen=True)
class Fault:
    """Kill `who` before or after commit `n`, or when the n-th step of an attempt is reached."""

    where: Literal["before", "after", "step"]
    n: int
    victims: Victims = "still"
    who: Literal["all", "owner", "journal"] = "all"


class FaultyLog:
    """A log in which a fault strikes. What a killed process asks of it is never heard."""

    def __init__(self, inner: EventLog, process: Process, world: World, fault: Fault | None) -> None:
        self._inner, self._process, self._world, self._fault = inner, process, world, fault
        self._outside = contextvars.Context()

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        self._world.commits += 1
        await self._strike("before")
        verdicts = await self._asked(self._inner.commit(commands))
        if asked := [v.calls for v in verdicts if isinstance(v, Accepted) and any(call.waits for call in v.calls)]:
            await self._asked(self._world.tell(asked[-1]))
        await self._strike("after")
        return verdicts

    async def _strike(self, where: str) -> None:
        if self._fault and self._fault.where == where and self._world.commits == self._fault.n:
            self._world.strike(self._fault)
        if self._process.died.is_set():
            raise asyncio.CancelledError

    async def _asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Run by the log's own task, which no process takes with it."""
        return await asyncio.shield(asyncio.get_running_loop().create_task(work, context=self._outside))

    def __getattr__(self, name: str) -> Any:
        async def ask(*args: Any, **kwargs: Any) -> Any:
            return await self._asked(getattr(self._inner, name)(*args, **kwargs))

        return ask


@dataclass
class Attempt:
    """One attempt of a tool call, from asking leave to its end."""

    work: Work
    tool: Tool
    nonce: str
    lock: Path
    begun: bool = False
    acted: Outcome | None = None
    left: bool = False
    proofs_left: int = 0
    """How often a proof of its death will still be asked in vain."""


@functools.cache
def _prototype(shape: ToolShape) -> Tool:
    """A tool of a shape, made once: what is different in each world is what its handler and its probe do."""

    def handler(ctx: ToolContext, x: int) -> None: ...

    tool = Tool(handler, ToolOptions(shape.effect, settles_after_s=1.0), shape.name, shape.approval)
    if shape.probe:
        tool.reconcile(handler)
    return tool


@dataclass
class World:
    """Everything outside the product: tools, their effects, the attempts that live, and the faults."""

    shape: Shape
    folder: Path
    clock: ManualClock = field(default_factory=ManualClock)
    ledger: list[tuple[str, str, int]] = field(default_factory=list)
    """One line per effect: call, idempotency key, argument."""
    calls: Counter[str] = field(default_factory=Counter)
    """How often the handler of each call was entered."""
    dispatched: list[tuple[str, int]] = field(default_factory=list)
    """(call, attempt) of every task that was started."""
    living: dict[str, Attempt] = field(default_factory=dict)
    zombies: dict[str, Attempt] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Promises that were not kept."""
    commits: int = 0
    steps: int = 0
    fired: int = 0
    nonces: int = 0
    dying: bool = False
    owner: Process = field(default_factory=Process)
    journal: Process = field(default_factory=Process)
    fault: Fault | None = None
    person: Person = field(init=False)
    sweep: Callable[[], Any] = field(init=False)
    """Has the journal look at what others have appended."""

    def __post_init__(self) -> None:
        self.tape = Tape(self.shape.turns)
        tools = tuple(self._tool(shape) for shape in self.shape.tools)
        self.agent = Agent(name="a", model=self.tape, tools=tools, limits=self.shape.limits)

    # -- tools ----------------------------------------------------------------------------------------

    def _tool(self, shape: ToolShape) -> Tool:
        def handler(ctx: ToolContext, x: int) -> dict[str, Any]:
            self.calls[ctx.tool_call_id] += 1
            first = self.calls[ctx.tool_call_id] == 1
            if shape.quirk == "fails":
                raise ValueError(f"no such thing: {x}")
            if shape.quirk == "dies_once" and first:
                self.dying = True
            if self.dying:
                return {}
            if shape.quirk == "exits":
                raise SystemExit(3)
            self.ledger.append((ctx.tool_call_id, ctx.idempotency_key, x))
            if shape.quirk == "exits_after":
                raise SystemExit(4)
            self.dying = shape.quirk == "dies_once_after" and first
            return {} if shape.dull else {"call": ctx.tool_call_id, "x": x}

        def probe(ctx: ToolContext, x: int) -> Settled:
            if any(key == ctx.idempotency_key for _, key, _ in self.ledger):
                return Settled.happened({"call": ctx.tool_call_id, "x": x})
            return Settled.did_not_happen()

        tool = copy.copy(_prototype(shape))
        tool.handler, tool.probe = handler, probe if shape.probe else None
        return tool

    async def tell(self, calls: tuple[CallRow, ...]) -> None:
        """The person sees what is asked about these calls."""
        if await self.person.glance(calls):
            self.sweep()

    # -- faults ---------------------------------------------------------------------------------------

    def step(self) -> None:
        """A step of an attempt, at which a fault may strike."""
        self.steps += 1
        if self.fault and self.fault.where == "step" and self.steps == self.fault.n:
            self.strike(self.fault)

    def strike(self, fault: Fault) -> None:
        self.fired += 1
        self.fault = None
        if fault.who != "journal":
            self.owner.kill()
        if fault.who != "owner":
            self.journal.kill()
            for attempt in self.living.values():
                self._bury(attempt, fault.victims)
            self.living.clear()

    def _bury(self, attempt: Attempt, victims: Victims) -> None:
        if not attempt.begun or victims == "still":
            return
        if victims == "zombie":
            attempt.proofs_left = 2
            self.zombies[attempt.nonce] = attempt
        else:
            self.act(attempt)
            if victims == "left":
                self.leave(attempt)

    def act(self, attempt: Attempt) -> Outcome | None:
        """Run the handler if it did not run yet; None when it took its process with it."""
        if attempt.acted is None:
            context = attempts._context(attempt.work)
            attempt.acted = attempts._run(
                attempt.work, attempt.tool.bind(attempt.tool.handler, context, attempt.work.arguments)
            )
            if self.dying:
                self.dying = False
                attempt.acted = Outcome(kind="exited")
                return None
        return attempt.acted

    def leave(self, attempt: Attempt) -> None:
        """Leave the result in the lock file, as a non_idempotent attempt does."""
        if attempt.acted and attempt.acted.kind == "result" and not attempt.left:
            attempt.left = True
            attempt.lock.write_bytes(attempt.acted.model_dump_json().encode() + b"\n")

    def rivals(self, call_id: str) -> list[str]:
        """Marked attempts of a call that may still act."""
        both = {**self.living, **self.zombies}
        return [a.nonce for a in both.values() if a.work.tool_call_id == call_id and a.begun]


class FakeTasks(NoProcesses):
    """`Tasks` in the journal's own process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.journal: Journal | None = None

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        world = self.world
        tool = world.agent.tool(work.name)
        assert tool is not None
        if work.probe:
            if rivals := world.rivals(work.tool_call_id):
                world.broken.append(f"call {work.tool_call_id} was probed while {rivals} may act")
            return attempts._probe(work, tool)
        world.dispatched.append((work.tool_call_id, work.attempt))
        world.nonces += 1
        nonce = f"n{world.nonces}"
        attempt = Attempt(work, tool, nonce, world.folder / nonce)
        refusal = await self._leave_to_begin(attempt)
        if refusal:
            return Outcome(kind="refused", content=refusal)
        if work.effect == "non_idempotent" and (rivals := world.rivals(work.tool_call_id)):
            world.broken.append(f"attempt {work.attempt} of {work.tool_call_id} began while {rivals} may act")
        if tool.approval.rule == "always" and work.tool_call_id not in world.person.approved:
            world.broken.append(f"attempt {work.attempt} of {work.tool_call_id} began without approval")
        attempt.begun = True
        world.living[nonce] = attempt
        try:
            return await self._act(attempt)
        finally:
            world.living.pop(nonce, None)

    async def _leave_to_begin(self, attempt: Attempt) -> str | None:
        assert self.journal is not None
        work, mark = attempt.work, None
        if work.effect == "non_idempotent":
            attempt.lock.write_bytes(b"")
            mark = ToolCallStarted(
                tool_call_id=work.tool_call_id,
                attempt=work.attempt,
                nonce=attempt.nonce,
                node="node",
                boot_id="boot",
                pid=1,
                pid_started=1.0,
                lock=str(attempt.lock),
                hold_s=work.timeout_s,
            )
        return await self.journal.begin(work.run_id, work.tool_call_id, work.attempt, "node", mark)

    async def _act(self, attempt: Attempt) -> Outcome:
        await self._step()
        outcome = self.world.act(attempt)
        if outcome is None:
            raise TaskDied("it was killed")
        await self._step()
        if attempt.work.effect == "non_idempotent":
            self.world.leave(attempt)
        await self._step()
        return outcome

    async def _step(self) -> None:
        self.world.step()
        await asyncio.sleep(0)

    async def prove_dead(self, call: CallRow) -> bool:
        zombie = self.world.zombies.get(call.nonce)
        if zombie is None:
            return call.nonce not in self.world.living
        zombie.proofs_left -= 1
        if not zombie.proofs_left:
            self.world.act(zombie)
            self.world.leave(zombie)
            del self.world.zombies[call.nonce]
        return False


class Cluster:
    """The journal and the owner of one run, each in a process that can be replaced."""

    def __init__(self, log: EventLog, world: World, fault: Fault | None = None) -> None:
        self.log, self.world = log, world
        world.fault = fault
        self.start_journal(fault)

    def start_journal(self, fault: Fault | None = None) -> None:
        """A journal in a new process."""
        world, process = self.world, Process()
        self.tasks = FakeTasks(world)
        log = FaultyLog(self.log, process, world, fault)
        journal = Journal(log, self.tasks, "store", world.clock, world.clock.sleep)
        self.journal = self.tasks.journal = journal

        async def answer(payload: Any) -> Any:
            return await serve(journal, payload)

        async def look() -> None:
            await settle_down(5)
            await journal.sweep()

        self._desk, world.journal = Desk(answer), process
        world.sweep = lambda: process.spawn(look())

    async def _call(self, name: str, incarnation: str | None, requests: list[Numbered], done: list[int]) -> Reply:
        process = self.world.journal
        exchange = process.spawn(self._desk.exchange(name, incarnation, requests, done))
        await asyncio.wait({exchange})
        if exchange.cancelled():
            raise ConnectionError("the journal is gone")
        return exchange.result()

    def start_owner(self, epoch: int, run_id: str) -> asyncio.Task[Ended]:
        """An owner in a new process."""
        self.world.owner = process = Process()

        async def drive() -> Ended:
            courier = Courier(self._call, pause_s=0)
            start = Start(run_id, epoch, tuple(await self.log.read(run_id)))
            try:
                return await Owner(start, courier.ask, loader(self.world.agent)).drive()
            finally:
                courier.close()

        return process.spawn(drive())
