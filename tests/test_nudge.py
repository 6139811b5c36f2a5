"""The door at which commands knock: heard at once, silent where nobody listens, and never in the way."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.actors import nudge as doors
from perdure.actors.kernel import runtime_folder
from perdure.actors.nudge import NudgeDoor, door_path, sweep_door
from perdure.client.cluster import namespace_digest, store_url
from perdure.client.nudge import nudge


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store that need not exist, with a temporary folder of its own for sockets, which have short names."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        runtime_folder.cache_clear()
        yield str(tmp_path / "runs.db")
        runtime_folder.cache_clear()


def name_of(db: str) -> str:
    return namespace_digest(store_url(db))


class Listener:
    """A door, and how often it told news."""

    def __init__(self, db: str) -> None:
        self.heard = 0
        self._news = asyncio.Event()
        self.door = NudgeDoor(name_of(db), self._hear)

    def _hear(self) -> None:
        self.heard += 1
        self._news.set()

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self._news.wait()
        self._news.clear()


async def test_a_nudge_is_heard_and_many_at_once_are_one_piece_of_news(db: str) -> None:
    listener = Listener(db)
    nudge(db)
    await listener.wait()
    assert listener.heard == 1
    for _ in range(2000):  # more than the socket holds
        nudge(db)
    await listener.wait()
    assert listener.heard == 2
    listener.door.close()


async def test_where_nobody_listens_a_nudge_is_silent_and_leaves_no_trace(db: str) -> None:
    nudge(db)
    assert os.listdir(tempfile.gettempdir()) == []
    listener = Listener(db)
    path = door_path(name_of(db))
    os.rename(path, f"{path}.kept")
    listener.door.close()
    os.rename(f"{path}.kept", path)  # the socket of a process that was killed
    nudge(db)
    assert path.exists()


async def test_a_dead_supervisors_door_is_replaced_and_a_successors_stays(db: str) -> None:
    first, second = Listener(db), Listener(db)
    nudge(db)
    await second.wait()
    assert (first.heard, second.heard) == (0, 1)
    first.door.close()
    nudge(db)
    await second.wait()
    second.door.close()
    second.door.close()
    assert not door_path(name_of(db)).exists()


async def test_a_door_is_closed_where_somebody_has_tidied_up(db: str) -> None:
    listener = Listener(db)
    door_path(name_of(db)).unlink()
    listener.door.close()


async def test_a_path_too_long_for_a_socket_is_logged_and_nothing_else(
    db: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doors, "NAME", "n" * 100)
    with caplog.at_level(logging.WARNING):
        listener = Listener(db)
    assert "its sweep has to do" in caplog.text
    nudge(db)
    listener.door.close()


async def test_the_door_is_in_the_stores_runtime_folder(db: str) -> None:
    assert door_path(name_of(db)).parent == runtime_folder(name_of(db))


def test_the_door_of_a_killed_supervisor_is_swept_and_that_of_a_living_one_stays(db: str) -> None:
    path = door_path(name_of(db))
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.bind(str(path))
        sweep_door(name_of(db))
        assert path.exists()
    sweep_door(name_of(db))
    assert not path.exists()
    sweep_door(name_of(db))
