"""The supervisor of a store, as a Ray actor: detached, restarted without limit, with all its state in the store.

One supervisor works on a store. A lease row names it, and is checked inside each claim's transaction. What it does
stands in `actors/supervision.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .actors.bodies import RESTARTED, JournalActor, own_lease
from .actors.courier import Desk, Numbered, Reply
from .actors.kernel import boot_id, kill_process, process_started
from .actors.nudge import NudgeDoor
from .actors.pool import Pool
from .actors.ray_tasks import JOURNAL
from .actors.requests import Settings
from .actors.supervision import Supervision, within
from .actors.wire import Wire, listen, socket_path
from .store.errors import LeaseHeld, PerdureError
from .store.log import Command, EventLog, Verdict
from .store.rows import Lease
from .store.sql import open_log

SUPERVISOR = "supervisor"
ORPHAN_S = 3.0
"""How long processes of a cluster that was killed may still be seen alive."""


async def take_lease(event_log: EventLog, settings: Settings) -> Lease:
    """Become the store's one supervisor. Raises LeaseHeld when another one keeps renewing its lease."""
    began, first = time.monotonic(), None
    while True:
        holder = await event_log.lease(SUPERVISOR)
        gone = holder is None or holder.expires_at < time.time()
        if holder and holder.boot_id == boot_id():
            gone = gone or process_started(holder.pid) != holder.pid_started
        if gone:
            mine = own_lease(SUPERVISOR, uuid4().hex, settings.lease_s)
            if await event_log.take_lease(mine, holder.nonce if holder else None):
                return mine
            continue
        first = first or holder
        if holder and first and holder.expires_at > first.expires_at and time.monotonic() - began > ORPHAN_S:
            raise LeaseHeld(
                f"another supervisor (process {holder.pid} on node {holder.node[:8]}) works on this store; "
                "wait until it is done, or end it with `perdure down`"
            )
        await asyncio.sleep(0.2)


class SupervisorActor:
    """The body of the supervisor on Ray: detached, restarted without limit, all its state in the store."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._starting: asyncio.Task[tuple[Supervision, Desk]] | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._socket: asyncio.Server | None = None
        self._lost: LeaseHeld | None = None
        ray.get_runtime_context().current_actor.start.remote()  # after a restart nobody may call us

    async def start(self) -> str | None:
        """Begin to work. Returns why that is impossible, or None."""
        try:
            await self._ready()
        except PerdureError as error:
            return error.message
        return None

    async def _ready(self) -> tuple[Supervision, Desk]:
        if self._lost:
            raise self._lost
        if self._starting is None or (self._starting.done() and self._starting.exception()):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> tuple[Supervision, Desk]:
        event_log = await open_log(self._settings.store)
        lease = await take_lease(event_log, self._settings)
        self._event_log, self._nonce = event_log, lease.nonce
        journal = self._journal()
        await journal.ping.remote()
        wire = Wire(socket_path(self._settings.name, JOURNAL))

        async def commit(commands: Sequence[Command]) -> list[Verdict]:
            verdicts: list[Verdict] = await wire.call_or(journal.commit.remote, "commit", list(commands))
            return verdicts

        self._pool = Pool(self._settings)
        supervision = Supervision(event_log, commit, self._pool, self._settings, lease)
        work = (self._work(supervision), self._pool.watch(), self._watch_journal(journal))
        self._loops = [asyncio.create_task(loop) for loop in work]
        self._door = NudgeDoor(self._settings.name, supervision.look)
        desk = Desk(supervision.serve)
        self._socket = await listen(socket_path(self._settings.name, SUPERVISOR), {"exchange": self.exchange})
        return supervision, desk

    def _journal(self) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"namespace": self._settings.namespace, "lifetime": "detached", "get_if_exists": True}
        actor = ray.remote(JournalActor).options(name=JOURNAL, scheduling_strategy=here, **options, **RESTARTED)
        return actor.remote(self._settings)

    async def _work(self, supervision: Supervision) -> None:
        try:
            await supervision.run()
        except LeaseHeld as error:
            self._lost = error
            await self._end_loops()

    async def _watch_journal(self, journal: Any) -> None:
        """A frozen journal stops the whole store: kill it, and Ray starts another."""
        heard_at = time.monotonic()
        while True:
            await asyncio.sleep(self._settings.ping_s)
            if await within(self._settings.ping_s, journal.ping.remote()):
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > self._settings.hung_s:
                lease = await self._event_log.lease(JOURNAL)
                if lease and lease.boot_id == boot_id():
                    await asyncio.to_thread(kill_process, lease.pid, lease.pid_started)
                heard_at = time.monotonic()

    async def exchange(
        self, client: str, incarnation: str | None, requests: Sequence[Numbered], done: Sequence[int]
    ) -> Reply:
        _, desk = await self._ready()
        return await desk.exchange(client, incarnation, requests, done)

    async def status(self) -> dict[str, Any]:
        supervision, _ = await self._ready()
        return supervision.status()

    async def release(self) -> None:
        """Stop admitting and watching, and give the lease back; runs in flight stay as they are in the store."""
        if self._starting and self._starting.done() and not self._starting.exception():
            await self._end_loops()
            await self._event_log.drop_lease(SUPERVISOR, self._nonce)

    async def _end_loops(self) -> None:
        self._door.close()
        if self._socket:
            self._socket.close()
        for loop in self._loops:
            if loop is not asyncio.current_task():
                loop.cancel()
