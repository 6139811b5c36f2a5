"""The Ray bodies of the journal and of run actors: thin shells around plain asyncio classes.

The journal is detached, restarted without limit and its calls are sent again after a restart; so every method of
it is idempotent. Run actors are never restarted by Ray: their death is a verdict that the supervisor acts on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import ray

from ..store.events import AgentRef, ToolCallStarted
from ..store.log import Command, EventLog, Verdict
from ..store.rows import Lease
from .courier import Courier, Desk, Numbered, Reply
from .journal import Journal, serve
from .kernel import boot_id, kill_process, process_started
from .leftovers import sweep_locks, watch_strays
from .loading import loaded
from .ray_tasks import JOURNAL, RayTasks, bind_process, journal_handle
from .requests import Ended, Nudge, Settings, Start, store_of
from .run import Owner
from .wire import Method, Wire, exchanges, listen, socket_path

log = logging.getLogger(__name__)
CONCURRENCY = 100_000
SWEEP_S = 1.0

RESTARTED: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": CONCURRENCY}
"""Options of an actor that Ray restarts without limit, sending its pending calls again."""
MORTAL: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": CONCURRENCY}
"""Options of an actor whose death is a verdict."""

Identity = tuple[int, float, str, str]
"""pid, start time, boot id and node of an actor's process."""


def identity() -> Identity:
    """Names this process for good."""
    return os.getpid(), process_started(os.getpid()), boot_id(), ray.get_runtime_context().get_node_id()


def own_lease(name: str, nonce: str, lease_s: float) -> Lease:
    """A lease in the name of this process."""
    pid, started, boot, node = identity()
    return Lease(name, nonce, node, boot, pid, started, time.time() + lease_s)


async def replace_journal(event_log: EventLog, lease_s: float) -> None:
    """End the journal that a lease names, see it gone, and take the lease.

    A frozen process may hold the database's write lock, so it is killed before anything is written.
    """
    mine = own_lease(JOURNAL, uuid4().hex, lease_s)
    while True:
        before = await event_log.lease(JOURNAL)
        if (
            before
            and before.boot_id == mine.boot_id
            and (before.pid, before.pid_started) != (mine.pid, mine.pid_started)
        ):
            await asyncio.to_thread(kill_process, before.pid, before.pid_started)
        if await event_log.take_lease(mine, before.nonce if before else None):
            return


class JournalActor:
    """The journal of one store."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tasks = RayTasks(settings.namespace)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            # calls are under way, and the workers of all tools have ended with the journal that was here before
            self._tasks.warm(None, False, settings.concurrency)
        self._opening: asyncio.Task[tuple[Journal, Desk]] | None = None

    async def _open(self) -> tuple[Journal, Desk]:
        # here, not above: whoever gets a handle of an actor imports its module, and tools and run actors have no
        # use for the half a second that SQLAlchemy takes
        from ..store.sql import open_log

        event_log = await open_log(self._settings.store)
        await replace_journal(event_log, self._settings.lease_s)
        tasks = self._tasks
        journal = Journal(event_log, tasks, self._settings.name)
        name = self._settings.name
        strays = watch_strays(event_log, tasks, name, journal.runs_attempt)
        work = (tasks.watch(), self._sweep(journal), strays, sweep_locks(event_log, name))
        self._background = [asyncio.create_task(each) for each in work]

        async def answer(payload: Any) -> Any:
            return await serve(journal, payload)

        desk = Desk(answer)
        methods: dict[str, Method] = {
            "exchange": desk.exchange,
            "begin": self.begin,
            "keep": journal.keep,
            "commit": journal.commit,
        }
        self._door = await listen(socket_path(name, JOURNAL), methods)
        return journal, desk

    async def _ready(self) -> tuple[Journal, Desk]:
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(self._open())
        return self._opening.result() if self._opening.done() else await asyncio.shield(self._opening)

    async def _sweep(self, journal: Journal) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await journal.sweep()
            except Exception:
                log.exception("the journal's sweep failed")

    async def exchange(
        self, client: str, incarnation: str | None, requests: Sequence[Numbered], done: Sequence[int]
    ) -> Reply:
        _, desk = await self._ready()
        return await desk.exchange(client, incarnation, requests, done)

    async def begin(
        self, run_id: str, tool_call_id: str, attempt: int, node: str, pid: int, mark: ToolCallStarted | None
    ) -> str | None:
        journal, _ = await self._ready()
        return await journal.begin(run_id, tool_call_id, attempt, node, mark, pid)

    async def keep(self, digest: str, part: int, data: bytes) -> None:
        journal, _ = await self._ready()
        await journal.keep(digest, part, data)

    async def probing(self, run_id: str, tool_call_id: str, node: str, pid: int) -> None:
        """A probe runs in this process."""
        await self._ready()
        self._tasks.begun(run_id, tool_call_id, 0, node, pid)

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        journal, _ = await self._ready()
        return await journal.commit(commands)

    async def warm(self, agent: AgentRef, apart: bool, count: int) -> None:
        """Start workers for tools ahead of need."""
        await self._ready()
        self._tasks.warm(agent, apart, count)

    async def ping(self) -> Identity:
        await self._ready()
        return identity()


def journal_courier(namespace: str) -> Courier:
    """A courier to the journal of a namespace, wherever and whenever that runs."""
    wire = Wire(socket_path(store_of(namespace), JOURNAL))
    return Courier(exchanges(wire, lambda: journal_handle(namespace)))


class RunActor:
    """Drives the runs that the supervisor binds to it, each as an asyncio task of its own."""

    def __init__(self, namespace: str, agent: AgentRef) -> None:
        bind_process(agent)
        self._namespace = namespace
        self._courier: Courier | None = None
        self._desk: Desk | None = None
        self._door: asyncio.Server | None = None
        self._drives: dict[tuple[str, int], tuple[Owner, asyncio.Task[Ended]]] = {}

    async def exchange(
        self, client: str, incarnation: str | None, requests: Sequence[Numbered], done: Sequence[int]
    ) -> Reply:
        if self._desk is None:
            self._desk, self._courier = Desk(self._drive), journal_courier(self._namespace)
        return await self._desk.exchange(client, incarnation, requests, done)

    async def _drive(self, start: Start) -> Ended:
        """Idempotent: a supervisor that was restarted joins the drive that its predecessor began."""
        assert self._courier is not None
        key = (start.run_id, start.epoch)
        if key not in self._drives:
            owner = Owner(start, self._courier.ask, loaded)
            drive = asyncio.create_task(owner.drive())
            self._drives[key] = owner, drive
            drive.add_done_callback(lambda _: self._drives.pop(key, None))
        return await asyncio.shield(self._drives[key][1])

    async def look(self, run_id: str, epoch: int) -> bool:
        """Have the owner of a run look at its log; whether it is here."""
        drive = self._drives.get((run_id, epoch))
        if drive and self._courier:
            drive[0].look()
            await self._courier.ask(Nudge((run_id,)))  # the owner may wait for its tools
        return drive is not None

    async def held(self) -> list[tuple[str, int]]:
        """(run, epoch) of the drives under way."""
        return list(self._drives)

    async def ping(self) -> Identity:
        if self._door is None:
            name = str(ray.get_runtime_context().get_actor_name())
            self._door = await listen(socket_path(store_of(self._namespace), name), {"exchange": self.exchange})
        return identity()
