"""Who works on a store, as its lease tells: asked before any process is started."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from ..actors.kernel import boot_id, process_started
from ..store.errors import LeaseHeld
from ..store.log import EventLog
from ..store.rows import Lease

SUPERVISOR: Final = "supervisor"
"""Name of the supervisor's lease."""
HELD_AFTER_S: Final = 3.0
"""A lease that is renewed after this long is held by a supervisor that means to stay. One whose cluster was just killed
may still be seen alive for a moment."""
LEASE_POLL_S: Final = 0.2


async def wait_for_lease(event_log: EventLog) -> None:
    """Return when no supervisor works on the store. Raises LeaseHeld when one does and goes on to."""
    began, first = time.monotonic(), await event_log.lease(SUPERVISOR)
    holder = first
    while holder and first and not lease_is_over(holder):
        if holder.expires_at > first.expires_at and time.monotonic() - began > HELD_AFTER_S:
            raise LeaseHeld(
                f"another supervisor (process {holder.pid} on node {holder.node[:8]}) works on this store; wait until "
                "it is done, or end it: `perdure down` ends one that `perdure up` started"
            )
        await asyncio.sleep(LEASE_POLL_S)
        holder = await event_log.lease(SUPERVISOR)


async def nobody_works(event_log: EventLog) -> bool:
    """Whether no supervisor is there to act on what is appended now."""
    lease = await event_log.lease(SUPERVISOR)
    return lease is None or lease_is_over(lease)


def lease_is_over(lease: Lease) -> bool:
    """Whether a lease has run out, or its process on this machine is gone."""
    if lease.expires_at < time.time():
        return True
    return lease.boot_id == boot_id() and process_started(lease.pid) != lease.pid_started
