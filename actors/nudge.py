"""The door at which commands on this machine tell a supervisor that its store has news.

It is a datagram socket in the store's runtime folder. A knock says nothing and gets no answer: whoever hears one looks
at the store. One that is lost costs the time until the next sweep, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

NAME: Final = "nudge"


def door_path(name: str) -> Path:
    """Where the supervisor of a store listens: in `runtime_folder(name)`, which is not made for asking."""
    return Path(tempfile.gettempdir()) / f"perdure-{os.getuid()}" / name / NAME


def sweep_socket(path: Path, kind: socket.SocketKind) -> None:
    """Delete the socket of a process that is gone."""
    with socket.socket(socket.AF_UNIX, kind) as caller, contextlib.suppress(FileNotFoundError):
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def sweep_door(name: str) -> None:
    """Delete the door of a supervisor that was killed."""
    sweep_socket(door_path(name), socket.SOCK_DGRAM)


class NudgeDoor:
    """Calls `news` in the running event loop whenever somebody has knocked.

    The door of a supervisor that is gone is replaced. Where none can be made (the path is too long for a socket, say)
    that is logged, and the sweep has to do.
    """

    def __init__(self, name: str, news: Callable[[], None]) -> None:
        self._news, self._path = news, door_path(name)
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
            self._file = self._path.stat()
        except OSError as error:
            log.warning("commands cannot nudge this supervisor, its sweep has to do: %s: %s", self._path, error)
            self._socket.close()
            self._socket = None
        else:
            self._loop.add_reader(self._socket, self._hear, self._socket)

    def _hear(self, door: socket.socket) -> None:
        try:
            while True:  # many knocks are one piece of news
                door.recv(1)
        except BlockingIOError:
            self._news()

    def close(self) -> None:
        """Hear nothing more. A file that a successor has put in the place of ours stays. Closing twice is harmless."""
        door, self._socket = self._socket, None
        if door is None:
            return
        self._loop.remove_reader(door)
        door.close()
        try:
            if os.path.samestat(self._path.stat(), self._file):
                self._path.unlink()
        except FileNotFoundError:
            pass  # somebody has tidied up
