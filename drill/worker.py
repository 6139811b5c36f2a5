"""The process that attempts run in: the product's own `perform`, one attempt after the other.

Only the handlers are wrapped, to note when they were entered and how they ended, and to be killed there or in between.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from ..actors.attempt import Work, perform
from ..actors.loading import loaded
from ..actors.results import NoJsonForm, plain_error, recorded
from ..actors.tools import Handler
from ..store.errors import PerdureError
from ..store.events import ToolCallStarted
from .ledger import Ledger, Note
from .lines import file_of, traced
from .points import Striker, handler_key, line_key

NODE: Final = "drill"


class Worker:
    """Serves attempts to the life at the other end of a socket."""

    def __init__(self, life: socket.socket, striker: Striker, ledger: Ledger) -> None:
        self._life = life.makefile("rwb")
        self._striker, self._ledger = striker, ledger
        self._work: Work | None = None
        """The attempt whose handler has not been entered yet."""
        self._note: dict[str, Any] = {}

    def serve(self) -> None:
        """Attempt after attempt, until the life has ended. Does not return."""
        code = 1
        try:
            for line in self._life:
                self._attempt(Work.model_validate_json(line))
            code = 0
        finally:
            os._exit(code)

    def _attempt(self, work: Work) -> None:
        self._note = {"tool": work.name, "call": work.tool_call_id, "attempt": work.attempt}
        self._note["key"] = work.idempotency_key
        self._work = None if work.probe else work
        with contextlib.suppress(PerdureError):  # `perform` meets the same one and makes it the attempt's result
            for tool in loaded(work.agent.ref, work.agent.digest).agent.offered:
                if not isinstance(tool.handler, Watched):
                    tool.handler = Watched(tool.name, tool.handler, self)
        outcome = perform(work, self._begin, NODE)
        if work.probe:
            self._ledger.write(Note("probed", text=outcome.kind, **self._note))
        self._say({"outcome": outcome.model_dump()})

    def _begin(self, mark: ToolCallStarted | None) -> str | None:
        self._say({"mark": mark.model_dump() if mark else None})
        answer: str | None = json.loads(self._life.readline())
        return answer

    def _say(self, what: dict[str, Any]) -> None:
        self._life.write(json.dumps(what).encode() + b"\n")
        self._life.flush()

    # -- what a watched handler tells ---------------------------------------------------------------------

    def enter(self, tool: str) -> bool:
        """A handler is about to run. False when it is not the attempt's: handlers may call each other."""
        work = self._work
        if work is None or work.name != tool:
            return False
        self._work = None
        self._striker.reach("before", [handler_key(work.tool_call_id, work.attempt)])
        self._ledger.write(Note("entered", **self._note))
        return True

    @contextlib.contextmanager
    def inside(self, file: str | None) -> Iterator[None]:
        """The handler runs, which is written in this file."""
        call_id, attempt = self._note["call"], self._note["attempt"]
        try:
            with traced(file, lambda line: self._striker.reach("before", [line_key(call_id, attempt, line)])):
                yield
        except BaseException as error:
            self._ledger.write(Note("raised", text=type(error).__name__, **self._note))
            self._ended()
            raise

    def returned(self, value: Any) -> Any:
        try:
            text = recorded(value).content
        except NoJsonForm as error:
            text = plain_error("NoJsonForm", str(error))
        self._ledger.write(Note("returned", text=text, **self._note))
        self._ended()
        return value

    def _ended(self) -> None:
        self._striker.reach("after", [handler_key(self._note["call"], self._note["attempt"])])


class Watched:
    """A handler whose entry and end are noted, of whatever kind it is."""

    def __init__(self, name: str, handler: Handler, worker: Worker) -> None:
        self._name, self._handler, self._worker = name, handler, worker
        self._file = file_of(handler)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._worker.enter(self._name):
            return self._handler(*args, **kwargs)
        with self._worker.inside(self._file):
            value = self._handler(*args, **kwargs)
        if inspect.isgenerator(value):
            return self._items(value)
        if inspect.isasyncgen(value):
            return self._later_items(value)
        if inspect.isawaitable(value):
            return self._later(value)
        return self._worker.returned(value)

    async def _later(self, value: Any) -> Any:
        with self._worker.inside(self._file):
            value = await value
        return self._worker.returned(value)

    def _items(self, values: Iterator[Any]) -> Iterator[Any]:
        items = []
        with self._worker.inside(self._file):
            for item in values:
                items.append(item)
                yield item
        self._worker.returned(items)

    async def _later_items(self, values: AsyncIterator[Any]) -> AsyncIterator[Any]:
        items = []
        with self._worker.inside(self._file):
            async for item in values:
                items.append(item)
                yield item
        self._worker.returned(items)
