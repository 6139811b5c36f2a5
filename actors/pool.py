"""The pool of run actors: started ahead of need, reused from run to run, replaced when they die.

Starting a Ray actor costs up to a second of CPU, binding a run to a warm one about a millisecond. An actor serves
one version of an agent's code. Its death, or its silence, is one verdict that everything waiting on it gets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal
from uuid import uuid4

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, OutOfMemoryError, RayActorError, RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..store.events import AgentRef
from .bodies import MORTAL, Identity, RunActor
from .courier import Courier
from .kernel import boot_id, kill_process
from .ray_tasks import code_env, journal_handle, living_nodes
from .requests import Ended, Settings, Start
from .wire import Wire, exchanges, socket_path

log = logging.getLogger(__name__)
PREFIX = "run-"
APART, PLAIN = "apart", "plain"
"""In an actor's name, behind the version of the code that it serves: the kind of worker that it runs in."""
ADOPTION_S = 3.0
LOOK_S = 1.0
SPARES = 1
"""Idle actors kept above need, so that a respawn finds a warm one."""


class MemberDied(Exception):
    """A run actor's death as one of its runs sees it. `companions` counts the runs that were on the actor."""

    def __init__(self, reason: Literal["respawn", "hung", "node_lost"], companions: int) -> None:
        super().__init__(reason)
        self.reason, self.companions = reason, companions


class Member:
    """One run actor."""

    def __init__(self, store: str, name: str, handle: Any, node: str = "") -> None:
        self.name, self.handle, self.node = name, handle, node
        _, self.digest, workers, _ = name.split("-")
        self.apart = workers == APART
        self.runs: dict[str, int] = {}
        """Run ids, each with the number of runs that it may share an actor with."""
        self.identity: Identity | None = None
        """Known once the actor has answered: it is warm then."""
        self.heard_at = time.monotonic()
        self.verdict: asyncio.Future[MemberDied] = asyncio.get_running_loop().create_future()
        self._wire = Wire(socket_path(store, name))
        self._courier = Courier(exchanges(self._wire, lambda: handle), lost=_is_verdict)

    async def ask(self, start: Start) -> Ended:
        """Have a run driven to its end. Raises MemberDied."""
        answer = self._courier.ask(start)
        both: set[asyncio.Future[Any]] = {answer, self.verdict}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not self.verdict.done():
            error = answer.exception()
            if error is None:
                ended: Ended = answer.result()
                return ended
            if not isinstance(error, RayError):
                raise error
            self.pass_verdict(await self.cause(error))
        raise self.verdict.result()

    async def meet(self) -> None:
        """Learn who the actor is, as soon as it has started."""
        self.identity = await self.handle.ping.remote()
        self.node = self.identity[3]

    async def cause(self, error: RayError) -> Literal["respawn", "node_lost"]:
        """What an actor died of; where it is the node, its runs are not to blame."""
        return "node_lost" if isinstance(error, ActorUnschedulableError) or await self.node_is_gone() else "respawn"

    async def node_is_gone(self) -> bool:
        return bool(self.node) and self.node not in await asyncio.to_thread(living_nodes)

    def pass_verdict(self, reason: Literal["respawn", "hung", "node_lost"]) -> None:
        """Declare the actor dead, once; every run on it learns of it and of how many they were."""
        if not self.verdict.done():
            self.verdict.set_result(MemberDied(reason, len(self.runs)))
            self._courier.close()
            self._wire.close()

    def fits(self, companions_max: int) -> bool:
        """Whether one more run may come, that puts up with so many on the actor, itself included."""
        return len(self.runs) + 1 <= min([companions_max, *self.runs.values()])


def _is_verdict(error: Exception) -> bool:
    dead = isinstance(error, (RayActorError, ActorUnschedulableError, OutOfMemoryError))
    return dead and not isinstance(error, ActorUnavailableError)


class Pool:
    """All run actors of one supervisor."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._members: dict[str, Member] = {}
        self._changed = asyncio.Event()
        self._meetings: set[asyncio.Task[None]] = set()
        self._boot = boot_id()
        self._dead = 0
        self._plain = ""
        """The version of code that the cluster's plain workers serve."""

    # -- runs ---------------------------------------------------------------------------------------------

    async def take(self, run_id: str, agent: AgentRef, companions_max: int, urgent: bool = False) -> Member:
        """An actor for a run, with the run on it; waits for room.

        A run that is admitted gets an actor to itself up to the pool's bound: an idle one, else a new one; beyond
        that the least loaded. An `urgent` one has lost its actor in mid-work: it goes to the least loaded actor that
        is warm, shared or not, since a new one takes a second to start; what it left crowded is made up for behind
        its back, for the runs that come next.
        """
        while True:
            self._changed.clear()
            member = self._choose(agent, companions_max, urgent)
            if member is None:
                await self._changed.wait()
                continue
            if member.runs and urgent and len(self._members) < self._settings.actors:
                self.spawn(agent)
            member.runs[run_id] = companions_max
            self._keep_spares(agent)
            return member

    def join(self, member: Member, run_id: str) -> None:
        """Note a run that an adopted actor drives already."""
        member.runs[run_id] = self._settings.concurrency

    def leave(self, member: Member, run_id: str) -> None:
        member.runs.pop(run_id, None)
        self._changed.set()

    async def look(self, run_id: str, epoch: int) -> bool:
        """Have the owner of a run look at its log; whether it could be told."""
        member = next((m for m in self._members.values() if run_id in m.runs), None)
        if member is None:
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                return bool(await member.handle.look.remote(run_id, epoch))
        except (RayError, TimeoutError) as error:
            log.info("run %s: its owner could not be told to look: %s", run_id, error)
            return False

    def _choose(self, agent: AgentRef, companions_max: int, urgent: bool) -> Member | None:
        ours = [m for m in self._members.values() if m.digest == agent.digest and m.fits(companions_max)]
        if urgent and (warm := [m for m in ours if m.identity]):
            return min(warm, key=lambda m: len(m.runs))
        best = min(ours, key=lambda m: (len(m.runs), m.identity is None), default=None)
        if best and not best.runs:
            return best
        if self._room(agent) or (best is None and companions_max == 1):
            return self.spawn(agent)
        return best

    def _room(self, agent: AgentRef) -> bool:
        """Whether one more actor may be started; retires an idle one of another version if that makes room."""
        if len(self._members) < self._settings.actors:
            return True
        idle = [m for m in self._members.values() if m.digest != agent.digest and not m.runs]
        for member in idle[:1]:
            self.retire(member)
        return bool(idle)

    def _keep_spares(self, agent: AgentRef) -> None:
        ours = [m for m in self._members.values() if m.digest == agent.digest]
        idle = sum(not m.runs for m in ours)
        warm = any(m.identity for m in ours)
        if idle < SPARES and warm and len(self._members) < self._settings.actors + SPARES:
            self.spawn(agent)

    def warm(self, agent: AgentRef, count: int) -> None:
        """Start actors and workers for their tools ahead of need, up to `count` and the pool's bound."""
        self._warm_tools(agent, count)
        have = sum(m.digest == agent.digest for m in self._members.values())
        for _ in range(min(count, self._settings.actors + SPARES) - have):
            if len(self._members) < self._settings.actors + SPARES:
                self.spawn(agent)

    # -- actors -------------------------------------------------------------------------------------------

    def spawn(self, agent: AgentRef) -> Member:
        """Start an actor for this version of an agent, on the living node that has the fewest.

        Ray takes a soft affinity for a hint that it often passes over; a node that dies meanwhile is a verdict.
        """
        if all(m.digest != agent.digest for m in self._members.values()):
            self._warm_tools(agent, 1)
        apart, node = self._apart(agent), self._node()
        name = f"{PREFIX}{agent.digest}-{APART if apart else PLAIN}-{uuid4().hex[:8]}"
        handle = (
            ray.remote(RunActor)
            .options(
                name=name,
                namespace=self._settings.namespace,
                lifetime="detached",
                runtime_env=code_env(agent, apart),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                **MORTAL,
            )
            .remote(self._settings.namespace, agent)
        )
        member = self._add(Member(self._settings.name, name, handle, node))
        meeting = asyncio.create_task(self._meet(member))
        self._meetings.add(meeting)
        meeting.add_done_callback(self._meetings.discard)
        return member

    def _warm_tools(self, agent: AgentRef, count: int) -> None:
        journal_handle(self._settings.namespace).warm.remote(agent, self._apart(agent), count)

    def _apart(self, agent: AgentRef) -> bool:
        """Whether this version of code needs workers of its own: the first one that we meet does not."""
        self._plain = self._plain or agent.digest
        return agent.digest != self._plain

    async def _meet(self, member: Member) -> None:
        """Find out at once that an actor is warm; if it dies instead, whoever waits on it learns of that by itself."""
        with suppress(RayError):
            await member.meet()
            self._changed.set()

    def _add(self, member: Member) -> Member:
        self._members[member.name] = member
        member.verdict.add_done_callback(lambda _: self._remove(member))
        return member

    def _remove(self, member: Member) -> None:
        """Take a dead actor out; a lost node has taken its other actors with it, whether they have told or not."""
        self._members.pop(member.name, None)
        self._dead += 1
        self._changed.set()
        if member.node and member.verdict.result().reason == "node_lost":
            for other in [m for m in self._members.values() if m.node == member.node]:
                other.pass_verdict("node_lost")

    def retire(self, member: Member) -> None:
        """End an actor that has no run."""
        member.pass_verdict("respawn")
        self._dead -= 1
        ray.kill(member.handle)

    def _node(self) -> str:
        nodes = dict.fromkeys(living_nodes(), 0)
        for member in self._members.values():
            if member.node in nodes:
                nodes[member.node] += 1
        here: str = ray.get_runtime_context().get_node_id()
        return min(nodes, key=lambda node: (nodes[node], node != here), default=here)

    async def adopt(self) -> list[tuple[Member, Sequence[tuple[str, int]]]]:
        """The living run actors that an earlier supervisor started, with the (run, epoch) that each drives.

        One that does not answer soon is kept under watch: pings find out whether it is starting or hung.
        """
        named = list_named_actors(all_namespaces=True)
        names = [entry["name"] for entry in named if entry["namespace"] == self._settings.namespace]
        found = await asyncio.gather(*(self._adopt(name) for name in names if name.startswith(PREFIX)))
        return [adopted for adopted in found if adopted]

    async def _adopt(self, name: str) -> tuple[Member, Sequence[tuple[str, int]]] | None:
        try:
            handle = ray.get_actor(name, self._settings.namespace)
        except ValueError as error:
            log.info("actor %s is gone: %s", name, error)
            return None
        member = Member(self._settings.name, name, handle)
        if not member.apart:
            self._plain = self._plain or member.digest
        try:
            async with asyncio.timeout(ADOPTION_S):
                held = await handle.held.remote()
                await member.meet()
        except (RayError, TimeoutError) as error:
            if isinstance(error, RayError) and _is_verdict(error):
                return None
            held = []
        return self._add(member), held

    # -- liveness -----------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Ping every actor for ever; silence beyond hung_s, and death, are verdicts."""
        while True:
            await asyncio.gather(*(self._ping(member) for member in list(self._members.values())))
            await asyncio.sleep(self._settings.ping_s)

    async def _ping(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self._settings.ping_s):
                await member.meet()
            member.heard_at = time.monotonic()
            return
        except TimeoutError:  # how long it has been silent decides, below, where it may still be heard
            if await member.node_is_gone():
                member.pass_verdict("node_lost")
                return
        except RayError as error:
            if _is_verdict(error):
                member.pass_verdict(await member.cause(error))
                return
        silent_s = time.monotonic() - member.heard_at
        if silent_s > self._settings.hung_s * (1 if member.identity else 4):
            idle = not member.runs
            member.pass_verdict("hung")
            if idle:  # else whoever claims its runs buries it, after the claim
                await self.bury(member)

    async def bury(self, member: Member) -> None:
        """End what may be left of an actor that was declared dead."""
        try:
            ray.kill(member.handle)
        except RayError as error:
            log.info("actor %s was gone already: %s", member.name, error)
        if member.identity and member.identity[2] == self._boot:
            await asyncio.to_thread(kill_process, member.identity[0], member.identity[1])

    def status(self) -> dict[str, Any]:
        """Figures for people."""
        loads = [len(m.runs) for m in self._members.values()]
        warm = sum(m.identity is not None for m in self._members.values())
        return {"actors": len(loads), "warm": warm, "idle": loads.count(0), "died": self._dead}
