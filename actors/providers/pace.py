"""How fast requests go to one provider, and when one is made again. All runs of a process share one Pace.

An overloaded provider, or a rate limit, is news for all of them: none asks before the time that the provider named is
over, and from then on requests keep a distance, which doubles with every such news and shrinks with every answer. A
request that fails in passing is made again after a pause that grows with its failures. Neither costs a turn.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ..model import Interrupted, ModelError

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
"""How long a request is made again that fails in passing."""


class Passing(Exception):
    """A request failed in a way that passes. `error` is what to say once patience is over, `limited` says that the
    provider has its trouble with all requests, and `heard` that a part of the answer had come."""

    def __init__(self, error: ModelError, limited: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(error.message)
        self.error, self.limited, self.retry_after_s = error, limited, retry_after_s
        self.heard = False


@dataclass
class Pace:
    """The pace of one provider. Times in seconds of `clock`."""

    clock: Callable[[], float] = time.monotonic
    sleep: Sleep = asyncio.sleep
    chance: random.Random = field(default_factory=random.Random)
    distance_s: float = 0.0
    _free_at: float = 0.0
    _slowed_at: float = float("-inf")
    _troubles: int = 0
    """How often in a row something failed in passing; requests that were under way together count once."""
    _troubled_at: float = float("-inf")

    async def answered(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """The answer to a request, made again while it fails in passing. Raises what `ask` raises, in the place of a
        Passing its error; where a part of the answer had come, Interrupted, once it is time to ask again."""
        begun, failures = self.clock(), 0
        while True:
            await self._wait_for_turn()
            asked_at = self.clock()
            try:
                answer = await ask()
            except Passing as failed:
                failures += 1
                pause = self._pause(max(failures, self._troubles), failed.retry_after_s)
                self._slow_down(asked_at, pause if failed.limited else 0)
                if self.clock() + pause - begun > PATIENCE_S:
                    raise failed.error from failed
                await self.sleep(pause)
                if failed.heard:
                    raise Interrupted(failed.error.message, failed.error.code) from failed
            else:
                self._recover()
                return answer

    async def _wait_for_turn(self) -> None:
        """Until this request may go. Each takes its place in the row at once, so that they do not go all together."""
        while (wait := self._free_at - self.clock()) > 0 or self.distance_s:
            place = max(self._free_at, self.clock())
            self._free_at = place + self.distance_s
            slowed_at = self._slowed_at
            if (wait := place - self.clock()) > 0:
                await self.sleep(wait)
            if slowed_at == self._slowed_at:
                return

    def _pause(self, failures: int, retry_after_s: float | None) -> float:
        if retry_after_s is not None:
            return retry_after_s + self.chance.uniform(0, min(PAUSE_FIRST_S, retry_after_s / 4))
        return float(min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (failures - 1)) * self.chance.uniform(0.5, 1))

    def _slow_down(self, asked_at: float, pause: float) -> None:
        """Let nobody ask before the pause is over, and then more slowly; requests that were under way when that was
        last done are no news."""
        if asked_at >= self._troubled_at:
            self._troubles, self._troubled_at = self._troubles + 1, self.clock()
        if not pause:
            return
        self._free_at = max(self._free_at, self.clock() + pause)
        if asked_at >= self._slowed_at:
            self._slowed_at = self.clock()
            self.distance_s = min(DISTANCE_MAX_S, max(DISTANCE_FIRST_S, self.distance_s * 2))

    def _recover(self) -> None:
        self._troubles = 0
        self.distance_s = self.distance_s * RELIEF if self.distance_s * RELIEF > DISTANCE_MIN_S else 0.0
