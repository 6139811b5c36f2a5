"""One life of a drill's run: the product's own journal, owner and log in one process, until the run ends.

There is nothing to recover with: a life that follows a kill does what the first one did, on the same file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast
from uuid import uuid4

from pydantic import JsonValue

from ..actors.journal import Journal, serve
from ..actors.kernel import Deadline, boot_id, own_start
from ..actors.loading import LoadedAgent, load_agent
from ..actors.model import ModelReply, ModelRequest, Stream, scripted
from ..actors.requests import Start
from ..actors.run import Owner
from ..client.launching import Request, create
from ..store.errors import PerdureError
from ..store.events import Decision, canonical
from ..store.log import Accepted, Claim, Command, EventLog, Refused, Verdict
from ..store.memory import SUPERVISOR
from ..store.rows import Lease, RunRow
from ..store.sql import open_log
from ..store.states import Status
from .bench import Bench, die_with_parent, start_foundry
from .ledger import Ledger, Note
from .person import answer
from .points import Point, Striker, append_keys
from .verdict import neutral
from .worker import NODE

IDLE_S: Final = 1.0
"""The journal's longest pause for anything but a tool's settling time."""


@dataclass(frozen=True)
class Part:
    """What is run, the same for all runs of a drill."""

    agent: str
    script: Path
    input: JsonValue
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    effects: Path | None = None
    """A file of the user's that gets a line with each effect."""
    decision: Decision = "approve"
    """What is said to calls that need an approval."""
    wait: bool = False
    """Wait settling times out; they are skipped otherwise, and told."""


@dataclass(frozen=True)
class Play:
    """One run of the drill. `folder` is its own, `store` names the folder of its lock files."""

    part: Part
    folder: Path
    store: str
    point: Point | None = None
    life_s: float | None = None
    """A life is ended after this time."""
    run_id: str = field(default_factory=lambda: uuid4().hex)

    @property
    def db(self) -> Path:
        return self.folder / "run.db"

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger")


class StruckLog:
    """An EventLog whose process is killed before or after an append."""

    def __init__(self, inner: EventLog, striker: Striker) -> None:
        self._inner, self._striker = inner, striker

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        appends = [append_keys(command) for command in commands]
        for keys in filter(None, appends):
            self._striker.reach("before", keys)
        verdicts = await self._inner.commit(commands)
        for keys, verdict in zip(appends, verdicts, strict=True):
            if keys and isinstance(verdict, Accepted):
                self._striker.reach("after", keys)
        return verdicts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def live(play: Play, parent: int) -> None:
    """Bring the run to its end in this process, which has just been forked and ends with this."""
    die_with_parent(parent)
    ledger = play.ledger
    striker = Striker(play.point, ledger, os.getpid())
    bench = Bench(start_foundry(striker, ledger), ledger)
    if play.life_s is not None:
        Deadline(play.life_s)
    try:
        asyncio.run(_live(play, ledger, striker, bench))
    except BaseException as error:  # this process has nobody else to tell
        ledger.write(Note("failed", text=f"{type(error).__name__}: {error}"))
        raise


async def _live(play: Play, ledger: Ledger, striker: Striker, bench: Bench) -> None:
    event_log = cast(EventLog, StruckLog(await open_log(play.db), striker))
    loaded = rehearsed(load_agent(play.part.agent), play, ledger)

    async def sleep(seconds: float) -> None:
        if seconds > IDLE_S and not play.part.wait:
            ledger.write(Note("waited", seconds=seconds))
        else:
            await asyncio.sleep(seconds)

    async def commit(command: Command) -> Accepted:
        (verdict,) = await journal.commit([command])
        if isinstance(verdict, Refused):
            raise verdict
        return verdict

    async def ask(payload: Any) -> Any:
        return await serve(journal, payload)

    journal = Journal(event_log, bench, play.store, sleep=sleep)
    bench.begin = journal.begin
    lease = await _lease(event_log)
    if await event_log.run(play.run_id) is None:
        await commit(create(loaded, Request(play.part.input, play.run_id, metadata=play.part.metadata)))
    while not (row := await _row(event_log, play.run_id)).status.is_terminal:
        if row.status is Status.AWAITING_APPROVAL:
            await answer(await event_log.calls(row.run_id), commit, ledger, play.part.decision)
        else:
            claimed = (await commit(Claim(row.run_id, uuid4().hex, lease, row.epoch))).row
            await Owner(Start(row.run_id, claimed.epoch), ask, lambda ref, digest: loaded).drive()
    await journal.close()
    await event_log.close()


async def _row(event_log: EventLog, run_id: str) -> RunRow:
    row = await event_log.run(run_id)
    if row is None:
        raise PerdureError(f"run {run_id} has vanished")
    return row


async def _lease(event_log: EventLog) -> str:
    """Take the store over from the life before. Returns the nonce that claims need."""
    before = await event_log.lease(SUPERVISOR)
    lease = Lease(SUPERVISOR, uuid4().hex, NODE, boot_id(), os.getpid(), own_start(), float("inf"))
    await event_log.take_lease(lease, before.nonce if before else None)
    return lease.nonce


def rehearsed(loaded: LoadedAgent, play: Play, ledger: Ledger) -> LoadedAgent:
    """The agent with the script for its model; what the model is asked is noted."""
    turns = scripted(play.part.script)

    async def model(request: ModelRequest) -> ModelReply:
        calls = [call["id"] for message in request.messages for call in message.get("tool_calls", ())]
        text = neutral(canonical(request.messages), play.run_id, calls)
        ledger.write(Note("asked", attempt=request.turn_index, text=hashlib.sha256(text.encode()).hexdigest()))
        return (await turns(request, Stream())).model_copy(update={"delay_ms": 0})

    return replace(loaded, agent=loaded.agent.model_copy(update={"model": model}))
