"""What attempts leave behind when their journal dies: processes that belong to nothing any more, and lock files that
nobody needs.

A journal ends what its own attempts start, when they die and when their run ends. What it knew of that dies with it; so
its successor looks for marked processes when it begins, and again when the last attempts of the old one are gone.

An attempt that was killed between taking its lock and its mark leaves a file that no log names; one whose result
came home by another way, or whose journal died, leaves one that is never asked for. A file is needed as long as an
open call names it: its lock is the proof that the attempt is over, and it may hold the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from ..store.errors import PerdureError
from ..store.log import EventLog
from ..store.states import TERMINAL
from .children import alive, forked
from .kernel import lock_if_free, runtime_folder
from .nudge import sweep_door
from .proof import Machines
from .wire import sweep_sockets

log = logging.getLogger(__name__)
LOOKS_S = (0.0, 2.0, 10.0)
"""Pauses before a new journal's looks at marked processes; the second is at those of all nodes."""


class Nodes(Machines, Protocol):
    """Where marked processes are."""

    async def end_children(self, wanted: str, nodes: Collection[str]) -> None:
        """End the processes on these nodes with this mark."""
        ...


async def watch_strays(
    event_log: EventLog, nodes: Nodes, name: str, runs_attempt: Callable[[str, str, int], bool]
) -> None:
    """End the processes of attempts that are over, as a new journal; `runs_attempt` says what it runs itself."""
    for number, pause_s in enumerate(LOOKS_S):
        await asyncio.sleep(pause_s)
        try:
            looked = await nodes.look(name, number == 1)
            for mark, node in sorted({(mark, each.nodes[0]) for each in looked for mark, _ in each.found}):
                run_id, call_id, attempt = mark.removeprefix(f"{name}.").rsplit(".", 2)
                about = run_id, call_id, int(attempt)
                if not runs_attempt(*about) and await _is_over(event_log, *about):
                    log.warning("processes of run %s, call %s, attempt %s are left; they are ended", *about)
                    await nodes.end_children(mark, [node])
        except (PerdureError, OSError) as error:
            log.warning("processes that attempts have left were not looked for: %s", error)


async def _is_over(event_log: EventLog, run_id: str, call_id: str, attempt: int) -> bool:
    """Whether nothing that this attempt has started may run any more, if no journal runs it. What a finished one has
    left may, until its run ends."""
    row = await event_log.run(run_id)
    if row is None or row.status in TERMINAL:
        return True
    call = next((call for call in await event_log.calls(run_id) if call.tool_call_id == call_id), None)
    return call is None or call.result_seq is None or call.attempt != attempt


async def sweep_locks(event_log: EventLog, name: str) -> None:
    """Delete what is not needed from a store's folder of lock files on this machine, and the folder if it is empty.

    The call's row is read while the lock is held, so that an attempt which begins meanwhile is not overlooked; and
    before it is taken, so that nobody who has to end an attempt finds us at its lock.
    """
    folder = runtime_folder(name)
    try:
        sweep_door(name)
        sweep_sockets(folder)
        for path in sorted(folder.iterdir()):
            if await _needed(event_log, path):
                continue
            with lock_if_free(path) as free:
                if free and not await _needed(event_log, path):
                    path.unlink(missing_ok=True)
    except (PerdureError, OSError) as error:
        log.warning("lock files were not swept: %s", error)
    with contextlib.suppress(OSError):  # somebody needs it
        folder.rmdir()
        folder.parent.rmdir()


async def _needed(event_log: EventLog, path: Path) -> bool:
    """Whether an open call's marked attempt has this lock, or a process lives that the file names."""
    if path.suffix == ".forks":
        return bool(alive(forked(path)))
    run_id = path.name.rsplit(".", 3)[0]
    calls = await event_log.calls(run_id)
    return any(call.result_seq is None and call.started and call.lock == str(path) for call in calls)
