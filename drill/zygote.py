"""The process that lives are forked from. It has imported everything and runs no thread, so that a life costs a fork
and not the start of an interpreter; the user's code is not loaded in it, for what that code opens must not be shared.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from .bench import die_with_parent
from .life import Play, live


class Zygote:
    """Forks lives. To be made before the process that makes it starts a thread or loads an agent."""

    def __init__(self) -> None:
        self._orders, theirs = Pipe()
        maker = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._orders.close()
            _serve(theirs, maker)
        theirs.close()

    def live(self, play: Play) -> int:
        """One life of a run, waited for. Returns its exit code, a killing signal as a negative number."""
        self._orders.send(play)
        code: int = self._orders.recv()
        return code

    def close(self) -> None:
        """End it, and with it the life that runs."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._orders.close()


def _serve(orders: Connection[Any, Any], maker: int) -> None:
    """Fork and await lives until nobody orders them. Does not return."""
    try:
        if sys.platform == "linux":  # elsewhere that takes a thread; the end of the pipe is seen after the present life
            die_with_parent(maker)
        os.setsid()  # the terminal's signals are for the command, which then closes the pipe
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        while True:
            orders.send(_life(orders.recv(), orders))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _life(play: Play, orders: Connection[Any, Any]) -> int:
    parent = os.getpid()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        orders.close()
        live(play, parent)
        os._exit(0)
    finally:
        os._exit(1)
