"""Somebody who answers what runs ask: by the shape of the tool, and truthfully, for the ledger is there to look at."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from perdure.store.events import ApprovalDecided, Settlement, ToolCallSettled, canonical
from perdure.store.log import Accepted, Decide, EventLog, Settle
from perdure.store.rows import CallRow

from .fakes import RUN

if TYPE_CHECKING:
    from .harness import World

EDITED = '{"x":7}'


class Person:
    """Looks at a run whenever it is parked, and now and then, by a seed, as soon as it asks something."""

    def __init__(self, world: World, log: EventLog) -> None:
        self._world, self._log = world, log
        self._whims = random.Random(world.shape.name)
        self._considered: set[str] = set()
        self.approved: set[str] = set()
        """Calls that may run."""

    async def glance(self, calls: tuple[CallRow, ...]) -> bool:
        """Something was appended and these calls are open: answer at once what is new, if the whim is there."""
        answered = False
        for call in calls:
            if call.waits and call.question not in self._considered:
                self._considered.add(call.question)
                if self._whims.random() < 0.5:
                    await self._answer(call)
                    answered = True
        return answered

    async def answer_all(self) -> int:
        """The run is parked: answer everything. How many questions there were."""
        waiting = [call for call in await self._log.calls(RUN) if call.waits]
        for call in waiting:
            await self._answer(call)
        return len(waiting)

    async def _answer(self, call: CallRow) -> None:
        command = self._settled(call) if call.unsettled else self._decided(call)
        (verdict,) = await self._log.commit([command])
        assert isinstance(verdict, Accepted) or verdict.reason == "closed", verdict

    def _decided(self, call: CallRow) -> Decide:
        answer = self._world.shape.tool(call.name).gate
        assert answer, f"{call.name} is not gated, and it was asked about"
        if answer != "reject":
            self.approved.add(call.tool_call_id)
        event = ApprovalDecided(
            tool_call_id=call.tool_call_id,
            question=call.question,
            digest=call.digest,
            decision="reject" if answer == "reject" else "approve",
            by="ann",
            reason="too dear" if answer == "reject" else "",
            arguments=EDITED if answer == "edit" else None,
        )
        return Decide(RUN, event)

    def _settled(self, call: CallRow) -> Settle:
        world, call_id = self._world, call.tool_call_id
        if rivals := world.rivals(call_id):
            world.broken.append(f"a person was asked about call {call_id} while {rivals} may act")
        done = [x for name, _, x in world.ledger if name == call_id]
        outcome: Settlement = "happened" if done else "not_happened"
        if world.shape.tool(call.name).abandoned:
            outcome = "abandon"
        event = ToolCallSettled(
            tool_call_id=call_id, attempt=call.attempt, question=call.question, outcome=outcome, by="ann"
        )
        return Settle(RUN, event, canonical({"call": call_id, "x": done[0]}) if outcome == "happened" else "")
