"""Calls over Unix sockets: answers, errors, lost connections, and what is left behind."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.nudge import door_path
from perdure.actors.wire import BlockingWire, Method, Unreachable, Wire, listen, socket_path, sweep_sockets
from perdure.store.errors import UsageError
from perdure.store.log import Refused


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as name:
        yield Path(name)


class Actor:
    """An actor that listens, and whose answers wait until they are let go."""

    def __init__(self) -> None:
        self.calls = 0
        self.called = asyncio.Event()
        self.free = asyncio.Event()

    @property
    def methods(self) -> dict[str, Method]:
        return {"echo": self.echo, "fail": self.fail, "wait": self.wait, "odd": self.odd}

    async def echo(self, *values: Any) -> Any:
        return values

    async def fail(self, error: Exception) -> None:
        raise error

    async def wait(self, value: int) -> int:
        self.calls += 1
        self.called.set()
        await self.free.wait()
        return value

    async def odd(self) -> Any:
        return lambda: None  # nothing that could be sent


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[tuple[Path, Actor, asyncio.Server]]:
    actor = Actor()
    server = await listen(folder / "a.sock", actor.methods)
    assert server
    yield folder / "a.sock", actor, server
    server.close()


Served = tuple[Path, Actor, asyncio.Server]


async def test_answers_find_their_calls_in_whatever_order_they_come(served: Served) -> None:
    path, actor, _ = served
    wire = Wire(path)
    waiting = [asyncio.create_task(wire.call("wait", number)) for number in range(50)]
    assert await wire.call("echo", "first", {"a": [1, None]}) == ("first", {"a": [1, None]})
    assert not any(task.done() for task in waiting)
    actor.free.set()
    assert await asyncio.gather(*waiting) == list(range(50))
    wire.close()


async def test_values_larger_than_what_a_socket_takes_at_once_arrive_whole(served: Served) -> None:
    wire, large = Wire(served[0]), "ä" * 3_000_000
    assert await asyncio.gather(*(wire.call("echo", large, n) for n in range(3))) == [(large, n) for n in range(3)]
    assert await asyncio.to_thread(BlockingWire(served[0]).call, "echo", large) == (large,)
    wire.close()


async def test_what_a_method_raises_is_raised_at_the_caller(served: Served) -> None:
    wire, blocking = Wire(served[0]), BlockingWire(served[0])
    refused = Refused("conflict", "the log has moved")
    with pytest.raises(UsageError, match="no such agent"):
        await wire.call("fail", UsageError("no such agent"))
    with pytest.raises(Refused) as caught:
        await asyncio.to_thread(blocking.call, "fail", refused)
    assert (caught.value.reason, caught.value.message) == ("conflict", "the log has moved")
    with pytest.raises(RuntimeError, match="an answer cannot travel"):
        await wire.call("odd")
    assert await wire.call("echo", 1) == (1,)
    assert await asyncio.to_thread(blocking.call, "echo", 2) == (2,)
    blocking.close()
    wire.close()


async def test_a_connection_that_is_lost_fails_every_call_on_it_and_the_next_call_makes_another(folder: Path) -> None:
    path = folder / "a.sock"
    heard = asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.close()
        heard.set()

    dying = await asyncio.start_unix_server(hang_up, str(path))
    wire = Wire(path)
    calls = await asyncio.gather(*(wire.call("echo", n) for n in range(3)), return_exceptions=True)
    assert heard.is_set()
    assert [type(call) for call in calls] == [Unreachable] * 3
    with pytest.raises(Unreachable):
        await asyncio.to_thread(BlockingWire(path).call, "echo", 1)
    dying.close()
    successor = await listen(path, Actor().methods)
    assert successor
    assert await wire.call("echo", 4) == (4,)
    wire.close()
    successor.close()


async def test_nobody_there_is_said_at_once(folder: Path) -> None:
    for path in (folder / "none.sock", _abandoned(folder / "dead.sock")):
        with pytest.raises(Unreachable):
            await Wire(path).call("echo")
        with pytest.raises(Unreachable):
            BlockingWire(path).call("echo")


class Interrupted(Exception):
    """Comes out of the blue, as KeyboardInterrupt does."""


class InterruptedWire(BlockingWire):
    """Is interrupted when the first answer is due."""

    interrupts = 1

    def _read(self, connection: socket.socket, count: int) -> bytes:
        if self.interrupts:
            self.interrupts -= 1
            raise Interrupted
        return super()._read(connection, count)


async def test_a_blocking_call_that_was_interrupted_leaves_no_answer_to_the_next(served: Served) -> None:
    wire = InterruptedWire(served[0])
    with pytest.raises(Interrupted):
        await asyncio.to_thread(wire.call, "echo", "the first")
    assert await asyncio.to_thread(wire.call, "echo", "the second") == ("the second",)
    wire.close()


async def test_where_no_socket_can_be_made_nobody_listens_and_that_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await listen(folder / ("long" * 40 + ".sock"), {}) is None
    assert "go through Ray" in caplog.text


async def test_sockets_of_the_dead_are_swept_and_those_of_the_living_stay(served: Served) -> None:
    path, _, _ = served
    dead, other = _abandoned(path.with_name("dead.sock")), path.with_name("a.1.lock")
    other.touch()
    sweep_sockets(path.parent)
    assert path.exists() and other.exists() and not dead.exists()


def test_actors_of_a_store_have_paths_of_their_own_in_the_stores_folder() -> None:
    journal, one, two = (socket_path("s", name) for name in ("journal", "run-d-plain-1a", "run-d-plain-2b"))
    assert len({journal, one, two}) == 3
    assert {path.parent for path in (journal, one, two)} == {door_path("s").parent}


def _abandoned(path: Path) -> Path:
    """The socket of a process that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
        dead.listen()
    return path
