"""Seeing one open call through to its result. What follows the end of each attempt is judged in `judgement.py`.

A probe is asked once the attempt is proven dead; "it happened" counts at once, "it did not" only when the tool's
settling time has passed since the proof, for a request under way may land until then. Each asking is recorded. Where
nobody can tell, or the agent's code has no place for the call any more, it is unsettled and a person is asked. A call
that a person has approved has no attempt yet: its first one is opened like any further one, so that no two tasks ever
have the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol
from uuid import uuid4

from pydantic import JsonValue

from ..store.events import (
    AgentRef,
    Fate,
    ToolCallProbed,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallUnsettled,
    ToolEvidence,
    ToolResult,
)
from ..store.log import Accepted, Answer, Command, EventLog, Probed, Refused, Result, Retry, Unsettle
from ..store.rows import CallRow, Clock
from .attempt import Outcome, Work
from .children import mark_of
from .judgement import TaskDied as TaskDied
from .judgement import ending, judge, recorded, stopped, without_effect
from .kernel import left_result, remove_lock
from .proof import Machines
from .requests import Misfit
from .results import plain_error
from .stopping import GRACE_S
from .tools import ToolOptions

CLOCK_MARGIN_S = 2.0
"""Added to an attempt's hard deadline for clocks that run apart."""
UNBEGUN_S = 1.0
"""How long an attempt of a cancelled run has to begin, or to be refused."""
PROBE_S = 10.0
"""How long a probe has to say what a stopped attempt did."""


class Tasks(Machines, Protocol):
    """Where attempts run."""

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        """Run one attempt or probe in a task of its own. Raises TaskDied."""
        ...

    async def prove_dead(self, call: CallRow) -> bool:
        """End what is left of the call's marked attempt, and say whether it is proven over."""
        ...

    def begun(self, run_id: str, tool_call_id: str, attempt: int, node: str, pid: int) -> None:
        """An attempt was given leave to begin, in this process. `attempt` 0 is a probe that has begun."""
        ...

    async def stop(self, run_id: str, tool_call_id: str) -> None:
        """Give the call's attempt the signal to stop, if one runs. A second time, only if it was not heard."""
        ...

    def kill(self, run_id: str, tool_call_id: str) -> None:
        """End the call's task at once, if one runs. What it returns from now on is not believed."""
        ...

    async def end_children(self, wanted: str, nodes: Collection[str]) -> None:
        """End the processes on these nodes that attempts with this mark, or one that begins so, have started."""
        ...


@dataclass
class Pursued:
    """One call that is being seen through."""

    request: ToolCallRequested
    options: ToolOptions
    agent: AgentRef
    metadata: dict[str, JsonValue]
    row: CallRow
    apart: bool = False
    """Whether its attempts need workers that serve only this version of the agent's code."""
    misfit: Misfit | None = None
    """Why no further attempt and no probe can be dispatched."""
    begun: int = 0
    """The newest attempt that was given leave to begin."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its run is cancelled, or has ended: what runs of it is being stopped."""
    asking: bool = False
    """Its probe runs, not an attempt."""
    hurried: bool = False
    """Its probe has had its time."""
    mute: bool = False
    """Its run has ended, so that nothing but a result of its own is worth recording."""


Submit = Callable[[Command], Awaitable[Accepted]]


class Pursuit:
    """Runs attempts of calls until each has its result, is unsettled, or is no longer ours to run."""

    def __init__(
        self,
        log: EventLog,
        submit: Submit,
        tasks: Tasks,
        epoch_of: Callable[[str], int],
        store: str,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._log, self._submit, self._tasks = log, submit, tasks
        self._epoch_of, self._store, self._clock, self._sleep = epoch_of, store, clock, sleep
        self.left: dict[str, set[str]] = {}
        """Nodes on which finished attempts of a run may have left processes behind."""

    async def pursue(self, it: Pursued, fresh: bool) -> None:
        """See a call through. `fresh`: its intent was recorded just now, so nothing can have begun."""
        try:
            if not fresh:
                started = it.row.started and it.row.effect == "non_idempotent"
                decided = not it.row.attempt or it.row.withdrawn
                why = it.row.decision_text if decided else "its task is gone"
                if not (await self._settle(it, why, None) if started else await self._retry(it, why)):
                    return
            await self._attempts(it)
        except Refused:
            return  # closed, cancelled, ended or owned by somebody else: the log says what stands

    async def stop(self, it: Pursued, pursuing: asyncio.Task[None], mute: bool = False) -> None:
        """Stop what runs of a call: signal, grace time, kill. Its pursuit then records what is true of it, once that is
        known; unless `mute`, since the run has ended: then only a result of its own is."""
        it.mute = mute
        it.stopping.set()
        run_id, call_id = it.row.run_id, it.row.tool_call_id
        await self._tasks.stop(run_id, call_id)
        if not await self._over(pursuing, UNBEGUN_S) and (it.begun == it.row.attempt or it.row.started):
            await self._tasks.stop(run_id, call_id)  # again: leave to begin was on its way, or it was not heard
            await self._over(pursuing, GRACE_S)
        if not pursuing.done() and not it.asking:
            self._tasks.kill(run_id, call_id)
        if not await self._over(pursuing, PROBE_S):
            it.hurried = True
            self._tasks.kill(run_id, call_id)
        await asyncio.wait({pursuing})

    async def end_left(self, run_id: str) -> None:
        """End what finished attempts of a run have left behind."""
        if nodes := self.left.pop(run_id, None):
            await self._tasks.end_children(mark_of(self._store, run_id), nodes)

    async def _over(self, pursuing: asyncio.Task[None], wait_s: float) -> bool:
        """Whether it is, at the latest after this time."""
        clock = asyncio.ensure_future(self._sleep(wait_s))
        await asyncio.wait({pursuing, clock}, return_when=asyncio.FIRST_COMPLETED)
        clock.cancel()
        return pursuing.done()

    async def _attempts(self, it: Pursued) -> None:
        deaths = unbegun = 0
        while True:
            attempt = it.row.attempt
            charged = True
            try:
                outcome = await self._tasks.run(self._work(it), it.options)
            except TaskDied as death:
                outcome, charged = death.outcome(it.options.timeout_s), death.charged
            if outcome.left:
                self.left.setdefault(it.row.run_id, set()).add(outcome.node)
            began, stops = it.begun == attempt, it.stopping.is_set()
            deaths += charged and began
            unbegun += not began
            match judge(it.row.effect, outcome, began, deaths, unbegun, it.options.attempts_max, stops):
                case "drop":
                    return None
                case "record":
                    return await self._record(it, recorded(outcome, attempt))
                case "stopped":
                    fate: Fate = "unknown" if it.row.effect == "idempotent_write" else "stopped"
                    return await self._record(it, stopped(it.request, it.row.effect, outcome), fate)
                case "retry":
                    if it.misfit or not await self._retry(it, ending(outcome), outcome):
                        return None
                case "settle":
                    last = without_effect(outcome, it.options.timeout_s, deaths, it.options.attempts_max)
                    if not await self._settle(it, ending(outcome), last):
                        return None

    async def _record(self, it: Pursued, outcome: Outcome, fate: Fate | None = None) -> None:
        """Record a call's result. `fate` is of one that was stopped."""
        if it.mute and outcome.kind != "result":
            return
        event = ToolResult(
            event_id=uuid4().hex,
            tool_call_id=it.row.tool_call_id,
            attempt=it.row.attempt,
            content=outcome.content,
            is_error=outcome.is_error,
            source=_SOURCES.get(outcome.kind, "crash"),
            node=outcome.node,
            pid=outcome.pid,
            took_s=outcome.took_s,
            fate="never started" if outcome.kind == "spared" else fate,
        )
        await self._submit(Result(it.row.run_id, event))
        if it.row.started and it.row.lock:
            remove_lock(it.row.lock)

    async def _retry(self, it: Pursued, reason: str, before: Outcome | None = None) -> bool:
        """Open the next attempt. `before` is how the present one ended, where nothing else tells of that."""
        event = ToolCallRetried(
            tool_call_id=it.row.tool_call_id,
            attempt=it.row.attempt + 1,
            reason=reason[:500],
            node=before.node if before else "",
            pid=before.pid if before else 0,
            ran_s=before.took_s if before else None,
        )
        done = await self._submit(Retry(it.row.run_id, self._epoch_of(it.row.run_id), it.row.started_attempt, event))
        it.row = next(call for call in done.calls if call.tool_call_id == it.row.tool_call_id)
        return True

    async def _settle(self, it: Pursued, end: str, last: Outcome | None) -> bool:
        """Find out what a marked attempt did that ended in this way; if it had no effect and was the `last`, that is
        recorded. True when the call was reopened as a new attempt."""
        call = it.row
        await self._await_death(call)
        if left := left_result(call.lock):
            await self._record(it, Outcome.model_validate_json(left))
            return False
        if evidence := await self._evidence(call):
            return await self._answer(it, evidence, "tool")
        if it.mute:
            return False
        if it.misfit:
            return await self._unsettle(it, f"{end}; {it.misfit.problem}")
        if not it.options.has_probe:
            return await self._unsettle(it, f"{end}; the tool has no reconcile probe")
        outcome = await self._ask_probe(it, end)
        if outcome.kind != "happened" and it.options.quiet_s > 0:
            if not await self._quiet(it):
                return await self._unsettle(it, f"{end}; a request of it may still be under way")
            outcome = await self._ask_probe(it, end)
        if outcome.kind == "happened":
            return await self._answer(it, outcome.content, "probe")
        if outcome.kind != "did_not_happen":
            return await self._unsettle(it, f"{end}; {outcome.content}")
        if it.stopping.is_set():
            text = plain_error("Cancelled", "stopped before it took effect: the probe says that it did not and cannot")
            await self._record(it, Outcome(kind="stopped", content=text, is_error=True), "stopped")
            return False
        if last:
            await self._record(it, last)
            return False
        reopened = await self._retry(it, "the probe says that the attempt had no effect")
        remove_lock(call.lock)
        return reopened

    async def _quiet(self, it: Pursued) -> bool:
        """Wait until the world has settled. False when the call is to be stopped: nobody waits for that long."""
        settled = asyncio.ensure_future(self._sleep(it.options.quiet_s))
        stops = asyncio.ensure_future(it.stopping.wait())
        await asyncio.wait({settled, stops}, return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        stops.cancel()
        return not it.stopping.is_set()

    async def _await_death(self, call: CallRow) -> None:
        """Return once the marked attempt cannot act any more: its lock is free, or its hard deadline has passed. One
        that began before its class was raised has no lock."""
        over = call.started_at + call.hold_s + CLOCK_MARGIN_S
        while not (call.lock and await self._tasks.prove_dead(call)):
            left_s = over - self._clock()
            if left_s <= 0:
                return
            await self._sleep(min(left_s, 1.0))

    async def _evidence(self, call: CallRow) -> str | None:
        """A success that an attempt reported after its run had ended."""
        if call.evidence_seq is None:
            return None
        found = (await self._log.read(call.run_id, call.evidence_seq - 1, 1))[0].event
        return found.content if isinstance(found, ToolEvidence) else None

    async def _ask_probe(self, it: Pursued, end: str) -> Outcome:
        """The probe's word, recorded; that of its last try where its process dies."""
        answer = Outcome(kind="unknown", content="there was no time for a probe")
        it.asking = True
        try:
            for _ in range(it.options.attempts_max):
                if it.hurried:
                    break
                try:
                    answer, again = await self._tasks.run(self._work(it, probe=True), it.options), False
                except TaskDied as death:
                    told = death.outcome(it.options.timeout_s)
                    why = "did not end in time" if death.timed_out else f"died: {death.why}"
                    answer = told.model_copy(update={"kind": "unknown", "content": f"the probe's process {why}"})
                    again = not death.timed_out
                await self._tell(it, answer, end)
                if not again:
                    break
        finally:
            it.asking = False
        return answer

    async def _tell(self, it: Pursued, answer: Outcome, end: str) -> None:
        """Record what a probe said."""
        if it.mute or answer.kind not in ("happened", "did_not_happen", "unknown"):
            return
        event = ToolCallProbed(
            tool_call_id=it.row.tool_call_id,
            attempt=it.row.attempt,
            end=end[:500],
            answer=answer.kind,
            why="" if answer.kind == "happened" else answer.content,
            node=answer.node,
            pid=answer.pid,
            took_s=answer.took_s,
        )
        await self._submit(Probed(it.row.run_id, event))

    async def _answer(self, it: Pursued, content: str, source: Literal["probe", "tool"]) -> bool:
        event = ToolResult(tool_call_id=it.row.tool_call_id, attempt=it.row.attempt, content=content, source=source)
        # of a run that is cancelled it opens nothing any more, and is a fact like any other
        await self._submit((Result if it.stopping.is_set() else Answer)(it.row.run_id, event))
        remove_lock(it.row.lock)
        return False

    async def _unsettle(self, it: Pursued, why: str) -> bool:
        if it.stopping.is_set():
            text = plain_error("Cancelled", f"killed in mid-effect: it is unknown whether it took effect: {why}")
            await self._record(it, Outcome(kind="stopped", content=text, is_error=True), "unknown")
            return False
        event = ToolCallUnsettled(tool_call_id=it.row.tool_call_id, attempt=it.row.attempt, why=why)
        await self._submit(Unsettle(it.row.run_id, event))
        return False

    def _work(self, it: Pursued, probe: bool = False) -> Work:
        request = it.request
        return Work(
            run_id=it.row.run_id,
            turn_index=request.turn_index,
            tool_call_id=request.tool_call_id,
            attempt=it.row.attempt,
            name=request.name,
            arguments=request.arguments,
            effect=request.effect,
            idempotency_key=request.idempotency_key,
            agent=it.agent,
            metadata=it.metadata,
            timeout_s=it.options.timeout_s,
            store=self._store,
            probe=probe,
            apart=it.apart,
            remote=it.options.remote,
        )


_SOURCES: Final[dict[str, Literal["tool", "timeout", "cancel"]]] = {
    "result": "tool",
    "timeout": "timeout",
    "stopped": "cancel",
    "spared": "cancel",
}
"""Where a result comes from, by the kind of its outcome; any other is a crash."""
