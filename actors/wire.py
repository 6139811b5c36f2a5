"""Calls between processes of one machine, over Unix sockets.

A Ray actor call costs about a millisecond of CPU on each side, one over a socket a tenth of that. So an actor that is
called for every turn of every run also listens at a socket in its store's runtime folder, where only its user can go.
Whoever is on another machine, or finds nobody there, calls the actor through Ray. With a connection no more is lost
than with a Ray call: an answer. All that is called this way is idempotent and is called again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from .courier import Call, Numbered, Reply
from .nudge import door_path, sweep_socket

log = logging.getLogger(__name__)
Method = Callable[..., Awaitable[Any]]
SUFFIX: Final = ".sock"
_LENGTH: Final = struct.Struct("!I")


class Unreachable(ConnectionError):
    """Nobody answers at a socket, or not any more: the call may or may not have been carried out."""


def socket_path(store: str, actor: str) -> Path:
    """Where an actor of a store listens; by the last part of its name, since a socket's path must be short."""
    return door_path(store).with_name(actor.rpartition("-")[2] + SUFFIX)


def sweep_sockets(folder: Path) -> None:
    """Delete the sockets of actors that are gone."""
    for path in folder.glob("*" + SUFFIX):
        sweep_socket(path, socket.SOCK_STREAM)


def _frame(value: Any) -> bytes:
    body = pickle.dumps(value, protocol=5)
    return _LENGTH.pack(len(body)) + body


class _Frames(asyncio.Protocol):
    """Takes a stream apart into the values that were sent."""

    def __init__(self) -> None:
        self._received = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start = 0
        while len(received) >= (body := start + _LENGTH.size):
            end = body + _LENGTH.unpack_from(received, start)[0]
            if len(received) < end:
                break
            self.heard(pickle.loads(memoryview(received)[body:end].toreadonly()))
            start = end
        if start:
            self._received = received[start:]

    def heard(self, value: Any) -> None:
        raise NotImplementedError


class _Served(_Frames):
    def __init__(self, methods: Mapping[str, Method]) -> None:
        super().__init__()
        self._methods = methods
        self._working: set[asyncio.Task[None]] = set()

    def heard(self, value: Any) -> None:
        task = asyncio.create_task(self._answer(*value))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        answer: Any = None
        failure: Exception | None = None
        try:
            answer = await self._methods[method](*arguments)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            failure = error
        try:
            frame = _frame((number, answer, failure))
        except Exception as error:  # noqa: BLE001 - as above
            frame = _frame((number, None, RuntimeError(f"an answer cannot travel: {type(error).__name__}: {error}")))
        if not self.transport.is_closing():
            self.transport.write(frame)


def _cleared(path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return str(path)


async def listen(path: Path, methods: Mapping[str, Method]) -> asyncio.Server | None:
    """Serve these methods at a socket, in the place of whoever listened there before. None, and a line in the log,
    where that is impossible (the path may be too long for a socket): then everybody calls through Ray."""
    try:
        return await asyncio.get_running_loop().create_unix_server(lambda: _Served(methods), _cleared(path))
    except OSError as error:
        log.warning("calls on this machine go through Ray: no socket at %s: %s", path, error)
        return None


class _Line(_Frames):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, asyncio.Future[Any]] | None = {}
        """None once the connection is lost."""

    def heard(self, value: Any) -> None:
        number, answer, error = value
        future = self.waiting.pop(number, None) if self.waiting else None
        if future and not future.done():
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        waiting, self.waiting = self.waiting or {}, None
        for future in waiting.values():
            if not future.done():
                future.set_exception(Unreachable("the connection was lost"))


class Wire:
    """Calls to one actor, from the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._line: _Line | None = None
        self._number = 0
        self._connecting = asyncio.Lock()

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the actor's method returns. Raises what it raises, and Unreachable."""
        line = self._line
        if line is None or line.waiting is None:
            line = await self._connected()
        assert line.waiting is not None
        self._number += 1
        number = self._number
        line.waiting[number] = answer = asyncio.get_running_loop().create_future()
        line.transport.write(_frame((number, method, arguments)))
        return await answer

    async def call_or(self, remote: Method, method: str, *arguments: Any) -> Any:
        """The same, by `remote` where nobody answers here."""
        try:
            return await self.call(method, *arguments)
        except Unreachable:
            return await remote(*arguments)

    async def _connected(self) -> _Line:
        async with self._connecting:
            if self._line and self._line.waiting is not None:
                return self._line
            try:
                _, line = await asyncio.get_running_loop().create_unix_connection(_Line, self._path)
            except OSError as error:
                raise Unreachable(str(error)) from error
            self._line = line
            return line

    def close(self) -> None:
        if self._line and self._line.waiting is not None:
            self._line.transport.close()


def exchanges(wire: Wire, actor: Callable[[], Any]) -> Call:
    """How a courier reaches an actor's desk: by this wire, else by the handle that `actor` gives."""

    async def call(name: str, incarnation: str | None, requests: list[Numbered], done: list[int]) -> Reply:
        about = (name, incarnation, requests, done)
        reply: Reply = await wire.call_or(actor().exchange.remote, "exchange", *about)
        return reply

    return call


class BlockingWire:
    """Calls to one actor, from a thread that has nothing else to do meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._pid = 0
        self._socket: socket.socket | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """What the actor's method returns. Raises what it raises, and Unreachable."""
        try:
            connection = self._connected()
            connection.sendall(_frame((0, method, arguments)))
            length = _LENGTH.unpack(self._read(connection, _LENGTH.size))[0]
            _, answer, error = pickle.loads(self._read(connection, length))
        except OSError as error:
            self.close()
            raise Unreachable(str(error)) from error
        except BaseException:  # half of an answer must not be taken for that to the next call
            self.close()
            raise
        if error is not None:
            raise error
        return answer

    def _connected(self) -> socket.socket:
        if self._socket is None or self._pid != os.getpid():
            self._socket, self._pid = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), os.getpid()
            self._socket.connect(self._path)
        return self._socket

    def _read(self, connection: socket.socket, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            piece = connection.recv(count - len(received))
            if not piece:
                raise Unreachable("the connection was lost")
            received += piece
        return bytes(received)

    def close(self) -> None:
        connection, self._socket = self._socket, None
        if connection:
            connection.close()
