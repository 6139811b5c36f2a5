"""Requests between two actors, many in few calls: a Courier asks, a Desk answers.

An actor call costs about a millisecond of CPU, and one that waits costs memory in the called actor. So requests of
one client travel together, and answers come back together by one long poll. Each request is answered once, at any
later time. Requests are idempotent by what they say: when the desk's process was replaced (its incarnation
changed), the courier sends again whatever is unanswered. Plain asyncio; the transport is passed in.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ..store.errors import PerdureError

log = logging.getLogger(__name__)
Numbered = tuple[int, Any]
POLL_S = 10.0
"""How long a desk keeps a poll waiting before it answers empty."""
POLLS_MAX = 64
"""How many calls of one client may wait at a desk; each costs the desk's process some 50 kB."""
CALL_TIMEOUT_S = 30.0
"""How long a courier waits for one call; a frozen process looks like a slow one for ever."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a desk returns: answers so far, by request number."""

    incarnation: str
    answers: list[Numbered] = field(default_factory=list)


class DeskFailure(PerdureError):
    """The desk met an error that its protocol does not know."""


class _Client:
    def __init__(self) -> None:
        self.running: dict[int, asyncio.Task[None]] = {}
        self.ready: dict[int, Any] = {}
        """Answers that the client has not confirmed."""
        self.outbox: list[int] = []
        self.polls: deque[asyncio.Future[bool]] = deque()
        """Calls that wait for an answer, the oldest first; True: there may be one, False: return without."""

    def wake(self) -> None:
        """There is an answer: the oldest poll takes it, with all others that are there by then."""
        while self.polls:
            poll = self.polls.popleft()
            if not poll.done():
                poll.set_result(True)
                return

    def release(self, most: int) -> None:
        """Have the oldest polls return without answers until at most that many wait."""
        while len(self.polls) > most:
            poll = self.polls.popleft()
            if not poll.done():
                poll.set_result(False)


class Desk:
    """The answering side. `serve` gets a payload and returns the answer, or raises a PerdureError for the asker."""

    def __init__(self, serve: Callable[[Any], Awaitable[Any]], poll_s: float = POLL_S) -> None:
        self.incarnation = uuid4().hex
        self._serve, self._poll_s = serve, poll_s
        self._clients: dict[str, _Client] = {}

    async def exchange(
        self, client: str, incarnation: str | None, requests: Sequence[Numbered], done: Sequence[int]
    ) -> Reply:
        """Take requests, return what is answered; waits for the first answer.

        A request that comes again means that the client has given up an earlier call, and nobody may hear what that
        one returns: so the polls before this one take no answers any more.
        """
        if incarnation is not None and incarnation != self.incarnation:
            return Reply(self.incarnation)
        state = self._clients.setdefault(client, _Client())
        for number in done:
            state.ready.pop(number, None)
        for number, payload in requests:
            if number in state.ready or number in state.running:
                state.release(0)
                state.outbox += [number] if number in state.ready else []
            else:
                state.running[number] = asyncio.create_task(self._work(state, number, payload))
        state.release(POLLS_MAX - 1)
        if not await self._answers_come(state):
            return Reply(self.incarnation)
        answers = [(number, state.ready[number]) for number in state.outbox if number in state.ready]
        state.outbox.clear()
        return Reply(self.incarnation, answers)

    async def _answers_come(self, state: _Client) -> bool:
        """Wait until the outbox holds something; False when this poll is to return without."""
        try:
            async with asyncio.timeout(self._poll_s):
                while not state.outbox:
                    poll: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                    state.polls.append(poll)
                    if not await poll:
                        return False
        except TimeoutError:
            state.outbox = list(state.ready)  # unconfirmed for so long: the reply that had it was lost
        return True

    async def _work(self, state: _Client, number: int, payload: Any) -> None:
        try:
            answer = await self._serve(payload)
        except PerdureError as error:
            answer = error
        except Exception as error:
            log.exception("a request failed")
            answer = DeskFailure(f"{type(error).__name__}: {error}")
        state.ready[number] = answer
        del state.running[number]
        state.outbox.append(number)
        state.wake()


Call = Callable[[str, str | None, list[Numbered], list[int]], Awaitable[Reply]]


class Courier:
    """The asking side. `call` carries one exchange; it may raise, and then is tried again after `pause_s`.

    `lost` tells a verdict from a hiccup: an exception for which it is true fails every request at once.
    """

    def __init__(
        self,
        call: Call,
        lost: Callable[[Exception], bool] = lambda error: False,
        pause_s: float = 0.1,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.name = uuid4().hex
        self._call, self._lost, self._pause_s, self._timeout_s = call, lost, pause_s, timeout_s
        self._incarnation: str | None = None
        self._number = 0
        self._waiting: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        self._unsent: list[int] = []
        self._done: list[int] = []
        self._polls: set[asyncio.Task[None]] = set()
        self._flushing = False
        self._failure: Exception | None = None

    def ask(self, payload: Any) -> asyncio.Future[Any]:
        """Send a request with the next exchange. The future gets the answer, or the error that the desk raised."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._failure:
            future.set_exception(self._failure)
            return future
        self._number += 1
        self._waiting[self._number] = (payload, future)
        self._unsent.append(self._number)
        self._flush_soon()
        return future

    def close(self) -> None:
        """Stop polling; unanswered requests are cancelled."""
        for task in self._polls:
            task.cancel()
        for _, future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._unsent and (self._polls or not self._waiting):
            return
        requests = [(number, self._waiting[number][0]) for number in self._unsent if number in self._waiting]
        self._unsent.clear()
        done, self._done = self._done, []
        task = asyncio.create_task(self._exchange(requests, done))
        self._polls.add(task)
        task.add_done_callback(self._polls.discard)
        task.add_done_callback(lambda _: self._flush_soon() if self._waiting else None)

    async def _exchange(self, requests: list[Numbered], done: list[int]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._call(self.name, self._incarnation, requests, done)
        except Exception as error:  # noqa: BLE001 - what may come is the transport's matter; `lost` sorts it
            if self._lost(error):
                self._fail(error)
                return
            await asyncio.sleep(self._pause_s)
            self._done += done
            self._unsent = sorted({*self._unsent, *self._waiting})
            return
        if reply.incarnation != self._incarnation:
            changed, self._incarnation = self._incarnation is not None, reply.incarnation
            if changed:
                self._unsent = sorted({*self._unsent, *self._waiting})
        for number, answer in reply.answers:
            self._done.append(number)
            _, future = self._waiting.pop(number, (None, None))
            if future and not future.done():
                if isinstance(answer, PerdureError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
