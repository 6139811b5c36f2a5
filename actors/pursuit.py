"""Seeing one open call through to its result: the class table for attempts that died.

| effect           | begun? | next                                                                          |
|------------------|--------|-------------------------------------------------------------------------------|
| any              | no     | dispatch again as a new attempt                                               |
| read_only        | yes    | dispatch again, up to the tool's attempts_max, then an error result           |
| idempotent_write | yes    | the same, with the same key                                                   |
| non_idempotent   | yes    | prove that the attempt is over; take the result it left; or ask the probe      |

A probe is asked once the attempt is proven dead; "it happened" counts at once, "it did not" only when the tool's
settling time has passed since the proof, for a request under way may land until then. Where nobody can tell, or the
agent's code has no place for the call any more, it is unsettled and a person is asked. A call that a person has
approved has no attempt yet: its first one is opened like any further one, so that no two tasks ever have the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol
from uuid import uuid4

from pydantic import JsonValue

from ..store.events import (
    AgentRef,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallUnsettled,
    ToolEvidence,
    ToolResult,
)
from ..store.log import Accepted, Answer, CallRow, Clock, Command, EventLog, Refused, Result, Retry, Unsettle
from .attempt import Outcome, Work
from .kernel import left_result, remove_lock
from .requests import Misfit
from .results import plain_error
from .tools import ToolOptions

CLOCK_MARGIN_S = 2.0
"""Added to an attempt's hard deadline for clocks that run apart."""
UNBEGUN_MAX = 20
"""Attempts that may die before they begin; beyond, the worker cannot be started at all."""


class TaskDied(Exception):
    """A task's process ended without an outcome. `charged` is false where the tool is not to blame."""

    def __init__(self, why: str, charged: bool = True) -> None:
        super().__init__(why)
        self.why, self.charged = why, charged


class Tasks(Protocol):
    """Where attempts run."""

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        """Run one attempt or probe in a task of its own. Raises TaskDied."""
        ...

    async def prove_dead(self, call: CallRow) -> bool:
        """End what is left of the call's marked attempt, and say whether it is proven over."""
        ...

    def begun(self, run_id: str, tool_call_id: str, attempt: int, node: str) -> None:
        """An attempt was given leave to begin, on this node."""
        ...

    def kill(self, run_id: str, tool_call_id: str) -> None:
        """End the call's task at once, if one runs."""
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

    async def pursue(self, it: Pursued, fresh: bool) -> None:
        """See a call through. `fresh`: its intent was recorded just now, so nothing can have begun."""
        try:
            if not fresh:
                started = it.row.started and it.row.effect == "non_idempotent"
                why = "its task is gone" if it.row.attempt else it.row.decision_text
                if not (await self._settle(it, 0) if started else await self._retry(it, why)):
                    return
            await self._attempts(it)
        except Refused:
            return  # closed, cancelled, ended or owned by somebody else: the log says what stands

    async def _attempts(self, it: Pursued) -> None:
        deaths = unbegun = 0
        while True:
            attempt = it.row.attempt
            try:
                outcome = await self._tasks.run(self._work(it), it.options)
                why, charged = outcome.content, True
            except TaskDied as death:
                outcome, why, charged = None, death.why, death.charged
            began = it.begun == attempt
            deaths += charged and began
            unbegun += not began
            match judge(it.row.effect, outcome, began, deaths, unbegun, it.options.attempts_max):
                case "drop":
                    return None
                case "record":
                    if outcome is None:
                        text = plain_error(
                            "ProcessDied", f"the tool's process died, {attempt} attempts were made: {why}"
                        )
                        outcome = Outcome(kind="exited", content=text, is_error=True)
                    return await self._record(it, outcome)
                case "retry":
                    if it.misfit or not await self._retry(it, why):
                        return None
                case "settle":
                    if not await self._settle(it, deaths):
                        return None

    async def _record(self, it: Pursued, outcome: Outcome) -> None:
        source: Literal["tool", "crash", "timeout"] = "tool"
        if outcome.kind != "result":
            source = "timeout" if outcome.kind == "timeout" else "crash"
        event = ToolResult(
            event_id=uuid4().hex,
            tool_call_id=it.row.tool_call_id,
            attempt=it.row.attempt,
            content=outcome.content,
            is_error=outcome.is_error,
            source=source,
            node=outcome.node,
            pid=outcome.pid,
            took_s=outcome.took_s,
        )
        await self._submit(Result(it.row.run_id, event))
        if it.row.started and it.row.lock:
            remove_lock(it.row.lock)

    async def _retry(self, it: Pursued, reason: str) -> bool:
        event = ToolCallRetried(tool_call_id=it.row.tool_call_id, attempt=it.row.attempt + 1, reason=reason[:500])
        done = await self._submit(Retry(it.row.run_id, self._epoch_of(it.row.run_id), it.row.started_attempt, event))
        it.row = next(call for call in done.calls if call.tool_call_id == it.row.tool_call_id)
        return True

    async def _settle(self, it: Pursued, deaths: int) -> bool:
        """Find out what a marked attempt did. True when the call was reopened as a new attempt."""
        call = it.row
        await self._await_death(call)
        if left := left_result(call.lock):
            await self._record(it, Outcome.model_validate_json(left))
            return False
        if evidence := await self._evidence(call):
            return await self._answer(it, evidence)
        if it.misfit:
            return await self._unsettle(it, it.misfit.problem)
        if not it.options.has_probe:
            return await self._unsettle(it, "the tool has no reconcile probe")
        outcome = await self._ask_probe(it)
        if outcome.kind != "happened" and it.options.quiet_s > 0:
            await self._sleep(it.options.quiet_s)
            outcome = await self._ask_probe(it)
        if outcome.kind == "happened":
            return await self._answer(it, outcome.content)
        if outcome.kind != "did_not_happen":
            return await self._unsettle(it, outcome.content)
        if deaths >= it.options.attempts_max:
            text = plain_error("ProcessDied", f"the tool's process died {deaths} times; its effect did not happen")
            await self._record(it, Outcome(kind="exited", content=text, is_error=True))
            return False
        reopened = await self._retry(it, "the probe says that the attempt had no effect")
        remove_lock(call.lock)
        return reopened

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

    async def _ask_probe(self, it: Pursued) -> Outcome:
        for _ in range(it.options.attempts_max):
            try:
                return await self._tasks.run(self._work(it, probe=True), it.options)
            except TaskDied as death:
                why = death.why
        return Outcome(kind="unknown", content=f"the probe's process died {it.options.attempts_max} times: {why}")

    async def _answer(self, it: Pursued, content: str) -> bool:
        event = ToolResult(tool_call_id=it.row.tool_call_id, attempt=it.row.attempt, content=content, source="probe")
        await self._submit(Answer(it.row.run_id, event))
        remove_lock(it.row.lock)
        return False

    async def _unsettle(self, it: Pursued, why: str) -> bool:
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
        )


def judge(
    effect: str, outcome: Outcome | None, began: bool, deaths: int, unbegun: int, attempts_max: int
) -> Literal["record", "retry", "settle", "drop"]:
    """What follows an attempt; `outcome` None means that its process died. Pure: the table above.

    drop: it was refused leave to begin, so what stands in the log is somebody else's business.
    """
    if outcome and outcome.kind == "refused":
        return "drop"
    if outcome and outcome.kind == "result":
        return "record"
    if not began:
        return "record" if unbegun >= UNBEGUN_MAX else "retry"
    if effect == "non_idempotent":
        return "settle"
    if outcome and outcome.kind == "timeout":
        return "record"
    return "record" if deaths >= attempts_max else "retry"
