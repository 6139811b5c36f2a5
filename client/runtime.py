"""The Runtime: durable runs from Python.

    async with Runtime("runs.db") as runtime:
        run = await runtime.launch("agents.py:support", "Refund order 17")
        outcome = await run.outcome()

A run id is handed out only after the run is durable. Leaving the block stops the processes, not the runs: whatever
is unfinished goes on when a Runtime is next started on the same store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self

from pydantic import JsonValue

from ..actors.children import end_marked
from ..actors.courier import Courier
from ..actors.leftovers import sweep_locks
from ..actors.loading import LoadedAgent
from ..actors.requests import Await, Ended, Launch, Nudge, Settings, Warm
from ..actors.wire import Wire, exchanges, socket_path
from ..store.budgets import Budget
from ..store.engine import DEFAULT_STORE, target
from ..store.errors import NotFound, UsageError
from ..store.events import Settlement, Stored
from ..store.log import Create, Refused
from ..store.sql import SqlLog, open_log
from ..store.states import LIVE
from . import cancel, decisions
from .budgets import cap_budget, caps_of, find_budget
from .cancel import Cancelled, Certificate
from .cluster import Cluster, namespace_digest, remove_actors, store_url
from .launching import Request, check_agent, check_keys, create
from .lease import wait_for_lease
from .outcomes import Outcome, follow, outcome_of_row
from .questions import Question, questions
from .requeue import requeue

NOT_ENTERED = "this Runtime is not at work: use it inside of `async with Runtime(...) as runtime:`"


class Run:
    """A run that was launched, resumed or decided about."""

    def __init__(self, runtime: Runtime, run_id: str, ended: asyncio.Future[Ended]) -> None:
        self._runtime, self.run_id, self._ended = runtime, run_id, ended

    async def outcome(self) -> Outcome:
        """Wait until the run ends, or waits for a person."""
        return Outcome.of(await asyncio.shield(self._ended))

    async def events(self, after: int = 0) -> AsyncIterator[Stored]:
        """The run's events as they become durable, until the run ends or waits for a person."""
        async for stored in follow(self._runtime.log, self.run_id, after):
            yield stored


class Runtime:
    """A supervisor over one store, on a local cluster of its own or on the one at `address`.

    actors: bound of the pool of run actors, default twice the CPUs. concurrency: bound of the live runs, default
    `actors`; above it, runs share actors evenly. standing: leave the supervisor at work when the block ends.

    A Runtime is entered once and belongs to the event loop that enters it. A process has one at a time.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] = DEFAULT_STORE,
        *,
        address: str | None = None,
        actors: int | None = None,
        concurrency: int | None = None,
        num_cpus: int | None = None,
        standing: bool = False,
    ) -> None:
        for name, value in (("actors", actors), ("concurrency", concurrency), ("num_cpus", num_cpus)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: it must be at least 1")
        self._store = store_url(store)
        actors = actors or concurrency or 2 * (os.cpu_count() or 1)
        self.settings = Settings(
            self._store, namespace_digest(self._store), actors=actors, concurrency=concurrency or actors
        )
        self._cluster, self._standing = Cluster(address, num_cpus), standing
        self._supervisor: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._courier: Courier | None = None
        self._log: SqlLog | None = None

    @property
    def log(self) -> SqlLog:
        """The store, as long as this Runtime is entered."""
        if self._log is None:
            raise UsageError(NOT_ENTERED)
        return self._log

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise UsageError("a Runtime is entered once: make another one")
        self._loop = asyncio.get_running_loop()
        self._log = await open_log(self._store)
        try:
            if self._cluster.address is None:
                await wait_for_lease(self._log)
            await _finished(asyncio.to_thread(self._connect))
            if why := await self._supervisor.start.remote():
                raise UsageError(why)
        except BaseException:
            await self._leave()
            raise
        self._courier = Courier(exchanges(self._wire, lambda: self._supervisor))
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._courier:
            self._courier.close()
            self._courier = None
            self._wire.close()
        if self._standing:
            await self._leave()
            return
        try:
            async with asyncio.timeout(5):
                await self._supervisor.release.remote()
        except TimeoutError:
            pass  # its lease runs out by itself
        finally:
            if self._cluster.address is not None:
                await _finished(asyncio.to_thread(remove_actors, self.settings.namespace))
            await self._leave()

    async def _leave(self) -> None:
        await _finished(asyncio.to_thread(self._cluster.stop))
        event_log, self._log = self._log, None
        if event_log:
            if self._cluster.address is None:
                await _finished(asyncio.to_thread(end_marked, self.settings.name))
                await sweep_locks(event_log, self.settings.name)
            await event_log.close()

    def _ask(self, payload: Any) -> asyncio.Future[Any]:
        """The supervisor's answer. Raises UsageError where this Runtime does not work."""
        if self._courier is None:
            raise UsageError(NOT_ENTERED)
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError("this Runtime belongs to another event loop: make one for each")
        return self._courier.ask(payload)

    async def check(self) -> None:
        """Raises PerdureError when nobody works on the store; this Runtime does until it is left."""

    def kill(self) -> None:
        """End the processes of a local cluster at once. The runs stay as they are in the store."""
        self._cluster.kill()

    def _connect(self) -> None:
        ray = self._cluster.start()
        from ..actors.bodies import RESTARTED
        from ..supervisor import SUPERVISOR, SupervisorActor

        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        actor = ray.remote(SupervisorActor).options(
            name=SUPERVISOR,
            namespace=self.settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=here,
            **RESTARTED,
        )
        self._supervisor = actor.remote(self.settings)
        self._wire = Wire(socket_path(self.settings.name, SUPERVISOR))

    # -- runs ---------------------------------------------------------------------------------------------

    async def launch(
        self,
        agent: str,
        input: JsonValue,
        *,
        model: str | None = None,
        limits: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Run:
        """Launch one run of the agent `module:name` or `path/file.py:name`. Raises UsageError.

        `limits` are fields of Limits that override the agent's. `options` are fields of Request: run_id, batch, budget,
        sample, priority, correlation_id, metadata.
        """
        loaded = check_agent(agent, model)
        if self._cluster.address is None:
            check_keys(loaded, model)
        return (await self.launch_many(loaded, [Request(input, **options)], model=model, limits=limits))[0]

    async def launch_many(
        self,
        loaded: LoadedAgent,
        requests: Sequence[Request],
        *,
        model: str | None = None,
        limits: Mapping[str, object] | None = None,
    ) -> list[Run]:
        """Launch runs of one agent, all durable when this returns. A run that exists already is left as it is."""
        shared = {request.budget for request in requests if request.budget is not None}
        priced = any([(await find_budget(self.log, name)).cap.cost is not None for name in shared])
        config = await asyncio.to_thread(loaded.agent.snapshot, model, limits, priced)
        created = asyncio.ensure_future(self.create([create(loaded, request, config) for request in requests]))
        await asyncio.sleep(0)
        runs = [self._run(request.run_id) for request in requests]  # asked for in the same call
        await created
        return runs

    def _run(self, run_id: str) -> Run:
        return Run(self, run_id, self._ask(Await(run_id)))

    async def create(self, creates: Sequence[Create]) -> None:
        """Create runs, all durable when this returns. A run that exists already is left as it is."""
        for verdict in await self._ask(Launch(tuple(creates))):
            if isinstance(verdict, Refused) and verdict.reason != "exists":
                raise verdict

    async def nudge(self, run_ids: Iterable[str] = ()) -> None:
        """Have the supervisor look at the store now; these runs were requeued."""
        await self._ask(Nudge(tuple(run_ids)))

    async def warm(self, loaded: LoadedAgent, count: int) -> None:
        """Start run actors for an agent ahead of need."""
        await self._ask(Warm(loaded.ref, count))

    async def outcome(self, run_id: str) -> Outcome:
        """Wait until a run ends, or waits for a person. Raises NotFound."""
        row = await self.log.run(run_id)
        if row is None:
            raise NotFound(f"no run {run_id} in {target(self._store).name}")
        if row.status in LIVE:
            return await self._run(run_id).outcome()
        return await outcome_of_row(self.log, row)

    async def resume(self, run_ids: Iterable[str], *, limits: Mapping[str, object] | None = None) -> list[Run]:
        """Requeue failed, cancelled and timed out runs; those that are live go on by themselves.

        `limits` are fields of Limits, raised from here on, or None where they are lifted: what is spent and counted
        stays. Raises UsageError: for a run that is completed, and for a limit that would be lower than it is.
        """
        rows = [await requeue(self.log, run_id, "python", limits) for run_id in run_ids]
        await self.nudge(row.run_id for row in rows)
        return [self._run(row.run_id) for row in rows]

    async def budget(self, name: str, **caps: object) -> Budget:
        """A budget that runs share, once its caps are changed to `tokens` and `cost` as far as they are given; None
        lifts one. With caps it is made if there is none, else NotFound is raised. Raises UsageError."""
        if caps:
            return await cap_budget(self.log, name, caps_of(caps))
        return await find_budget(self.log, name)

    async def status(self) -> dict[str, Any]:
        """Figures of the supervisor."""
        figures: dict[str, Any] = await self._supervisor.status.remote()
        return figures

    # -- decisions ----------------------------------------------------------------------------------------

    async def questions(self, run_id: str) -> list[Question]:
        """What a run asks people: its open questions, in order of request. Raises NotFound."""
        return await questions(self.log, run_id)

    async def approve(
        self,
        run_id: str,
        call: str | None = None,
        *,
        arguments: Mapping[str, JsonValue] | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> Run:
        """Let a call run, with `arguments` in place of the model's if there are any; the run, which goes on.

        `call` may be left out where one approval is open; `by` defaults to USER@HOST. The decision is durable when
        this returns. Raises UsageError, which says how a question that is not open any more was decided.
        """
        await decisions.approve(self.log, run_id, call, arguments=arguments, by=by, reason=reason)
        return await self._goes_on(run_id)

    async def reject(self, run_id: str, call: str | None = None, *, reason: str, by: str | None = None) -> Run:
        """Have a call not run; the model is told the reason. The rest as for `approve`."""
        await decisions.reject(self.log, run_id, call, reason=reason, by=by)
        return await self._goes_on(run_id)

    async def settle(
        self,
        run_id: str,
        outcome: Settlement,
        call: str | None = None,
        *,
        result: JsonValue = None,
        by: str | None = None,
        reason: str = "",
    ) -> Run:
        """Say what became of an interrupted attempt: it "happened", with this result; it did "not_happened", so the
        call is executed again; or "abandon" it, to an error result. The rest as for `approve`."""
        await decisions.settle(self.log, run_id, outcome, call, result=result, by=by, reason=reason)
        return await self._goes_on(run_id)

    async def cancel(self, run_id: str, *, reason: str = "", by: str | None = None) -> Cancelled:
        """Cancel a run, durable when this returns; what that came to. `outcome` waits for one that is being cancelled,
        `certificate` then says what became of its calls. `by` defaults to USER@HOST. Raises NotFound."""
        (told,) = await cancel.cancel(self.log, [run_id], reason=reason, by=by)
        await self.nudge()
        return told

    async def certificate(self, run_id: str) -> Certificate:
        """What became of a run's calls when it was last cancelled, and of its processes. Raises NotFound."""
        return await cancel.certificate(self.log, run_id)

    async def _goes_on(self, run_id: str) -> Run:
        await self.nudge([run_id])
        return self._run(run_id)


def run(
    agent: str,
    input: JsonValue,
    *,
    store: str | os.PathLike[str] = DEFAULT_STORE,
    model: str | None = None,
    address: str | None = None,
    **options: Any,
) -> Outcome:
    """Launch one run and wait for its outcome, in a program without an event loop. Raises UsageError.

    `options` are those of `Runtime.launch`: limits, and fields of Request.
    """
    if _in_a_loop():
        raise UsageError("perdure.run() waits, and here an event loop is running: use `async with Runtime(...)`")

    async def launch_and_wait() -> Outcome:
        async with Runtime(store, address=address) as runtime:
            launched = await runtime.launch(agent, input, model=model, **options)
            return await launched.outcome()

    return asyncio.run(launch_and_wait())


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _finished(work: Coroutine[Any, Any, object]) -> None:
    """Await work that nothing may overtake: a cancelled caller goes on only when it is done."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


__all__ = ["Outcome", "Run", "Runtime", "run"]
