"""The signal to stop, given to real processes: what handlers of every kind make of it, and what is said of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.attempt import Outcome, Work
from perdure.actors.children import end_marked, marked
from perdure.actors.kernel import runtime_folder
from perdure.actors.stopping import forget, name_of, tell, tell_again
from perdure.store.events import AgentRef

from .fakes import STORE

AGENT = AgentRef(ref=f"{Path(__file__).parent / 'agents' / 'trees.py'}:agent", digest="d")
RUN = "r" * 20
GRACE_S = 1.0

CHILD = """
import sys
from perdure.actors import attempt, stopping
from perdure.actors.children import adopt_orphans
stopping.GRACE_S = float(sys.argv[2])
adopt_orphans()
def begin(mark):
    print("begins", flush=True)
    sys.stdin.readline()
for line in sys.argv[1].splitlines():
    print(attempt.perform(attempt.Work.model_validate_json(line), begin, "node").model_dump_json(), flush=True)
"""


class Attempt:
    """Attempts in a process of their own, one after the other."""

    def __init__(self, folder: Path, *calls: tuple[str, str], timeout_s: float = 30.0, grace_s: float = 30.0) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        lines = "\n".join(self._work(number, *call).model_dump_json() for number, call in enumerate(calls, 1))
        argv = [sys.executable, "-c", CHILD, lines, str(grace_s)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.says("begins")

    def _work(self, attempt: int, name: str, do: str) -> Work:
        return Work(
            run_id=RUN,
            turn_index=0,
            tool_call_id="t0c0",
            attempt=attempt,
            name=name,
            arguments=json.dumps({"do": do}),
            effect="read_only",
            idempotency_key="key",
            agent=AGENT,
            metadata={"dir": str(self.folder)},
            timeout_s=self.timeout_s,
            store=STORE,
        )

    def says(self, word: str) -> None:
        assert self.process.stdout and self.process.stdout.readline() == f"{word}\n"

    def go(self) -> None:
        """Give it leave to begin."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def begun(self, kind: str = "begin") -> None:
        """Wait until the handler has noted that."""
        ledger, end = self.folder / "ledger", time.monotonic() + 20
        while not ledger.exists() or f"{kind}," not in ledger.read_text():
            assert time.monotonic() < end, f"no {kind} was noted"
            time.sleep(0.005)

    def stop(self) -> None:
        """Tell the first attempt to stop, until it has heard."""
        who = (STORE, RUN, "t0c0", 1, self.process.pid)
        tell(*who)
        while (runtime_folder(STORE) / name_of(RUN, "t0c0", 1)).exists():
            time.sleep(0.1)
            tell_again(*who)

    def outcome(self) -> Outcome:
        assert self.process.stdout
        return Outcome.model_validate_json(self.process.stdout.readline())


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    runtime_folder.cache_clear()
    yield
    runtime_folder.cache_clear()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Any]:
    made: list[Attempt] = []

    def start(*calls: tuple[str, str], **times: float) -> Attempt:
        made.append(Attempt(tmp_path, *calls, **times))
        return made[-1]

    yield start
    for attempt in made:
        attempt.process.kill()
        attempt.process.communicate()
    assert end_marked(STORE)


@pytest.mark.parametrize(("name", "do"), [("read", "begin,sleep"), ("read", "run"), ("wait", ""), ("read", "drop")])
def test_a_handler_is_interrupted_in_whatever_it_waits_for(begin: Any, name: str, do: str) -> None:
    attempt = begin((name, do))
    attempt.go()
    attempt.begun()
    attempt.stop()
    began = time.monotonic()
    outcome = attempt.outcome()
    assert time.monotonic() - began < 5
    assert marked(STORE) == []
    assert (outcome.kind, outcome.is_error) == ("stopped", True)


@pytest.mark.parametrize("do", ["begin,look", "begin,late"])
def test_what_a_handler_returns_in_spite_of_it_is_its_result(begin: Any, do: str) -> None:
    attempt = begin(("read", do))
    attempt.go()
    attempt.begun()
    attempt.stop()
    assert (outcome := attempt.outcome()).kind == "result" and json.loads(outcome.content) == do


def test_a_handler_that_goes_on_is_killed_when_the_grace_time_is_over(begin: Any) -> None:
    attempt = begin(("read", "begin,ignore"), grace_s=GRACE_S)
    attempt.go()
    attempt.begun()
    attempt.stop()
    began = time.monotonic()
    attempt.begun("interrupted")
    assert attempt.process.wait(20) == -signal.SIGKILL
    assert time.monotonic() - began >= GRACE_S / 2


def test_a_timeout_that_comes_where_exceptions_are_dropped_comes_again(begin: Any) -> None:
    attempt = begin(("read", "drop"), timeout_s=0.5)
    attempt.go()
    assert attempt.outcome().kind == "timeout"


def test_an_attempt_that_is_told_before_its_handler_begins_does_not_begin(begin: Any, tmp_path: Path) -> None:
    attempt = begin(("read", "begin"))
    attempt.stop()
    attempt.go()
    assert attempt.outcome().kind == "spared"
    assert not (tmp_path / "ledger").exists()


def test_a_signal_for_another_attempt_is_none_and_the_next_attempt_is_not_disturbed(begin: Any) -> None:
    attempt = begin(("read", "begin,sleep"), ("read", "begin"))
    attempt.go()
    attempt.begun()
    tell(STORE, RUN, "t0c0", 7, attempt.process.pid)
    forget(STORE, RUN, "t0c0", 7)
    attempt.stop()
    assert (outcome := attempt.outcome()).kind == "stopped", outcome
    attempt.says("begins")
    tell(STORE, RUN, "t0c0", 1, attempt.process.pid)
    attempt.go()
    assert attempt.outcome().kind == "result"
    assert attempt.process.wait(20) == 0


def test_a_child_that_was_forked_and_comes_back_from_the_handler_answers_nobody(begin: Any) -> None:
    attempt = begin(("read", "clone"), ("read", "begin"))
    attempt.go()
    assert json.loads(attempt.outcome().content) == "clone"
    attempt.says("begins")
    attempt.go()
    assert json.loads(attempt.outcome().content) == "begin"


def test_a_process_that_does_not_listen_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        tell(STORE, RUN, "t0c0", 1, stranger.pid)
        assert stranger.poll() is None
        assert not (runtime_folder(STORE) / name_of(RUN, "t0c0", 1)).exists()
        stranger.kill()
    tell(STORE, RUN, "t0c0", 1, stranger.pid)
