"""A knock at the door of the supervisor on this machine: the store has news."""

from __future__ import annotations

import contextlib
import socket

from ..actors.nudge import door_path
from .cluster import namespace_digest, store_url


def nudge(db: str) -> None:
    """Have a supervisor on this machine look at the store now. Where none listens nothing happens: it sweeps anyway."""
    path = door_path(namespace_digest(store_url(db)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as knocking:
        knocking.setblocking(False)
        with contextlib.suppress(OSError):  # nobody listens, or so many have knocked that there is news already
            knocking.sendto(b"\n", str(path))
