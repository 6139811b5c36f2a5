"""How fast requests go to one provider, and when one is made again. All runs of a process share one Pace; the processes
of a machine share a file that says until when nobody is to ask.

An overloaded provider, or a rate limit, is news for all of them: none asks before the time that the provider named is
over, and from then on requests keep a distance, which doubles with every such news and shrinks with every answer. A
request that fails in passing is made again after a pause that grows with its failures. Neither costs a turn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from ..model import Interrupted, ModelError

log = logging.getLogger(__name__)
_T = TypeVar("_T")
Sleep = Callable[[float], Awaitable[object]]

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 60.0
DISTANCE_FIRST_S: Final = 0.05
DISTANCE_MAX_S: Final = 5.0
RELIEF: Final = 0.8
"""What an answer leaves of the distance."""
DISTANCE_MIN_S: Final = 0.01
"""A distance below this one is none."""
PATIENCE_S: Final = 900.0
"""How long a request is made again that fails in passing; for a trouble with all requests, how long after anybody's was
answered last."""
FAILURES_MAX: Final = 100
"""Of one request, as long as others are answered."""


class Passing(Exception):
    """A request failed in a way that passes. `error` is what to say once patience is over, `limited` says that the
    provider has its trouble with all requests, and `heard` that a part of the answer had come."""

    def __init__(self, error: ModelError, limited: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(error.message)
        self.error, self.limited, self.retry_after_s = error, limited, retry_after_s
        self.heard = False


@dataclass
class Pace:
    """The pace of one provider, in one event loop. Times in seconds of `clock`."""

    clock: Callable[[], float] = time.monotonic
    sleep: Sleep = asyncio.sleep
    chance: random.Random = field(default_factory=random.Random)
    board: Path | None = None
    """Says until when no process is to ask, on a clock that all of them share."""
    distance_s: float = 0.0
    """How long after a request the next one goes at the earliest."""
    _line: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last_at: float = float("-inf")
    _free_at: float = float("-inf")
    _troubles: int = 0
    """How often in a row something failed in passing; requests that were under way together count once."""
    _troubled_at: float = float("-inf")
    _answered_at: float = float("-inf")

    async def answered(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """The answer to a request, made again while it fails in passing. Raises what `ask` raises, in the place of a
        Passing its error; where a part of the answer had come, Interrupted, once it is time to ask again."""
        failures, failed_at = 0, 0.0
        while True:
            await self._wait_in_line()
            asked_at = self.clock()
            try:
                answer = await ask()
            except Passing as failed:
                failed_at = failed_at if failures else self.clock()
                failures += 1
                pause = self._trouble(asked_at, failures, failed)
                waits = failed.limited and failures < FAILURES_MAX
                since = max(failed_at, self._answered_at) if waits else failed_at
                if self.clock() + pause - since > PATIENCE_S:
                    raise failed.error from failed
                await self.sleep(pause)
                if failed.heard:
                    raise Interrupted(failed.error.message, failed.error.code) from failed
            else:
                self._recover()
                return answer

    async def _wait_in_line(self) -> None:
        async with self._line:
            while (wait := max(self._free_at, self._told(), self._last_at + self.distance_s) - self.clock()) > 0:
                await self.sleep(wait)
            self._last_at = self.clock()

    def _told(self) -> float:
        """Until when another process has said that nobody is to ask. Nonsense, such as is left from before the machine
        was started anew, counts for nothing."""
        try:
            until = float(self.board.read_text()) if self.board else 0.0
        except (OSError, ValueError):
            return 0.0
        return until if until <= self.clock() + PATIENCE_S else 0.0

    def _tell(self, until: float) -> None:
        if self.board is None or until <= self._told():
            return
        draft = self.board.with_suffix(f".{os.getpid()}")
        try:
            draft.write_text(repr(until))
            draft.replace(self.board)
        except OSError as error:
            log.warning("other processes cannot be told that %s is not to be asked: %s", self.board, error)

    def _trouble(self, asked_at: float, failures: int, failed: Passing) -> float:
        """How long to pause after a failure. Where it concerns all requests, none goes before that, and then they go
        more slowly; of requests that were under way together the first failure does that."""
        news = asked_at >= self._troubled_at
        if news:
            self._troubles, self._troubled_at = self._troubles + 1, self.clock()
        pause = self._pause(max(failures, self._troubles), failed.retry_after_s)
        if failed.limited:
            self._free_at = max(self._free_at, self.clock() + pause)
            self._tell(self._free_at)
            if news:
                self.distance_s = min(DISTANCE_MAX_S, max(DISTANCE_FIRST_S, self.distance_s * 2))
        return pause

    def _pause(self, failures: int, retry_after_s: float | None) -> float:
        if retry_after_s is not None:
            return retry_after_s + self.chance.uniform(0, min(PAUSE_FIRST_S, retry_after_s / 4))
        return float(min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(failures - 1, 20)) * self.chance.uniform(0.5, 1))

    def _recover(self) -> None:
        self._troubles, self._answered_at = 0, self.clock()
        self.distance_s = self.distance_s * RELIEF if self.distance_s * RELIEF > DISTANCE_MIN_S else 0.0
