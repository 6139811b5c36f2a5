"""The proof that no process of a cancelled run is left: looked for on every machine, and recorded.

The owner of a run asks for it when all calls are over, and records it with the end. Whatever else ends a run that had a
turn leaves it owing: a journal sees to that at its next sweep. What is found in spite of all is ended, each process by
its name, since the run may have been resumed meanwhile; and what resists that is recorded too.

Found are processes with a mark of the run in their environment, and those that a file of the run's attempts names: what
was forked only, and what a finished attempt has left without a mark.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ..store.errors import PerdureError
from ..store.events import Machine, ProcessesChecked, Stored, ToolCallRetried, ToolCallStarted, ToolResult
from ..store.log import Accepted, Check, Command, EventLog, Refused
from ..store.states import TERMINAL, Status
from .children import Named, mark_of, within

log = logging.getLogger(__name__)
LOOKS_MAX: Final = 3
AT_ONCE: Final = 100
"""Runs that a sweep sees to."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The marked processes of a store that live on a machine, which has these nodes."""

    host: str
    nodes: tuple[str, ...]
    found: tuple[tuple[str, Named], ...]


class Machines(Protocol):
    """Where attempts run."""

    async def look(self, store: str, everywhere: bool = True) -> list[Looked]:
        """The marked processes of a store, on all machines that answer or on this one."""
        ...

    async def end(self, node: str, processes: Sequence[Named]) -> None:
        """End these processes of a node's machine."""
        ...


class Proofs:
    """Looks for what cancelled runs have left."""

    def __init__(
        self, event_log: EventLog, submit: Callable[[Command], Awaitable[Accepted]], machines: Machines, store: str
    ) -> None:
        self._log, self._submit, self._machines, self._store = event_log, submit, machines, store
        self._under_way: set[str] = set()
        self._one_by_one = asyncio.Lock()
        self._next: asyncio.Task[list[Looked]] | None = None
        """A look that has not begun yet: it is everybody's who asks by then."""

    async def owed(self, now: float) -> list[str]:
        """Runs whose proof is due and that nobody sees to."""
        rows = await self._log.runs(statuses=[Status.CANCELLED], due_before=now, limit=AT_ONCE)
        return [row.run_id for row in rows if row.run_id not in self._under_way]

    async def prove(self, run_id: str) -> None:
        """`look`, and record what there is."""
        if run_id in self._under_way:
            return
        self._under_way.add(run_id)
        try:
            if event := await self.look(run_id):
                await self._submit(Check(run_id, event))
        except Refused:
            return  # it goes on
        finally:
            self._under_way.discard(run_id)

    async def look(self, run_id: str) -> ProcessesChecked | None:
        """Look for processes of a run that is being cancelled, or was, and end what is found. What there is then, or
        None where that could not be found out, or is not due any more."""
        mark = mark_of(self._store, run_id)
        try:
            for number in range(LOOKS_MAX):
                looked = await self._look()
                left = [(each, found) for each in looked if (found := _of(each, mark))]
                if not await self._is_due(run_id):
                    return None
                if not left or number == LOOKS_MAX - 1:
                    break
                log.warning("run %s: %s processes are left; they are ended", run_id, sum(len(n) for _, n in left))
                await asyncio.gather(*(self._machines.end(each.nodes[0], found) for each, found in left))
            return found_of(await self._log.read(run_id), looked, mark)
        except (PerdureError, OSError) as error:
            log.warning("run %s: its processes were not looked for: %s", run_id, error)
            return None

    async def _is_due(self, run_id: str) -> bool:
        row = await self._log.run(run_id)
        return row is not None and row.cancel and (row.status not in TERMINAL or row.due_at is not None)

    async def _look(self) -> list[Looked]:
        if self._next is None:
            self._next = asyncio.create_task(self._look_next())
        return await asyncio.shield(self._next)

    async def _look_next(self) -> list[Looked]:
        async with self._one_by_one:
            self._next = None
            return await self._machines.look(self._store)


def found_of(stored: Iterable[Stored], looked: Sequence[Looked], mark: str) -> ProcessesChecked:
    """What a look says of the run with this log and mark. Pure."""
    held = dict.fromkeys(node for one in stored if (node := _node(one)))
    machines = []
    for each in looked:
        nodes, left = tuple(node for node in held if node in each.nodes), tuple(pid for pid, _ in _of(each, mark))
        if nodes or left:
            machines.append(Machine(host=each.host, nodes=nodes, left=left))
    answered = {node for each in looked for node in each.nodes}
    gone = tuple(node for node in held if node not in answered)
    return ProcessesChecked(asked=len(looked), machines=tuple(machines), gone=gone)


def _of(looked: Looked, mark: str) -> list[Named]:
    return sorted({named for each, named in looked.found if within(each, mark)})


def _node(stored: Stored) -> str:
    match stored.event:
        case ToolCallStarted(node=node) | ToolCallRetried(node=node) | ToolResult(node=node):
            return node
    return ""
