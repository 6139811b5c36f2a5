"""The Journal: the one door to everything durable. It writes the log and owns the tool tasks.

A Ray task dies with the process that submitted it, so run actors do not submit their tools: they hand message,
intents and calls to the journal in one `Execute`. The journal makes the intents durable, starts one task per
call, records each result, and answers. Running tools so outlive the run actor; a respawned one asks for its open
calls and joins those in flight. The journal runs no code of the user and unpickles nothing of the user's.

This class is plain asyncio; `actors/ray_tasks.py` is its body on Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

from ..store.errors import PerdureError, StoreUnavailable
from ..store.events import Stored, ToolCallRequested, ToolCallStarted
from ..store.log import Accepted, Append, Command, EventLog, Leave, Mark, Refused, Verdict
from ..store.rows import CallRow, Clock, RunRow
from ..store.states import TERMINAL, Status
from ..store.writer import GroupWriter
from .changed import closings, in_doubt
from .proof import Proofs
from .pursuit import Pursued, Pursuit, Tasks
from .requests import Execute, Executed, Nudge
from .tools import ToolOptions

log = logging.getLogger(__name__)
STORE_PAUSE_S = 1.0


class _Followed:
    """What the journal remembers of a live run: hints, all of it; the log decides."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls: dict[str, tuple[Pursued, asyncio.Task[None]]] = {}
        self.recent: dict[int, Stored] = {}
        self.seq = 0
        """The newest event up to which there is none of another hand that its owner was not told of."""
        self.news = asyncio.Event()
        """Set when there is such an event; then another takes its place."""

    def knows(self, seq: int) -> None:
        """The owner knows all events up to this one, and the journal has appended those in `recent` itself."""
        self.seq = max(self.seq, seq)
        while self.seq + 1 in self.recent:
            self.seq += 1

    def announce(self, seq: int) -> None:
        """Somebody else has appended: whoever waits here has to look at the log."""
        self.seq = max(self.seq, seq)
        self.news.set()
        self.news = asyncio.Event()


class Journal:
    """Appends, dispatches and records for the runs of one store. `store` names the folder of lock files."""

    def __init__(
        self,
        event_log: EventLog,
        tasks: Tasks,
        store: str,
        clock: Clock = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._log, self._tasks, self._clock, self._sleep = event_log, tasks, clock, sleep
        self._writer = GroupWriter(event_log)
        self._runs: dict[str, _Followed] = {}
        self._endings: set[asyncio.Task[None]] = set()
        """What still runs for ended runs is being stopped."""
        self._proofs = Proofs(event_log, self.submit, tasks, store)
        self._pursuit = Pursuit(event_log, self.submit, tasks, self._epoch_of, store, clock, sleep)

    async def execute(self, ask: Execute) -> Executed:
        """Append as the owner, then wait until every released call has its result or nothing more can be done; or
        until somebody else has appended to the run: a cancel, or a decision that releases one more call. Of a run that
        is cancelled, stop what runs: once this returns, nothing of it does, and each call that had begun has a result;
        and look for processes that it has left.

        Raises Refused. May be repeated: calls that run are joined, never started twice.
        """
        done = await self.submit(Append(ask.run_id, ask.epoch, ask.expected_seq, ask.events))
        if done.row.status in TERMINAL:
            self._release(done.row)
            return Executed(done.events)
        run = self._runs.get(ask.run_id)
        if run is None:
            run = self._runs[ask.run_id] = _Followed(ask.epoch)
            run.recent.update((stored.seq, stored) for stored in done.events)
        run.epoch = ask.epoch
        run.knows(ask.expected_seq)
        told = ask.expected_seq + len(done.events) == done.row.seq >= run.seq
        checked = None
        if done.row.cancel:
            await self._stop(run, ask, done)
            checked = await self._proofs.look(ask.run_id) if done.row.turns else None
        elif told and done.calls:
            told = await self._see_through(run, ask, done)
        events = await self._since(ask.run_id, run, ask.expected_seq, told)
        if not run.calls and self._runs.get(ask.run_id) is run:
            del self._runs[ask.run_id]  # nothing of it runs here: the next execute brings what is to be known
        return Executed(events, checked)

    async def _see_through(self, run: _Followed, ask: Execute, done: Accepted) -> bool:
        """Start or join the released calls and wait for them. False when others have appended meanwhile."""
        asked = (*ask.known, *(event for event in ask.events if isinstance(event, ToolCallRequested)))
        requests = {event.tool_call_id: event for event in asked}
        fresh = set() if done.already else {event.tool_call_id for event in asked} - {e.tool_call_id for e in ask.known}
        open_calls = await self._without_misfits(run, ask, done) if ask.misfits else done.calls
        if open_calls is None:
            return False
        waiting = []
        for call in open_calls:
            if call.tool_call_id in run.calls:
                self._renew(run.calls[call.tool_call_id][0], ask, call)
            elif not call.barred and call.tool_call_id in requests:
                self._pursue(run, ask, call, requests[call.tool_call_id], call.tool_call_id in fresh)
            if call.tool_call_id in run.calls:
                waiting.append(run.calls[call.tool_call_id][1])
        if not waiting:
            return True
        news = run.news
        announced = asyncio.create_task(news.wait())
        everything = asyncio.create_task(_all_done(waiting))
        await asyncio.wait({everything, announced}, return_when=asyncio.FIRST_COMPLETED)
        announced.cancel()
        everything.cancel()
        for task in waiting:
            if task.done() and (error := task.exception()):
                raise error
        return not news.is_set()

    async def _stop(self, run: _Followed, ask: Execute, done: Accepted) -> None:
        """Stop what runs of a cancelled run, and find out what became of calls that ran when their journal died."""
        requests = {event.tool_call_id: event for event in ask.known}
        for call in done.calls:
            doubtful = in_doubt(call) and not call.unsettled and call.tool_call_id in requests
            if doubtful and call.tool_call_id not in run.calls:
                self._pursue(run, ask, call, requests[call.tool_call_id], fresh=False).stopping.set()
        under_way = list(run.calls.values())
        await asyncio.gather(*(self._pursuit.stop(it, pursuing) for it, pursuing in under_way))
        await self._pursuit.end_left(ask.run_id)
        for _, pursuing in under_way:
            if error := pursuing.exception():
                raise error

    def _pursue(self, run: _Followed, ask: Execute, call: CallRow, request: ToolCallRequested, fresh: bool) -> Pursued:
        if ask.agent is None:
            raise PerdureError(f"run {ask.run_id}: an execute with calls names no agent")
        options = ask.options.get(call.name) or ToolOptions(request.effect)
        misfit = ask.misfits.get(call.tool_call_id)
        pursued = Pursued(request, options, ask.agent, ask.metadata, call, ask.apart, misfit)
        task = asyncio.create_task(self._pursuit.pursue(pursued, fresh))
        run.calls[call.tool_call_id] = (pursued, task)
        task.add_done_callback(lambda _: run.calls.pop(call.tool_call_id, None))
        return pursued

    async def _without_misfits(self, run: _Followed, ask: Execute, done: Accepted) -> tuple[CallRow, ...] | None:
        """The open calls, once those are closed that nothing runs for and that the agent's code has no place for. None
        when others have appended meanwhile: such a call may have begun."""
        idle = [call for call in done.calls if call.tool_call_id not in run.calls]
        results = closings(idle, ask.misfits, {event.tool_call_id: event.idempotency_key for event in ask.known})
        if not results:
            return done.calls
        try:
            return (await self.submit(Append(ask.run_id, ask.epoch, done.row.seq, tuple(results)))).calls
        except Refused as refusal:
            if refusal.reason == "conflict":
                return None
            raise

    def _renew(self, pursued: Pursued, ask: Execute, call: CallRow) -> None:
        """Tell the pursuit of a call of a new version of the code: the attempt that runs goes on, another, or a probe,
        is of that version."""
        if ask.agent is None or ask.agent == pursued.agent:
            return
        pursued.agent, pursued.apart = ask.agent, ask.apart
        pursued.options = ask.options.get(call.name) or pursued.options
        pursued.misfit = ask.misfits.get(call.tool_call_id)
        pursued.request = next((e for e in ask.known if e.tool_call_id == call.tool_call_id), pursued.request)
        if call.effect != pursued.row.effect and call.attempt == pursued.row.attempt:
            pursued.row = call

    async def begin(
        self, run_id: str, tool_call_id: str, attempt: int, node: str, mark: ToolCallStarted | None, pid: int = 0
    ) -> str | None:
        """Leave to begin, asked from inside a task right before the handler. Returns why not, or None."""
        command = Mark(run_id, mark) if mark else Leave(run_id, tool_call_id, attempt)
        run = self._runs.get(run_id)
        known = run.calls.get(tool_call_id) if run else None
        try:
            done = await self.submit(command)
        except Refused as refusal:
            return refusal.message
        if known and known[0].row.attempt == attempt:
            known[0].begun = attempt
            known[0].row = next((c for c in done.calls if c.tool_call_id == tool_call_id), known[0].row)
            self._tasks.begun(run_id, tool_call_id, attempt, node, pid)
        return None

    async def submit(self, command: Command) -> Accepted:
        """Commit one command; waits as long as the store cannot be written. Raises Refused."""
        while True:
            try:
                done = await self._writer.submit(command)
            except StoreUnavailable as error:
                log.warning("the store is unavailable, run %s waits: %s", command.run_id, error)
                await self._sleep(STORE_PAUSE_S)
                continue
            if run := self._runs.get(command.run_id):
                run.recent.update((stored.seq, stored) for stored in done.events)
                run.knows(0)
            return done

    async def keep(self, digest: str, part: int, data: bytes) -> None:
        """Keep a part of a blob; waits as long as the store cannot be written."""
        while True:
            try:
                return await self._log.keep(digest, part, data)
            except StoreUnavailable as error:
                log.warning("the store is unavailable, blob %s waits: %s", digest, error)
                await self._sleep(STORE_PAUSE_S)

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        """Commit decisions of the supervisor or a client, each with its verdict."""
        return await self._writer.submit_all(commands)

    async def load(self, run_id: str, after: int, limit: int) -> list[Stored]:
        """A piece of a run's log, for an owner that may be on another node."""
        return await self._log.read(run_id, after, limit)

    async def sweep(self) -> None:
        """Stop what belongs to runs that were ended by another hand, and have the owners of others look at what
        somebody else has appended. One that is told in vain looks in vain, no more. And look for what cancelled runs
        have left, where that was not done yet."""
        await self.look({run_id for run_id, run in self._runs.items() if run.calls} | self._pursuit.left.keys())
        for run_id in await self._proofs.owed(self._clock()):
            self._see_to(self._proofs.prove(run_id))

    async def look(self, run_ids: Collection[str]) -> None:
        """The part of `sweep` that is about these runs: what runs here may be due to stop."""
        for row in await self._log.runs(ids=[*run_ids]) if run_ids else []:
            run = self._runs.get(row.run_id)
            if row.status in TERMINAL:
                self._release(row)
            elif run and run.calls and row.seq > run.seq:
                run.announce(row.seq)

    def runs_attempt(self, run_id: str, tool_call_id: str, attempt: int) -> bool:
        """Whether it was dispatched from here and is not known to be over."""
        run = self._runs.get(run_id)
        known = run.calls.get(tool_call_id) if run else None
        return known is not None and known[0].row.attempt == attempt

    async def close(self) -> None:
        await self._writer.close()

    def _release(self, row: RunRow) -> None:
        """Forget an ended run, and end what still runs for it."""
        run = self._runs.pop(row.run_id, None)
        calls = list(run.calls.values()) if run else []
        if run:
            run.news.set()
        if calls or row.run_id in self._pursuit.left or (row.status is Status.CANCELLED and row.due_at is not None):
            self._see_to(self._end(row.run_id, calls))

    def _see_to(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _end(self, run_id: str, calls: Sequence[tuple[Pursued, asyncio.Task[None]]]) -> None:
        await asyncio.gather(*(self._pursuit.stop(it, pursuing, mute=True) for it, pursuing in calls))
        await self._pursuit.end_left(run_id)
        await self._proofs.prove(run_id)

    async def _since(self, run_id: str, run: _Followed, seq: int, told: bool) -> tuple[Stored, ...]:
        """All events after `seq`: from memory where it has no gap and nobody else has appended, else from the log."""
        events: list[Stored] = []
        while told and (stored := run.recent.get(seq + len(events) + 1)):
            events.append(stored)
        if not told or len(events) < sum(number > seq for number in run.recent):
            events = await self._log.read(run_id, seq)
        run.recent = {stored.seq: stored for stored in events}
        run.knows(seq)
        return tuple(events)

    def _epoch_of(self, run_id: str) -> int:
        run = self._runs.get(run_id)
        return run.epoch if run else -1


async def _all_done(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


async def serve(journal: Journal, payload: object) -> object:
    """What a run actor may ask for through its courier."""
    match payload:
        case Execute():
            return await journal.execute(payload)
        case (str() as run_id, int() as after, int() as limit):
            return await journal.load(run_id, after, limit)
        case Nudge():
            await journal.look(payload.run_ids)
            return None
        case _:
            raise PerdureError(f"the journal does not know the request {payload!r}")
