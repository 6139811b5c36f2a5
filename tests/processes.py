"""Processes for tests of the plain core: each is a set of asyncio tasks, and killing it cancels them all."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """Tasks that die together."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._context.run(_process.set, self)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.died = asyncio.Event()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work, context=self._context)

    def kill(self) -> None:
        self.died.set()
        for task in list(self.tasks):
            task.cancel()

    async def gone(self) -> None:
        while self.tasks:
            await asyncio.wait(self.tasks)


@contextlib.asynccontextmanager
async def processes() -> AsyncIterator[None]:
    """Within this, every task belongs to the process that created it."""
    loop = asyncio.get_running_loop()

    def make(
        loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        process = context.get(_process) if context is not None else _process.get()
        if process:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
            if process.died.is_set():
                task.cancel()
        return task

    before = loop.get_task_factory()
    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(before)
