"""Tool tasks on Ray: one task per attempt, owned by the journal's process.

Ray's own retries are off: a repeated task would be a second effect that nobody recorded. What Ray cannot be
relied on for is watched here: a task on a node that froze or vanished may never resolve at its owner, so an
attempt is given up when its node is gone or its hard deadline has passed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    RuntimeEnvSetupError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..store.errors import UsageError
from ..store.events import AgentRef, ToolCallStarted
from ..store.rows import CallRow
from .attempt import GRACE_S, Outcome, Work, perform
from .children import Named, adopt_orphans, end_marked, end_these, look, mark_of, trees
from .kernel import boot_id, process_started, prove_dead
from .loading import loaded
from .proof import Looked
from .pursuit import CLOCK_MARGIN_S, TaskDied
from .stopping import forget, tell, tell_again
from .tools import ToolOptions
from .wire import BlockingWire, Unreachable, socket_path

log = logging.getLogger(__name__)
JOURNAL = "journal"
NODES_EVERY_S = 1.0
PROOF_TIMEOUT_S = 10.0


def code_env(agent: AgentRef, apart: bool) -> dict[str, Any]:
    """The runtime environment of processes for this version of an agent's code.

    Modules stay loaded, so a process serves one version. The first one that a supervisor meets uses the cluster's
    plain workers, of which Ray has some at hand; any other one gets workers `apart`, which take twice as long to start.
    """
    if not apart:
        return {}
    path = [agent.root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"env_vars": {"PERDURE_CODE": agent.digest, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}}


def bind_process(agent: AgentRef) -> None:
    """Have this process serve one version of an agent's code for good. One that served another ends itself: only a
    plain worker can be met with that, when a new supervisor has chosen another version for them."""
    if os.environ.setdefault("PERDURE_CODE", agent.digest) != agent.digest:
        os._exit(0)
    if agent.root and agent.root not in sys.path:
        sys.path.insert(1, agent.root)


@functools.lru_cache(maxsize=4)
def journal_handle(namespace: str) -> Any:
    """The journal's actor; the handle outlives its restarts."""
    return ray.get_actor(JOURNAL, namespace)


@functools.lru_cache(maxsize=4)
def journal_wire(store: str) -> BlockingWire:
    """This process's line to the journal, if that is on this machine."""
    return BlockingWire(socket_path(store, JOURNAL))


@ray.remote(max_retries=0)
def attempt(work: bytes, namespace: str) -> bytes:
    """The task of one attempt. Takes and returns JSON."""
    node = ray.get_runtime_context().get_node_id()
    what = Work.model_validate_json(work)
    bind_process(what.agent)
    adopt_orphans()
    if what.probe:
        journal_handle(namespace).probing.remote(what.run_id, what.tool_call_id, node, os.getpid())

    def asked(method: str, *arguments: Any) -> Any:
        try:
            return journal_wire(what.store).call(method, *arguments)
        except Unreachable:
            answer: Any = getattr(journal_handle(namespace), method).remote(*arguments)
            # not ray.get: it would give this task's CPU back meanwhile, and Ray would start another worker on it
            return answer.future().result()

    def begin(mark: ToolCallStarted | None) -> str | None:
        refusal: str | None = asked("begin", what.run_id, what.tool_call_id, what.attempt, node, os.getpid(), mark)
        return refusal

    def keep(digest: str, part: int, data: bytes) -> None:
        asked("keep", digest, part, data)

    return perform(what, begin, node, keep).model_dump_json().encode()


@ray.remote(max_retries=0)
def warm_up(agent: AgentRef | None, namespace: str) -> None:
    """Have a worker process load what attempts need, and their agent. What is wrong with the agent, its runs tell."""
    if agent:
        bind_process(agent)
        with suppress(UsageError):
            loaded(agent.ref, agent.digest)
    journal_handle(namespace)


@ray.remote(max_retries=0, num_cpus=0)
def on_node(work: Callable[..., Any], *arguments: Any) -> Any:
    """Something that has to be done on the node where an attempt ran."""
    return work(*arguments)


def prove_over(lock: str, mark: str) -> bool:
    """The proof of death, of an attempt and of what it has started; blocks for some seconds."""
    return prove_dead(lock) and end_marked(mark)


@dataclass
class _Flying:
    ref: Any
    work: Work
    lost: asyncio.Future[TaskDied] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    node: str = ""
    pid: int = 0
    told: bool = False
    """It was given the signal to stop."""
    killed: bool = False
    seen: bool = False
    """It ran when it was looked at."""
    below: list[Named] = field(default_factory=list)
    """What ran below it when it was seen last, on this machine."""
    over_at: float = float("inf")
    """Monotonic time after which the attempt cannot be alive."""
    hold_s: float = 0.0
    dead: bool = False
    """Its process was seen to be gone; its result may still be on the way."""

    def describe(self, death: TaskDied) -> None:
        """Say of its end where it had begun, and whether its time was over."""
        if self.pid:
            death.node, death.pid = self.node, self.pid
            left_s = self.over_at - time.monotonic()
            death.ran_s = self.hold_s - left_s
            # its own deadline comes CLOCK_MARGIN_S before `over_at`, or a little sooner
            death.timed_out = death.charged and left_s < CLOCK_MARGIN_S + GRACE_S / 2

    def give_up(self, why: str, charged: bool = False) -> None:
        if not self.lost.done():
            self.lost.set_result(TaskDied(why, charged))


class RayTasks:
    """`Tasks` on Ray."""

    def __init__(self, namespace: str) -> None:
        self._namespace, self._boot = namespace, boot_id()
        self._flying: dict[tuple[str, str], _Flying] = {}
        self._functions: dict[Any, Any] = {}
        self._here = {""}
        """Nodes on this machine, as far as it was asked."""

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        key = (work.run_id, work.tool_call_id)
        ref = self._function(work.agent, options, work.apart).remote(work.model_dump_json().encode(), self._namespace)
        flying = self._flying[key] = _Flying(ref, work, hold_s=options.timeout_s + GRACE_S + CLOCK_MARGIN_S)
        try:
            return await self._outcome(flying)
        except TaskDied as death:
            flying.describe(death)
            await asyncio.to_thread(end_these, flying.below)
            if flying.node or work.probe:
                await self.end_children(_mark(work), [flying.node])
            raise
        finally:
            if flying.told and self._is_here(flying.node):
                forget(*_who(work))
            if self._flying.get(key) is flying:
                del self._flying[key]

    async def _outcome(self, flying: _Flying) -> Outcome:
        try:
            answer = asyncio.ensure_future(_value(flying.ref))
            both: set[asyncio.Future[Any]] = {answer, flying.lost}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                raise flying.lost.result()
            outcome = Outcome.model_validate_json(answer.result())
        except (NodeDiedError, RuntimeEnvSetupError) as error:
            raise TaskDied(_text(error), charged=not isinstance(error, NodeDiedError)) from error
        except OutOfMemoryError as error:
            raise TaskDied("out of memory: " + _text(error)) from error
        except WorkerCrashedError as error:
            raise TaskDied("the process exited, crashed or was killed") from error
        except TaskCancelledError as error:
            raise TaskDied("it was killed") from error
        except RayError as error:
            raise TaskDied(_text(error)) from error
        if flying.killed:  # Ray kills the children first, and a handler that waits for one then returns as if it ended
            raise TaskDied("it was killed")
        return outcome

    def warm(self, agent: AgentRef | None, apart: bool, count: int) -> None:
        """Start workers for the tools of an agent, or of any, ahead of need, one for each CPU at most.

        It has to be the journal: a worker serves the tasks of one detached actor, and ends with it.
        """
        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        cpus = int(total.get("CPU", 1))
        for _ in range(min(count, cpus)):
            warm_up.options(runtime_env=code_env(agent, apart) if agent else {}).remote(agent, self._namespace)

    def _function(self, agent: AgentRef, options: ToolOptions, apart: bool) -> Any:
        resources = tuple(sorted((options.resources or {}).items()))
        key = (agent, apart, options.num_cpus, options.memory, resources)
        if key not in self._functions:
            self._functions[key] = attempt.options(
                num_cpus=options.num_cpus,
                memory=options.memory,
                resources=options.resources,
                runtime_env=code_env(agent, apart),
            )
        return self._functions[key]

    def begun(self, run_id: str, tool_call_id: str, attempt: int, node: str, pid: int) -> None:
        flying = self._flying.get((run_id, tool_call_id))
        if flying and attempt == (0 if flying.work.probe else flying.work.attempt):
            flying.node, flying.pid, flying.over_at = node, pid, time.monotonic() + flying.hold_s

    async def stop(self, run_id: str, tool_call_id: str) -> None:
        flying = self._flying.get((run_id, tool_call_id))
        if flying is None or not flying.pid or flying.work.probe:
            return
        how, flying.told = tell_again if flying.told else tell, True
        await self._on_node(flying.node, how, *_who(flying.work), flying.pid)

    def kill(self, run_id: str, tool_call_id: str) -> None:
        flying = self._flying.get((run_id, tool_call_id))
        if flying is None:
            return
        flying.killed = True
        if flying.pid and self._is_here(flying.node):
            flying.below = trees({flying.pid: _mark(flying.work)})[flying.pid]
        ray.cancel(flying.ref, force=True)

    async def prove_dead(self, call: CallRow) -> bool:
        mark = mark_of(Path(call.lock).parent.name, call.run_id, call.tool_call_id, call.started_attempt)
        if call.boot_id == self._boot:
            return await asyncio.to_thread(prove_over, call.lock, mark)
        return bool(await self._on_node(call.node, prove_over, call.lock, mark))

    async def end_children(self, wanted: str, nodes: Collection[str]) -> None:
        for node in nodes:
            if await self._on_node(node, end_marked, wanted) is False:
                log.warning("processes of %s on node %s resist", wanted, node)

    async def look(self, store: str, everywhere: bool = True) -> list[Looked]:
        living = sorted(await asyncio.to_thread(living_nodes))
        here = [node for node in living if self._is_here(node)]
        places = [here or [_own_node()], *([node] for node in living if everywhere and node not in here)]
        answers = await asyncio.gather(*(self._on_node(nodes[0], look, store) for nodes in places))
        both = zip(places, answers, strict=True)
        return [Looked(answer[0], tuple(nodes), tuple(answer[1])) for nodes, answer in both if answer is not None]

    async def end(self, node: str, processes: Sequence[Named]) -> None:
        await self._on_node(node, end_these, processes)

    def _is_here(self, node: str) -> bool:
        """Whether a node is on this machine, though Ray may have lost it."""
        if node not in self._here:
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            where, own = {each["NodeID"]: each["NodeManagerAddress"] for each in nodes}, _own_node()
            self._here = {"", own, *(other for other, address in where.items() if address == where.get(own))}
        return node in self._here

    async def _on_node(self, node: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do it on that node, with what it returns. None where the node is gone or does not answer."""
        if self._is_here(node):
            return await asyncio.to_thread(work, *arguments)
        if node not in await asyncio.to_thread(living_nodes):
            return None
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                return await on_node.options(scheduling_strategy=there).remote(work, *arguments)
        except (RayError, TimeoutError) as error:
            log.warning("no answer from node %s: %s", node, error)
            return None

    async def watch(self) -> None:
        """Give up attempts whose node is gone, whose deadline has passed, or whose process has died; for ever.

        Ray does not notice the death of a worker as long as a process that it has forked holds its connections.
        """
        while True:
            await asyncio.sleep(NODES_EVERY_S)
            placed = [flying for flying in self._flying.values() if flying.node and not flying.lost.done()]
            if not placed:
                continue
            alive = await asyncio.to_thread(living_nodes)
            await self._note_what_is_below(placed)
            for flying in placed:
                if flying.node not in alive:
                    flying.give_up("its node was lost")
                elif time.monotonic() > flying.over_at:
                    flying.give_up("its hard deadline has passed", charged=True)
                elif flying.pid and self._is_here(flying.node) and not process_started(flying.pid):
                    if flying.dead:
                        flying.give_up("the process exited, crashed or was killed", charged=True)
                    flying.dead = True

    async def _note_what_is_below(self, placed: Sequence[_Flying]) -> None:
        """What clears its environment is found in no other way once its worker is killed from outside. What is over by
        the second look costs nothing."""
        here = {flying.pid: flying for flying in placed if flying.seen and flying.pid and self._is_here(flying.node)}
        for flying in placed:
            flying.seen = True
        if not here:
            return
        found = await asyncio.to_thread(trees, {pid: _mark(flying.work) for pid, flying in here.items()})
        for pid, flying in here.items():
            if process_started(pid):
                flying.below = found[pid]


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _who(work: Work) -> tuple[str, str, str, int]:
    return work.store, work.run_id, work.tool_call_id, work.attempt


def _mark(work: Work) -> str:
    return mark_of(*_who(work))


async def _value(ref: Any) -> bytes:
    answer: bytes = await ref
    return answer


def living_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray holds for alive."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return frozenset(node["NodeID"] for node in nodes if node["Alive"])


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]
