"""One attempt of a tool call: handlers of every kind, and every way in which one can end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.attempt import Outcome, Work, perform
from perdure.actors.children import MARK, forked
from perdure.actors.kernel import left_result, prove_dead
from perdure.store.events import AgentRef, ToolCallStarted

from .fakes import STORE
from .odd_tools import RAISED, UNRECORDABLE

AGENT = AgentRef(ref=f"{Path(__file__).with_name('odd_tools.py')}:agent", digest="d")


def work(name: str, probe: bool = False, **arguments: Any) -> Work:
    return Work(
        run_id="r" * 20,
        turn_index=0,
        tool_call_id="t0c0",
        attempt=1,
        name=name,
        arguments=json.dumps(arguments),
        effect="non_idempotent" if name == "pay" else "read_only",
        idempotency_key="the key",
        agent=AGENT,
        metadata={},
        timeout_s={"sleeps": 0.05, "loops": 0.05, "sleeps_async": 0.05, "blocks_its_loop": 0.05}.get(name, 30.0),
        store=STORE,
        probe=probe,
    )


class Gate:
    """A journal that gives leave, or does not, and remembers what it was asked."""

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.asked: list[ToolCallStarted | None] = []

    def __call__(self, mark: ToolCallStarted | None) -> str | None:
        self.asked.append(mark)
        return self.refusal


@pytest.fixture(autouse=True)
def private_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(MARK, "")  # which attempts leave as it is, for the next one


def run(name: str, **arguments: Any) -> Outcome:
    return perform(work(name, **arguments), Gate(), "node")


def value(outcome: Outcome) -> Any:
    assert (outcome.kind, outcome.is_error) == ("result", False), outcome
    return json.loads(outcome.content)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", 2),
        ("asynchronous", 2),
        ("behind_a_decorator", 2),
        ("partial", 2),
        ("callable_object", 2),
        ("generator", [1, 2]),
        ("async_generator", [1, 2]),
        ("decimal", "2"),
    ],
)
def test_a_handler_of_any_kind_really_runs_and_gives_its_value(name: str, expected: Any) -> None:
    assert value(run(name, x=1)) == expected


def test_a_handler_knows_its_key_its_attempt_and_its_deadline() -> None:
    assert value(run("context", x=1)) == {"key": "the key", "attempt": 1, "ahead": True}


@pytest.mark.parametrize("name", ["plain", "pay", "raises"])
def test_an_outcome_says_where_its_handler_ran_and_for_how_long(name: str) -> None:
    began = time.monotonic()
    outcome = run(name, **{"raises": {"kind": "ValueError"}, "pay": {"how": ""}}.get(name, {"x": 1}))
    assert (outcome.node, outcome.pid) == ("node", os.getpid())
    assert outcome.took_s is not None and 0 <= outcome.took_s <= time.monotonic() - began


@pytest.mark.parametrize("refusal", ["no", None])
def test_an_attempt_whose_handler_did_not_run_says_nothing_of_that(refusal: str | None) -> None:
    outcome = perform(work("plain", x=1 if refusal else "many"), Gate(refusal), "node")
    assert (outcome.node, outcome.pid, outcome.took_s) == ("", 0, None)


def test_the_result_that_is_left_in_the_lock_file_says_so_too() -> None:
    gate = Gate()
    outcome = perform(work("pay", how=""), gate, "node")
    (mark,) = gate.asked
    assert mark
    assert Outcome.model_validate_json(left_result(mark.lock) or b"") == outcome


def test_a_generator_without_end_is_an_error_and_not_a_hang() -> None:
    outcome = run("endless_generator", x=1)
    assert outcome.is_error and "yielded over" in outcome.content


@pytest.mark.parametrize("kind", UNRECORDABLE)
@pytest.mark.filterwarnings("ignore")
def test_a_result_without_a_json_form_is_an_error_that_names_its_type(kind: str) -> None:
    outcome = run("unrecordable", kind=kind)
    assert (outcome.kind, outcome.is_error) == ("result", True)
    error = json.loads(outcome.content)
    names = {"file": "TextIOWrapper", "lambda": "function", "cursor": "Cursor", "coroutine": "coroutine"}
    assert error["error"] == "NoJsonForm" and names.get(kind, "lock") in error["message"]


@pytest.mark.parametrize("name", ["raises", "raises_async"])
@pytest.mark.parametrize("kind", [kind for kind in RAISED if kind != "SystemExit"])
def test_whatever_a_handler_raises_is_its_error_result(name: str, kind: str) -> None:
    outcome = run(name, kind=kind)
    assert (outcome.kind, outcome.is_error) == ("result", True)
    error = json.loads(outcome.content)
    hidden = name == "raises_async" and kind == "StopIteration"  # which Python itself turns into a RuntimeError
    assert error["error"] == ("RuntimeError" if hidden else kind)
    assert "odd_tools.py" in error["traceback"]


@pytest.mark.parametrize("name", ["raises", "raises_async"])
def test_a_handler_that_exits_is_no_result_and_its_code_is_told(name: str) -> None:
    outcome = run(name, kind="SystemExit")
    assert (outcome.kind, outcome.is_error) == ("exited", True)
    assert "code 3" in outcome.content


@pytest.mark.parametrize("name", ["sleeps", "loops", "sleeps_async", "blocks_its_loop"])
def test_a_handler_is_interrupted_at_its_timeout(name: str) -> None:
    outcome = run(name)
    assert (outcome.kind, outcome.is_error) == ("timeout", True)
    assert "0.05 s" in outcome.content


def test_arguments_that_do_not_fit_are_an_error_and_nothing_begins() -> None:
    gate = Gate()
    outcome = perform(work("plain", x="many"), gate, "node")
    assert outcome.is_error and "InvalidArguments" in outcome.content and gate.asked == []


def test_a_validator_that_breaks_is_an_error_and_nothing_begins() -> None:
    gate = Gate()
    outcome = perform(work("odd_validator", x=1), gate, "node")
    assert outcome.is_error and "this validator is broken" in outcome.content and gate.asked == []


def test_a_tool_that_the_agent_does_not_have_any_more_is_an_error() -> None:
    outcome = run("gone")
    assert outcome.is_error and "no tool 'gone' any more" in outcome.content


def test_without_leave_no_handler_runs(tmp_path: Path) -> None:
    for name, arguments in (("plain", {"x": 1}), ("pay", {"how": ""})):
        outcome = perform(work(name, **arguments), Gate("superseded"), "node")
        assert outcome == Outcome(kind="refused", content="superseded")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "a lock file was left behind"


@pytest.mark.parametrize(("how", "is_error"), [("", False), ("fail", True)])
def test_an_effect_is_marked_before_and_leaves_its_result_for_whoever_comes_after(how: str, is_error: bool) -> None:
    gate = Gate()
    outcome = perform(work("pay", how=how), gate, "node")
    (mark,) = gate.asked
    assert mark is not None and mark.pid == os.getpid() and mark.node == "node" and mark.hold_s > 30.0
    left = left_result(mark.lock)
    assert left is not None and Outcome.model_validate_json(left) == outcome and outcome.is_error is is_error
    assert prove_dead(mark.lock, timeout_s=0)


def test_a_read_is_not_marked_but_asks_leave() -> None:
    gate = Gate()
    perform(work("plain", x=1), gate, "node")
    assert gate.asked == [None]


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("happened", "happened", '{"by":"the key"}'),
        ("did not", "did_not_happen", ""),
        ("unknown", "unknown", "the bank is closed"),
        ("lock", "unknown", "cannot be recorded"),
        ("nonsense", "unknown", "returns Settled, not bool"),
        ("raises", "unknown", "KeyboardInterrupt"),
    ],
)
def test_a_probe_answers_or_it_is_unknown(how: str, kind: str, text: str) -> None:
    gate = Gate()
    outcome = perform(work("pay", probe=True, how=how), gate, "node")
    assert outcome.kind == kind and text in outcome.content and gate.asked == []
    assert Outcome.model_validate_json(outcome.model_dump_json()) == outcome


# -- in a process of its own ------------------------------------------------------------------------------

CHILD = """
import sys
from perdure.actors import attempt
attempt.GRACE_S = float(sys.argv[2])
def begin(mark):
    if mark: print(mark.lock, flush=True)
for line in sys.argv[1].splitlines():
    print(attempt.perform(attempt.Work.model_validate_json(line), begin, "node").model_dump_json(), flush=True)
"""


def process(*works: Work, grace_s: float = 5.0) -> tuple[int, list[str]]:
    """Perform attempts in one process, one after the other; its exit code and what it printed."""
    lines = "\n".join(work.model_dump_json() for work in works)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, lines, str(grace_s)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(("how", "code"), [("exit", 1), ("kill", -9)])
def test_a_process_that_dies_in_its_effect_leaves_a_free_lock_and_no_result(how: str, code: int) -> None:
    returned, (lock,) = process(work("pay", how=how))
    assert returned == code
    assert left_result(lock) is None
    assert prove_dead(lock, timeout_s=0)


@pytest.mark.parametrize("how", ["stop", "stuck"])
def test_the_kernel_ends_an_attempt_that_nothing_else_can_end(how: str) -> None:
    late = work("pay", how=how).model_copy(update={"timeout_s": 0.2})
    returned, (lock,) = process(late, grace_s=0.2)
    assert returned == -9
    assert prove_dead(lock, timeout_s=0)


def test_a_process_in_which_a_handler_left_a_thread_serves_no_further_attempt(tmp_path: Path) -> None:
    returned, answers = process(work("leaves_a_thread"), work("plain", x=1))
    assert returned == 0 and len(answers) == 1
    outcome = Outcome.model_validate_json(answers[0])
    assert json.loads(outcome.content) == "left one"
    (forks,) = tmp_path.glob(f"*/{STORE}/*.forks")
    assert outcome.left and [pid for pid, _ in forked(forks)] == [outcome.pid], "it is ended with its run"


def test_a_process_without_a_left_thread_serves_many() -> None:
    _, answers = process(work("asynchronous", x=1), work("plain", x=1), work("generator", x=1))
    assert [value(Outcome.model_validate_json(answer)) for answer in answers] == [2, 2, [1, 2]]
