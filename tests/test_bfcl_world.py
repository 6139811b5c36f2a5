"""The benchmark's stored world, tried on a toy service so that the benchmark's data set need not be installed."""

import importlib
import importlib.util
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.benchmarks.bfcl import data
from perdure.benchmarks.bfcl.world import LEDGER, ReadChangedWorld, World

Make = Callable[[], dict[str, Any]]

TOY = '''
import random

class Tray:
    def __init__(self, lid=None):
        self.lid, self.items = lid, []

class Kitchen:
    """Has what the data set's classes have: parent links, shared objects, random numbers, a leaking default."""
    def __init__(self):
        self.top = Tray()
        self.below = Tray(self.top)
        self.total, self.tagged, self._random = 0, {}, random.Random(7)

    def add(self, amount):
        self.total += amount
        self.top.items.append(amount)
        return {"total": self.total}

    def share(self):
        self.below.items = self.top.items

    def tag(self, number, tags=[]):
        self.tagged[number] = tags
        tags.append("t")
        return list(tags)

    def roll(self):
        return self._random.randint(1, 10**9)

    def break_halfway(self):
        self.total = 99
        raise ValueError("broken")

    def look(self):
        return self.total

def make():
    return {"kitchen": Kitchen()}
'''

KILL_AT = """
import os, signal, sqlite3, sys
from pathlib import Path
from perdure.benchmarks.bfcl.world import World
import toy_kitchen

world = World.open(Path(sys.argv[1]), "r", toy_kitchen.make)
left = int(sys.argv[2])
def fault(statement):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
world._db.set_trace_callback(fault)
world.apply("second", "kitchen", "add", {"amount": 10})
print("applied")
"""

STATEMENTS = 5  # BEGIN, SELECT, UPDATE, INSERT, COMMIT


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy_kitchen.py").write_text(TOY)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("toy_kitchen", None)


@pytest.fixture
def make(toy_folder: Path) -> Make:
    made: Make = importlib.import_module("toy_kitchen").make
    return made


def add(folder: Path, make: Make, key: str, amount: int) -> Any:
    with World.open(folder, "r", make) as world:
        return world.apply(key, "kitchen", "add", {"amount": amount})


def never() -> dict[str, Any]:
    raise AssertionError("the world was made a second time")


def test_a_world_is_made_once_and_keeps_its_state_between_openings(tmp_path: Path, make: Make) -> None:
    assert add(tmp_path, make, "a", 1) == {"total": 1}
    assert add(tmp_path, never, "b", 2) == {"total": 3}


def test_the_record_tells_what_happened_and_what_it_answered(tmp_path: Path, make: Make) -> None:
    add(tmp_path, make, "a", 1)
    with World.open(tmp_path, "r", never) as world:
        assert [line.result for line in world.applied("a")] == [{"total": 1}]
        assert world.applied("b") == []
    assert (tmp_path / LEDGER).read_text() == "r,a,add\n"


def test_a_second_call_with_the_same_key_really_happens_again(tmp_path: Path, make: Make) -> None:
    add(tmp_path, make, "a", 1)
    assert add(tmp_path, make, "a", 1) == {"total": 2}
    with World.open(tmp_path, "r", never) as world:
        assert len(world.applied("a")) == 2
    assert len((tmp_path / LEDGER).read_text().splitlines()) == 2


def test_a_read_leaves_no_record(tmp_path: Path, make: Make) -> None:
    add(tmp_path, make, "a", 5)
    with World.open(tmp_path, "r", never) as world:
        assert world.read("kitchen", "look", {}) == 5
        assert len(world.applied()) == 1


def test_a_read_that_changes_its_world_is_refused_even_if_only_a_random_generator_moved(
    tmp_path: Path, make: Make
) -> None:
    with World.open(tmp_path, "r", make) as world:
        before = world.snapshot()
        with pytest.raises(ReadChangedWorld, match=r"kitchen\.roll"):
            world.read("kitchen", "roll", {})
        assert world.snapshot() == before


def test_calls_through_a_stored_world_end_like_calls_on_live_objects(tmp_path: Path, make: Make) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("add", {"amount": 1}), ("share", {}), ("add", {"amount": 2})]
    calls += [("roll", {}), ("roll", {}), ("tag", {"number": 1})]
    with World.open(tmp_path, "at once", make) as world:
        together = [world.apply(str(n), "kitchen", *call) for n, call in enumerate(calls)]
        at_once = world.snapshot()
    one_by_one = []
    for number, call in enumerate(calls):
        with World.open(tmp_path, "one by one", make) as world:
            one_by_one.append(world.apply(str(number), "kitchen", *call))
    with World.open(tmp_path, "one by one", never) as world:
        assert (one_by_one, world.snapshot()) == (together, at_once)


def test_a_default_list_does_not_leak_into_the_next_call(tmp_path: Path, make: Make) -> None:
    for number in range(3):
        with World.open(tmp_path, "r", make) as world:
            assert world.apply(str(number), "kitchen", "tag", {"number": number}) == ["t"]


def test_an_exception_is_an_answer_and_what_it_changed_before_is_kept(tmp_path: Path, make: Make) -> None:
    with World.open(tmp_path, "r", make) as world:
        answer = world.apply("a", "kitchen", "break_halfway", {})
        assert answer == {"error": "Error during execution: broken"}
        assert world.read("kitchen", "look", {}) == 99
        assert [line.result for line in world.applied("a")] == [answer]


def test_changes_from_several_connections_are_all_kept(tmp_path: Path, make: Make) -> None:
    def ten(name: str) -> None:
        for number in range(10):
            add(tmp_path, make, f"{name}{number}", 1)

    threads = [threading.Thread(target=ten, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with World.open(tmp_path, "r", never) as world:
        assert (world.read("kitchen", "look", {}), len(world.applied())) == (20, 20)


@pytest.mark.parametrize("statement", range(1, STATEMENTS + 2))
def test_a_kill_at_any_statement_leaves_state_and_record_agreeing(
    tmp_path: Path, toy_folder: Path, make: Make, statement: int
) -> None:
    add(tmp_path, make, "first", 1)
    command = [sys.executable, "-c", KILL_AT, str(tmp_path), str(statement)]
    ended = subprocess.run(command, cwd=toy_folder, capture_output=True, text=True, timeout=60, check=False)
    if statement <= STATEMENTS:
        assert ended.returncode == -signal.SIGKILL, "the fault did not fire"
    else:
        assert ended.stdout == "applied\n", ended.stderr
    with World.open(tmp_path, "r", never) as world:
        happened = bool(world.applied("second"))
        assert happened == (statement > STATEMENTS)
        assert world.read("kitchen", "look", {}) == (11 if happened else 1)
        world.apply("third", "kitchen", "add", {"amount": 100})
        assert [line.key for line in world.applied()] == ["first", *(["second"] if happened else []), "third"]


def test_a_ground_truth_call_is_read_by_parameter_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(self: object, source: str, destination: str, force: bool = False) -> None: ...

    monkeypatch.setattr(data, "methods", lambda api: {"move": move} if api == "Files" else {})
    call = data._call("move('a.txt', destination=['b', -1.5])", ("Posts", "Files"))
    assert call == data.Call("Files", "move", {"source": "a.txt", "destination": ["b", -1.5]})


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.DatasetUnavailable, match=r"pip install --no-deps bfcl-eval==2026\.3\.23 mpmath"):
        data.tasks.__wrapped__()
