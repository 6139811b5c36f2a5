"""Admission, watching and respawning: the supervisor's work, as plain asyncio over a pool of run actors.

It holds nothing that the store does not. Admission, recovery after a crash and recovery of its own death are one
thing: a sweep over the store that claims every run that should be live and has no owner. So is a run that was parked
and that a person has released. A wrong verdict of death is harmless: the new claim's epoch fences out the old owner's
appends, and the start marks fence effects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

from ..store.errors import CorruptLog, LeaseHeld, PerdureError
from ..store.events import AgentRef, RunCreated, RunFailed, Stored
from ..store.log import Abandon, Accepted, Claim, Command, Create, EventLog, Expire, Verdict
from ..store.rows import Clock, Lease, RunRow
from ..store.states import LIVE, Status
from .loading import CurrentCode
from .pool import Member, MemberDied, Pool
from .requests import Await, Ended, Launch, Nudge, Settings, Start, Warm

log = logging.getLogger(__name__)
SWEEP_S = 1.0
LIVE_OR_WAITING = sorted(LIVE | {Status.AWAITING_APPROVAL})
ENDS_KEPT = 10_000
Reason = Literal["start", "respawn", "hung", "node_lost", "recovery", "decision"]
Commit = Callable[[Sequence[Command]], Awaitable[list[Verdict]]]

SHARED_MAX: tuple[int, ...] = (1_000_000, 64, 8, 1)
"""How many runs may share an actor with a run under suspicion 0, 1, 2, 3 or more: a run that kills its actor is soon
alone, and only a death alone is charged."""


def restart_allowed(charges: Iterable[float], now: float, most: int, period_s: float) -> bool:
    """Whether a run may be respawned once more: at most `most` charged respawns within any `period_s`. Pure."""
    return sum(at > now - period_s for at in charges) < most


def companions_max(suspicion: int) -> int:
    """How many runs an actor may hold while it holds a run that is so much suspected of killing actors. Pure."""
    return SHARED_MAX[min(suspicion, len(SHARED_MAX) - 1)]


class Supervision:
    """Admission, watching and respawning over one store."""

    def __init__(
        self,
        event_log: EventLog,
        commit: Commit,
        pool: Pool,
        settings: Settings,
        lease: Lease,
        clock: Clock = time.time,
    ) -> None:
        self._log, self._commit, self._pool = event_log, commit, pool
        self._settings, self._lease, self._clock = settings, lease, clock
        self._runs: dict[str, asyncio.Task[None]] = {}
        """The runs that have an owner, or are about to get one."""
        self._claiming: set[str] = set()
        self._agents: dict[tuple[str, str], AgentRef] = {}
        self._code = CurrentCode()
        self._suspicion: dict[str, int] = {}
        """Deaths of a run's actors: 1 for a shared one, 2 for one that it died alone."""
        self._told: dict[str, asyncio.Task[None]] = {}
        """Runs that are being cancelled, and whose owner was told of it, or is being told."""
        self._ends: OrderedDict[str, Ended] = OrderedDict()
        self._waiters: dict[str, asyncio.Future[Ended]] = {}
        self._news = asyncio.Event()
        self._full = True
        """The next sweep has to look at everything that should be live."""
        self._backlog = True
        """There may be runs that found no slot: queued ones in the store, and released ones."""
        self._released = deque[RunRow]()
        """Runs that were parked, are released, and have found no slot yet."""

    # -- what clients ask ---------------------------------------------------------------------------------

    async def serve(self, payload: Any) -> Any:
        match payload:
            case Launch():
                return await self._launch(payload.creates)
            case Await():
                return await self._await(payload.run_id)
            case Warm():
                self._pool.warm(payload.agent, payload.count)
                return None
            case Nudge():
                for run_id in payload.run_ids:
                    self._ends.pop(run_id, None)
                self.look()
                return None
            case _:
                raise PerdureError(f"the supervisor does not know the request {payload!r}")

    def look(self) -> None:
        """Sweep over the whole store at once: it has news."""
        self._full = True
        self._news.set()

    async def _launch(self, creates: Sequence[Create]) -> list[Verdict]:
        """Create runs, and claim at once those that find a slot; nobody overtakes a queued run by this."""
        room = 0 if self._backlog else self._room()
        commands: list[Command] = []
        for number, create in enumerate(creates):
            commands.append(create)
            if number < room:
                commands.append(Claim(create.run_id, uuid4().hex, self._lease.nonce, 0))
        created: list[Verdict] = []
        with self._reserved(command.run_id for command in commands if isinstance(command, Claim)):
            for command, verdict in zip(commands, await self._commit(commands), strict=True):
                if isinstance(command, Create):
                    created.append(verdict)
                elif isinstance(verdict, Accepted):
                    before = created[-1]  # refused where another client was faster; the run is ours to drive then too
                    known = (*before.events, *verdict.events) if isinstance(before, Accepted) else ()
                    self._watch(verdict.row, known)
        if room < len(creates):
            self._backlog = True
            self._news.set()
        return created

    def _room(self) -> int:
        return max(0, self._settings.concurrency - len(self._runs.keys() | self._claiming))

    @contextmanager
    def _reserved(self, run_ids: Iterable[str]) -> Iterator[None]:
        """Keep the sweep off runs that are being claimed."""
        ids = set(run_ids)
        self._claiming |= ids
        try:
            yield
        finally:
            self._claiming -= ids

    async def _await(self, run_id: str) -> Ended:
        if run_id in self._ends and self._ends[run_id].outcome == "waits":  # or it did, when we last heard of it
            del self._ends[run_id]
            await self._parked(run_id)
        if run_id in self._ends:
            return self._ends[run_id]
        if run_id not in self._waiters:
            self._waiters[run_id] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._waiters[run_id])

    # -- the sweep ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sweep for ever: at once when there is news, and over everything every SWEEP_S. Raises LeaseHeld."""
        await self._adopt()
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            self._news.clear()
            full, self._full = self._full or loop.time() >= due_at, False
            if full:
                due_at = loop.time() + SWEEP_S
            try:
                await self._keep_lease()
                await self.sweep(full)
            except LeaseHeld:
                raise
            except Exception:
                log.exception("a sweep failed")
            await within(due_at - loop.time(), self._news.wait())

    async def sweep(self, full: bool = True) -> None:
        """Fill the free slots: first with runs that a person has released, then with queued ones. A full sweep before
        that sees to deadlines, and claims what should be live and has lost its owner."""
        if full:
            self._backlog = True
            await self._expire()
            await self._answer_waiters()
            live = await self._log.runs(statuses=sorted(LIVE - {Status.QUEUED}), oldest_first=True)
            self._tell_of_cancels(live)
            orphans = [row for row in live if row.run_id not in self._runs and row.run_id not in self._claiming]
            await self._respawn([row for row in orphans if not row.parked], "recovery", charged=False)
            self._released = deque(row for row in orphans if row.parked)
        if self._released:
            released = [self._released.popleft() for _ in range(min(self._room(), len(self._released)))]
            await self._claim([row for row in released if row.run_id not in self._runs], "decision", charged=False)
        room = self._room()
        if self._backlog and room > 0:
            queued = await self._log.runs(statuses=[Status.QUEUED], oldest_first=True, limit=room)
            self._backlog = len(queued) == room
            owned = self._runs.keys() | self._claiming
            await self._claim([row for row in queued if row.run_id not in owned], "start", charged=False)

    def _tell_of_cancels(self, rows: Iterable[RunRow]) -> None:
        """Tell the owners of runs that are being cancelled, once each: a model call under way is to end at once."""
        for row in rows:
            if row.cancel and row.run_id in self._runs and row.run_id not in self._told:
                self._told[row.run_id] = asyncio.create_task(self._tell(row.run_id, row.epoch))

    async def _tell(self, run_id: str, epoch: int) -> None:
        """Tell an owner to look; one that could not be told will be by a later sweep."""
        told = False
        try:
            told = await self._pool.look(run_id, epoch)
        finally:
            if not told and self._told.get(run_id) is asyncio.current_task():
                del self._told[run_id]

    async def _expire(self) -> None:
        """Have the store decide what nobody has decided in time."""
        due = await self._log.runs(statuses=LIVE_OR_WAITING, due_before=self._clock())
        if due:
            await self._commit([Expire(row.run_id, self._lease.nonce) for row in due])

    async def _answer_waiters(self) -> None:
        """Runs that ended by another hand: cancelled while queued, or ended before they were asked for."""
        ids = [run_id for run_id in self._waiters if run_id not in self._runs]
        for row in await self._log.runs(ids=ids) if ids else []:
            await self._note_row(row)

    async def _note_row(self, row: RunRow) -> None:
        """Tell who waits for a run that it has ended or is parked, if it is so."""
        if row.status.is_terminal or row.status is Status.AWAITING_APPROVAL:
            end = (await self._log.read(row.run_id, row.end_seq - 1, 1))[0].event if row.end_seq else None
            self._note_end(Ended(row.run_id, row.epoch, row.status, "ended" if end else "waits", end))

    async def _keep_lease(self) -> None:
        now = self._clock()
        if self._lease.expires_at - now > self._settings.lease_s - SWEEP_S:
            return
        renewed = replace(self._lease, expires_at=now + self._settings.lease_s)
        if not await self._log.take_lease(renewed, self._lease.nonce):
            raise LeaseHeld("another supervisor has taken over this store; this one ends")
        self._lease = renewed

    async def _adopt(self) -> None:
        """After a death of our own: join the drives that living run actors hold."""
        for member, held in await self._pool.adopt():
            rows = {row.run_id: row for row in await self._log.runs(ids=[run_id for run_id, _ in held])}
            for run_id, epoch in held:
                if (row := rows.get(run_id)) and row.epoch == epoch:
                    self._watch(row, (), member)

    # -- owners -------------------------------------------------------------------------------------------

    async def _claim(self, rows: Sequence[RunRow], reason: Reason, charged: bool) -> None:
        if not rows:
            return
        claims = [Claim(row.run_id, uuid4().hex, self._lease.nonce, row.epoch, reason, charged) for row in rows]
        with self._reserved(row.run_id for row in rows):
            for verdict in await self._commit(claims):
                if isinstance(verdict, Accepted):
                    self._watch(verdict.row, (), urgent=reason != "start")

    async def _respawn(self, rows: Sequence[RunRow], reason: Reason, charged: bool) -> None:
        """Claim live runs anew for other actors, or end those that died too often."""
        now, most, period_s = self._clock(), self._settings.respawns_max, self._settings.respawn_period_s
        spent = [row for row in rows if charged and not restart_allowed(row.charges, now, most, period_s)]
        for row in spent:
            await self._abandon(row)
        await self._claim([row for row in rows if row not in spent], reason, charged)

    async def _abandon(self, row: RunRow) -> None:
        most, period_s = self._settings.respawns_max, self._settings.respawn_period_s
        event = RunFailed(
            code="crash_loop",
            message=f"the run's actor died more than {most} times within {period_s:g} s; resume it to try again",
            phase="supervision",
        )
        verdict = (await self._commit([Abandon(row.run_id, self._lease.nonce, row.epoch, event)]))[0]
        if isinstance(verdict, Accepted):
            end = verdict.events[-1].event if verdict.events else event
            self._note_end(Ended(row.run_id, row.epoch, verdict.row.status, "ended", end))

    def _watch(
        self, row: RunRow, events: tuple[Stored, ...], member: Member | None = None, urgent: bool = False
    ) -> None:
        self._ends.pop(row.run_id, None)
        self._told.pop(row.run_id, None)
        task = self._runs[row.run_id] = asyncio.create_task(self._see_through(row, events, member, urgent))
        task.add_done_callback(lambda _: self._unwatch(row.run_id, task))

    def _unwatch(self, run_id: str, task: asyncio.Task[Any] | None) -> None:
        """A run whose watch ended is nobody's, unless it was bound anew; the sweep claims it if it is live."""
        if self._runs.get(run_id) is task:
            del self._runs[run_id]
            self._told.pop(run_id, None)

    async def _see_through(self, row: RunRow, events: tuple[Stored, ...], member: Member | None, urgent: bool) -> None:
        """Give a claimed run to an actor and wait for its end; when the actor dies, have the run respawned."""
        run_id = row.run_id
        try:
            if member:
                self._pool.join(member, run_id)
            try:
                agent = await self._agent(row, events)
                if member is None:
                    agent = agent if events else await self._code.of(agent)
                    most = companions_max(self._suspicion.get(run_id, 0))
                    member = await self._pool.take(run_id, agent, most, urgent)
                else:
                    agent = agent.model_copy(update={"digest": member.digest})
                ended = await member.ask(Start(run_id, row.epoch, events, member.apart, agent))
            finally:
                if member:
                    self._pool.leave(member, run_id)
        except MemberDied as death:
            try:
                await self._died(run_id, death)
            except PerdureError:
                log.exception("run %s: it cannot be claimed now; a sweep will do it", run_id)
            if member:
                await self._pool.bury(member)
            return
        except Exception:
            log.exception("run %s: its owner could not be watched", run_id)
            return
        self._unwatch(run_id, asyncio.current_task())
        if ended.outcome == "ended":
            self._note_end(ended)
        elif ended.outcome == "waits":
            await self._parked(run_id)
        if self._backlog:
            self._news.set()

    async def _parked(self, run_id: str) -> None:
        """A run's owner has left it to a person, who may have decided, or cancelled it, by now."""
        try:
            row = await self._log.run(run_id)
            if row and row.status in LIVE:
                await self._claim([row], "decision", charged=False)
            elif row:
                await self._note_row(row)
        except PerdureError:
            log.exception("run %s: it cannot be looked at now; a sweep will do it", run_id)

    async def _agent(self, row: RunRow, events: tuple[Stored, ...]) -> AgentRef:
        """The run's code as the log knows it: of a launch, as its client has loaded it. Read once per version."""
        key = row.agent, row.digest
        if key not in self._agents:
            first = (events or await self._log.read(row.run_id, 0, 1))[0].event
            if not isinstance(first, RunCreated):
                raise CorruptLog(f"the log of run {row.run_id} does not begin with run_created")
            self._agents[key] = first.agent.model_copy(update={"digest": row.digest})
        return self._agents[key]

    async def _died(self, run_id: str, death: MemberDied) -> None:
        charged = death.companions == 1 and death.reason != "node_lost"
        if death.reason != "node_lost":
            self._suspicion[run_id] = self._suspicion.get(run_id, 0) + (2 if charged else 1)
        row = await self._log.run(run_id)
        if row and row.status in LIVE:
            await self._respawn([row], death.reason, charged)

    def _note_end(self, ended: Ended) -> None:
        self._suspicion.pop(ended.run_id, None)
        self._ends[ended.run_id] = ended
        while len(self._ends) > ENDS_KEPT:
            self._ends.popitem(last=False)
        if waiter := self._waiters.pop(ended.run_id, None):
            waiter.set_result(ended)

    def status(self) -> dict[str, Any]:
        """Figures for people."""
        return {"live": len(self._runs), "concurrency": self._settings.concurrency, **self._pool.status()}


async def within(seconds: float, event: Awaitable[Any]) -> bool:
    """Whether an awaitable finished in time."""
    try:
        async with asyncio.timeout(seconds):
            await event
    except TimeoutError:
        return False
    return True
