"""The answer that the owner of a run is receiving, and when a piece of it is worth an append.

What has come is made durable, so that a crash or a cancel keeps it and people can watch: what half a second has
brought, and more at once where a process receives many answers. A call that is quicker than that appends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ..store.events import AssistantDelta
from ..store.secrets import settled, starred
from .model import ModelReply, Stream
from .results import valid_text

PIECE_S: Final = 0.5
"""How long what has come waits for more, at least."""
APPENDS_PER_S: Final = 20
"""How many pieces a process appends in a second, at most."""
SEEN: Final = 8192
"""How much of what was said is looked at again, since a secret may have begun there."""


class Reception:
    """One model call. `due` is called when there is a piece to append."""

    waiting = 0
    """Calls of this process of which something has come that is not appended."""

    def __init__(self, turn_index: int, due: Callable[[], None]) -> None:
        self.turn_index, self._due = turn_index, due
        self.stream = Stream(self._heard)
        self.is_due = False
        self._kept: AssistantDelta | None = None
        self._reply: ModelReply | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def piece(self, last: bool = False) -> AssistantDelta | None:
        """What has come since the piece that was kept; None if that is nothing. The last one of a call of which nothing
        was kept is a piece all the same: it says that the call was made."""
        kept, reply = self._kept, self._reply
        offset = kept.offset + len(kept.text) if kept else 0
        text = self._sayable(valid_text(self.stream.received or (reply.text if reply else "")), offset)
        told = (reply.usage, True) if reply else (self.stream.told, False)
        known = (kept.usage, kept.complete) if kept else (None, False)
        if not text and told == known and (kept or not last):
            return None
        return AssistantDelta(turn_index=self.turn_index, offset=offset, text=text, usage=told[0], complete=told[1])

    def _sayable(self, received: str, offset: int) -> str:
        """What of the text can be said by now. One that may be the beginning of a secret waits for the rest of it."""
        end = len(received) if self._over else settled(received)
        start = max(0, offset - SEEN)
        return starred(received[start:], cut=self._reply is None)[offset - start : max(offset, end) - start]

    def keep(self, piece: AssistantDelta) -> None:
        """The piece is durable."""
        self._kept, self.is_due = piece, False
        if self.piece():
            self._heard()

    def end(self, reply: ModelReply | None = None) -> None:
        """The call is over; nothing is due any more."""
        self._over, self.is_due, self._reply = True, False, self._reply or reply
        self._disarm()

    def _heard(self) -> None:
        if self._timer is None and not self.is_due and not self._over:
            Reception.waiting += 1
            pause_s = max(PIECE_S, Reception.waiting / APPENDS_PER_S)
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._fire)

    def _fire(self) -> None:
        self._disarm()
        self.is_due = self.piece() is not None
        if self.is_due:
            self._due()

    def _disarm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
            Reception.waiting -= 1
