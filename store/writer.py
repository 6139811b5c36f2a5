"""Group commit: what many callers want appended goes to disk in one transaction.

While one transaction is under way everything that arrives waits together and makes up the next one. So the cost of
a durable write is shared by all who wait for it, and nobody waits for more than two of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .errors import StoreUnavailable
from .log import Accepted, Command, EventLog, Refused, Verdict

MAX_GROUP: Final = 512
"""Commands in one transaction; more wait for the next. A request of several commands is never split."""


@dataclass(frozen=True, slots=True)
class _Request:
    commands: Sequence[Command]
    answer: asyncio.Future[list[Verdict]]


class GroupWriter:
    """The writer of one log within one process. It belongs to the event loop that it is used in."""

    def __init__(self, log: EventLog, max_group: int = MAX_GROUP) -> None:
        self._log, self._max_group = log, max_group
        self._pending: deque[_Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, command: Command) -> Accepted:
        """Append one command. Raises Refused when its guard does not hold, StoreUnavailable."""
        verdict = (await self.submit_all([command]))[0]
        if isinstance(verdict, Refused):
            raise verdict
        return verdict

    async def submit_all(self, commands: Sequence[Command]) -> list[Verdict]:
        """Append commands in order and in one transaction, each with a verdict of its own. Raises StoreUnavailable."""
        if self._closed:
            raise StoreUnavailable("this writer is closed; nothing was appended")
        if not commands:
            return []
        request = _Request(tuple(commands), asyncio.get_running_loop().create_future())
        self._pending.append(request)
        if self._task is None:
            self._task = asyncio.create_task(self._write_all())
        return await request.answer

    async def close(self) -> None:
        """Finish what is pending and refuse what comes later. The log stays open."""
        self._closed = True
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _write_all(self) -> None:
        try:
            while self._pending:
                await self._write(self._next_group())
        finally:
            self._task = None
            while self._pending:  # only if the loop is being torn down
                self._pending.popleft().answer.cancel()

    def _next_group(self) -> list[_Request]:
        group, size = [self._pending.popleft()], 0
        size = len(group[0].commands)
        while self._pending and size + len(self._pending[0].commands) <= self._max_group:
            group.append(self._pending.popleft())
            size += len(group[-1].commands)
        return group

    async def _write(self, group: list[_Request]) -> None:
        """One transaction. Whatever it raises is every member's answer, so that none waits for ever."""
        commands = [command for request in group for command in request.commands]
        try:
            verdicts = iter(await self._log.commit(commands))
        except BaseException as error:
            for request in group:
                if not request.answer.done():
                    _fail(request.answer, error)
            if not isinstance(error, Exception):
                raise
            return
        for request in group:
            own = [next(verdicts) for _ in request.commands]
            if not request.answer.done():  # a caller that was cancelled is gone, its append stands
                request.answer.set_result(own)


def _fail(answer: asyncio.Future[list[Verdict]], error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        answer.cancel()
    else:
        answer.set_exception(error)
