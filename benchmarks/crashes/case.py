"""One run of a plan: launched, seen through with a person who can see the ledger, and what came out of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from pydantic import JsonValue

from perdure.actors.machine import fold
from perdure.client.launching import Request
from perdure.store.events import (
    AssistantMessage,
    Stored,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallStarted,
    ToolResult,
)
from perdure.store.states import Status

from .plan import HOLDS, Plan
from .stage import Stage
from .table import Asked, Healed, Outcome


class Case:
    """A run of a plan, and its ledger."""

    def __init__(self, stage: Stage, plan: Plan) -> None:
        self.stage, self.plan = stage, plan
        self.run_id = uuid4().hex
        self.folder = stage.folder / self.run_id
        self.folder.mkdir()
        self.asked: list[Asked] = []
        self.before: list[str] = []
        """Event ids that were in the log when the process was killed."""

    def request(self) -> Request:
        plan, chance = self.plan, random.Random(self.run_id)
        turns: list[JsonValue] = []
        for number, names in enumerate(plan.turns):
            calls: list[JsonValue] = []
            for position, name in enumerate(names):
                here = (number, position) == (plan.turn, plan.position) and plan.point in HOLDS
                at = f"{plan.waits_at}@{self.folder}" if here else ""
                if plan.point == "in an append":
                    at = f"slow@{chance.uniform(0, 0.1):.3f}"
                calls.append({"name": name, "arguments": {"at": at}})
            turns.append(calls)
        metadata: dict[str, JsonValue] = {"dir": str(self.folder), "hold": plan.hold}
        return Request({"turns": turns}, run_id=self.run_id, metadata=metadata)

    # -- where it is --------------------------------------------------------------------------------------

    def lines(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "ledger"
        every = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in every if line["kind"] == kind]

    def waits(self) -> dict[str, Any] | None:
        """The line of whoever waits to be killed."""
        return next(iter(self.lines(self.plan.waits_at)), None)

    def owner(self) -> int:
        """The process of the actor that was last seen with this run."""
        return int(self.lines("shown")[-1]["pid"])

    def go(self, place: str) -> None:
        """Let whoever waits at a place go on."""
        (self.folder / f"go-{place}").touch()

    def waiting_pid(self) -> int:
        line = self.waits()
        assert line
        return int(line["pid"])

    def go_everywhere(self) -> None:
        for place in ("model", "bound", "begun", "forked", "acted"):
            self.go(place)

    def acts(self, call_id: str) -> int:
        return sum(line["call"] == call_id for line in self.lines("effect"))

    def happened(self, call_id: str, attempt: int) -> bool:
        return any((line["call"], line["attempt"]) == (call_id, attempt) for line in self.lines("effect"))

    # -- to the end ---------------------------------------------------------------------------------------

    async def see_through(self) -> None:
        """Wait for the end; a person who can see the ledger answers what is asked."""
        runtime = self.stage.runtime
        while (await runtime.outcome(self.run_id)).status == Status.AWAITING_APPROVAL:
            for question in await runtime.questions(self.run_id):
                call_id = question.tool_call_id
                if question.kind == "approval":
                    self.asked.append("approval")
                    await runtime.approve(self.run_id, call_id, by="ann")
                elif self.happened(call_id, question.attempt):
                    self.asked.append("whether it happened")
                    await runtime.settle(self.run_id, "happened", call_id, result="seen", by="ann")
                else:
                    self.asked.append("whether it happened")
                    await runtime.settle(self.run_id, "not_happened", call_id, by="ann")

    async def outcome(self) -> Outcome:
        """What came out, the worst call first. Raises AssertionError for a log that is not what it should be."""
        stored = await self.stage.runtime.log.read(self.run_id)
        await self._check_log(stored)
        row = await self.stage.runtime.log.run(self.run_id)
        calls = await self.stage.runtime.log.calls(self.run_id)
        attempts = {call.tool_call_id: call.attempt for call in calls}
        acts = [self.acts(call_id) for call_id in self.plan.targets]
        return Outcome(
            row.status if row else "gone",
            str(max(acts) if all(acts) else 0),
            str(max(attempts.get(call_id, 0) for call_id in self.plan.targets)),
            self.asked[0] if self.asked else "nothing",
            self._healed([one.event for one in stored]),
        )

    def _healed(self, events: Iterable[Any]) -> Healed:
        ours = [event for event in events if getattr(event, "tool_call_id", "") in self.plan.targets]
        if any(isinstance(event, ToolCallSettled) for event in ours):
            return "person"
        results = [event for event in ours if isinstance(event, ToolResult)]
        retries = [event for event in ours if isinstance(event, ToolCallRetried) and event.attempt > 1]
        if any(event.source == "probe" for event in results) or any("probe" in event.reason for event in retries):
            return "probe"
        if retries:
            return "retry"
        late = self.plan.point == "result on its way" and results[0].source == "tool"
        return "late result" if late else "replay"

    async def _check_log(self, stored: list[Stored]) -> None:
        """Gapless, refolding to its row, with everything that somebody was told of."""
        log = self.stage.runtime.log
        row = await log.run(self.run_id)
        state = fold(stored)
        assert row and [one.seq for one in stored] == list(range(1, len(stored) + 1)), f"{self.run_id} has gaps"
        assert (state.status, state.seq, state.epoch) == (row.status, row.seq, row.epoch), f"{self.run_id} refolds"
        ids = [one.event.event_id for one in stored]
        assert ids[: len(self.before)] == self.before, f"{self.run_id} lost events that were committed"
        results = {one.event.tool_call_id for one in stored if isinstance(one.event, ToolResult)}
        shown = {call_id for line in self.lines("shown") for call_id in line["calls"]}
        assert shown <= results, f"{self.run_id}: the model was shown results that are not in the log"
        told = {(e.tool_call_id, e.attempt) for e in (one.event for one in stored) if isinstance(e, ToolCallStarted)}
        marked = {"send", "blind", "ask_send", "ask_blind"}
        names = {f"t{t}c{n}": name for t, turn in enumerate(self.plan.turns) for n, name in enumerate(turn)}
        for line in self.lines("handler"):
            if names[line["call"]] in marked:
                assert (line["call"], line["attempt"]) in told, f"{self.run_id}: an attempt began without its mark"

    def duplicates(self) -> int:
        """Effects that were done once too often: a second one of a call that may act once, or another key."""
        names = {f"t{t}c{n}": name for t, turn in enumerate(self.plan.turns) for n, name in enumerate(turn)}
        lines = self.lines("effect")
        done = Counter(line["call"] for line in lines)
        keys = {(line["call"], line["key"]) for line in lines}
        again = sum(n - 1 for call, n in done.items() if names[call].removeprefix("ask_") in ("send", "blind"))
        return again + len(keys) - len(done)

    def answered(self, turn: int, stored: Iterable[Stored]) -> bool:
        """Whether the model's answer to a turn is in the log."""
        return any(isinstance(one.event, AssistantMessage) and one.event.turn_index == turn for one in stored)
