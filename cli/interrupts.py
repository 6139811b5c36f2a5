"""Ctrl-C: the first one ends a command in good order, the second at once. Runs stay as they are in the store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from click.exceptions import Exit as ClickExit

from ..client.door import Door
from .exits import Exit

T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S: Final = 3.0
"""How long an interrupted command may take to end its processes in good order."""


class Interrupts:
    """Runs the work of a command. `say` tells the user how to go on, `kill` ends the command's own processes."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self.say: Callable[[], None] = lambda: None
        self.kill: Callable[[], None] = lambda: None
        self._caught = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. An interrupted command exits with 130."""
        loop = asyncio.get_running_loop()
        task: asyncio.Task[T] = loop.create_task(work)
        self._task = task
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: no signals here
            for number in SIGNALS:
                loop.add_signal_handler(number, self._interrupt)
        try:
            result: T = await task
            return result
        except asyncio.CancelledError:
            if self._caught:
                raise ClickExit(Exit.INTERRUPTED) from None
            raise
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def hold(self, door: Door) -> None:
        """What is killed by a second interrupt, or when the work does not end in time."""
        self.kill = door.kill

    def _interrupt(self) -> None:
        if self._caught:
            self._leave()
        self._caught = True
        with contextlib.suppress(OSError, ValueError):
            self.say()
        if self._task:
            self._task.cancel()
        asyncio.get_running_loop().call_later(self._grace_s, self._leave)

    def _leave(self) -> None:
        try:
            self.kill()
        finally:
            os._exit(Exit.INTERRUPTED)
