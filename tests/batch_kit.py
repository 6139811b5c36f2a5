"""A door that finishes runs by itself, and the way to put runs of any state into a store without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from perdure.store.events import (
    AssistantMessage,
    Event,
    RunCompleted,
    RunFailed,
    TurnStarted,
    Usage,
)
from perdure.store.log import Accepted, Append, Claim, Create
from perdure.store.rows import Lease
from perdure.store.sql import SqlLog

LEASE = Lease("supervisor", "super-1", "node-a", "boot-a", 100, 50.0, 1.0)
"""A lease that ran out long ago, of a process that never was."""
SPENT = Usage(input_tokens=10, output_tokens=3)

AGENT = """
from perdure import Agent

agent = Agent(name="echo", model=lambda request: f"done with {request.input}")
"""


def write_agent(folder: Path) -> str:
    """An agent in a folder of its own; its reference."""
    folder.mkdir(exist_ok=True)
    (folder / "agent.py").write_text(AGENT)
    return f"{folder / 'agent.py'}:agent"


def completes(create: Create) -> Event:
    """The usual end of a run."""
    return RunCompleted(output=f"done with {create.event.input}", stop_reason="end_turn")


def fails(create: Create) -> Event:
    """A run's failure."""
    code = "refusal" if create.event.sample == "1" else "model_error"
    return RunFailed(code=code, message="the model said \x1b[31mno\x1b[0m", phase="model")


async def play(event_log: SqlLog, creates: Sequence[Create], end: Callable[[Create], Event] = completes) -> None:
    """Create runs and see them through to the end that is chosen for each."""
    await event_log.take_lease(LEASE, None)
    claims = [Claim(create.run_id, f"claim-{create.run_id}", LEASE.nonce, 0) for create in creates]
    turn = TurnStarted(turn_index=0)
    said = AssistantMessage(turn_index=0, text="well", stop_reason="end_turn", usage=SPENT)
    ends = [Append(create.run_id, 1, 2, (turn, said, end(create))) for create in creates]
    for verdict in await event_log.commit([*creates, *claims, *ends]):
        assert isinstance(verdict, Accepted) or verdict.reason == "exists", verdict


class DriverDied(Exception):
    """Stands for kill -9."""


class FakeDoor:
    """A store whose runs end as soon as they are created. `dies_after` runs the driver dies."""

    def __init__(
        self, event_log: SqlLog, end: Callable[[Create], Event] = completes, dies_after: int | None = None
    ) -> None:
        self.log, self._end, self._dies_after = event_log, end, dies_after
        self.launched: list[str] = []

    async def create(self, creates: Sequence[Create]) -> None:
        if self._dies_after is not None and len(self.launched) >= self._dies_after:
            raise DriverDied
        self.launched += [create.run_id for create in creates]
        await play(self.log, creates, self._end)

    async def nudge(self, run_ids: Iterable[str] = ()) -> None:
        for run_id in run_ids:
            row = await self.log.run(run_id)
            assert row
            claim = Claim(run_id, f"again-{run_id}", LEASE.nonce, row.epoch)
            verdict = (await self.log.commit([claim]))[0]
            assert isinstance(verdict, Accepted), verdict
            said = AssistantMessage(turn_index=row.turns, text="well", stop_reason="end_turn", usage=SPENT)
            events = (TurnStarted(turn_index=row.turns), said, RunCompleted(output="late", stop_reason="end_turn"))
            done = (await self.log.commit([Append(run_id, row.epoch + 1, row.seq + 1, events)]))[0]
            assert isinstance(done, Accepted), done

    async def check(self) -> None:
        pass

    def kill(self) -> None:
        pass
