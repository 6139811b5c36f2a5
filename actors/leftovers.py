"""Lock files that nobody needs any more.

An attempt that was killed between taking its lock and its mark leaves a file that no log names; one whose result
came home by another way, or whose journal died, leaves one that is never asked for. A file is needed as long as an
open call names it: its lock is the proof that the attempt is over, and it may hold the result.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from ..store.errors import PerdureError
from ..store.log import EventLog
from .kernel import lock_if_free, runtime_folder
from .nudge import sweep_door

log = logging.getLogger(__name__)


async def sweep_locks(event_log: EventLog, name: str) -> None:
    """Delete what is not needed from a store's folder of lock files on this machine, and the folder if it is empty.

    The call's row is read while the lock is held, so that an attempt which begins meanwhile is not overlooked; and
    before it is taken, so that nobody who has to end an attempt finds us at its lock.
    """
    folder = runtime_folder(name)
    try:
        sweep_door(name)
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
    """Whether an open call's marked attempt has this lock."""
    run_id = path.name.rsplit(".", 3)[0]
    calls = await event_log.calls(run_id)
    return any(call.result_seq is None and call.started and call.lock == str(path) for call in calls)
