"""The ways into the library and out of it: blocking and not, twice, in threads, misused, interrupted."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import perdure
from perdure import Runtime, UsageError
from perdure.client.launching import Request, check_agent, create
from perdure.client.notices import SPEAKER, Aside

from .cli_kit import Place, lines_until, place, until
from .ray_kit import Bench, quick

__all__ = ["place"]

EXIT_S = 5.0

TWICE = """
import threading
import perdure

def run(text):
    print(perdure.run("agent.py:agent", text, store="runs.db").output, flush=True)

run("one")
thread = threading.Thread(target=run, args=("two",))
thread.start()
thread.join()
print("done", flush=True)
"""
WAITING = """
import perdure

perdure.run("agent.py:agent", "wait", store="runs.db")
"""
DECIDING = """
import asyncio
import perdure

async def main():
    async with perdure.Runtime("runs.db") as runtime:
        run = await runtime.launch("agent.py:agent", "gift")
        print((await run.outcome()).status)
        (question,) = await runtime.questions(run.run_id)
        print(question.tool, question.arguments)
        run = await runtime.approve(run.run_id, arguments={"amount": 3}, by="ann")
        print((await run.outcome()).output)
        try:
            await runtime.reject(run.run_id, "t0c0", reason="no")
        except perdure.UsageError as error:
            print("it was approved by ann" in str(error))

asyncio.run(main())
"""
FAILING = """
import asyncio
import threading
import perdure

async def main():
    async with perdure.Runtime("runs.db") as runtime:
        run = await runtime.launch("agent.py:agent", "hello")
        await run.outcome()
        notice = threading.Thread(target=print, args=("a notice",), name="ray_listen_error_messages")
        notice.start()
        notice.join()
        print("done", flush=True)
        raise ValueError("of the user's own")

asyncio.run(main())
"""


# -- without a cluster --------------------------------------------------------------------------------------


async def test_the_blocking_way_in_is_refused_in_a_running_loop(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"an event loop is running: use `async with Runtime"):
        perdure.run("agent.py:agent", "x", store=tmp_path / "runs.db")
    assert not os.listdir(tmp_path)


async def test_a_runtime_that_was_not_entered_says_how_to_use_it(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path / "runs.db")
    decisions = runtime.approve("x"), runtime.reject("x", reason="no"), runtime.settle("x", "abandon")
    for use in (runtime.outcome("x"), runtime.nudge(), runtime.resume(["x"]), runtime.questions("x"), *decisions):
        with pytest.raises(UsageError, match="use it inside of `async with Runtime"):
            await use
    with pytest.raises(UsageError, match="use it inside of"):
        _ = runtime.log


def spoken_by(name: str, text: str) -> None:
    """Print in a thread of that name."""
    thread = threading.Thread(target=lambda: print(text), name=name)
    thread.start()
    thread.join()


def test_what_rays_thread_prints_goes_to_the_log_and_everything_else_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = io.StringIO()
    monkeypatch.setattr(sys, "stdout", real)
    aside = Aside()
    with caplog.at_level(logging.INFO, "perdure.ray"):
        spoken_by("a thread of the user's", "one")
        spoken_by(SPEAKER, "\x1b[36m(raylet)\x1b[0m a worker died")
        print("two")
    held: Any = sys.stdout
    aside.end()
    assert sys.stdout is real
    spoken_by(SPEAKER, "three")
    print("four", file=held)
    assert real.getvalue() == "one\ntwo\nthree\nfour\n"
    assert [(record.name, record.message) for record in caplog.records] == [("perdure.ray", "(raylet) a worker died")]
    assert held.getvalue() == real.getvalue(), "it can do what the stream can do"


def test_what_the_thread_prints_that_calls_ray_goes_to_the_log_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = io.StringIO()
    monkeypatch.setattr(sys, "stdout", real)
    aside = Aside()
    with caplog.at_level(logging.INFO, "perdure.ray"), aside.here():
        print("hello from Ray")
        spoken_by("another thread", "one")
    print("two")
    aside.end()
    assert real.getvalue() == "one\ntwo\n"
    assert [record.message for record in caplog.records] == ["hello from Ray"]


def test_a_stream_that_somebody_else_has_put_in_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    aside, other = Aside(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", other)
    aside.end()
    assert sys.stdout is other


# -- one cluster for all ------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("entry")
    async with quick(Runtime(folder / "runs.db", actors=1)) as runtime:
        yield Bench(runtime, folder)


@pytest.mark.ray
@pytest.mark.asyncio(loop_scope="module")
async def test_a_runtime_is_entered_once(bench: Bench) -> None:
    with pytest.raises(UsageError, match="entered once"):
        await bench.runtime.__aenter__()
    assert (await (await bench.start([("put", "act")])).outcome()).status == "completed"


@pytest.mark.ray
@pytest.mark.asyncio(loop_scope="module")
async def test_a_second_runtime_in_one_process_is_refused_and_the_first_goes_on(bench: Bench, tmp_path: Path) -> None:
    case = await bench.start([("put", "wait,act")])
    await case.begun()
    other = Runtime(tmp_path / "other.db")
    with pytest.raises(UsageError, match="one Runtime at a time"):
        await other.__aenter__()
    case.go()
    assert (await case.outcome()).status == "completed"


@pytest.mark.ray
@pytest.mark.asyncio(loop_scope="module")
async def test_a_runtime_is_not_used_from_another_loop(bench: Bench) -> None:
    with pytest.raises(UsageError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, bench.runtime.nudge())


@pytest.mark.ray
@pytest.mark.asyncio(loop_scope="module")
async def test_the_thread_of_ray_that_prints_notices_has_the_name_that_is_looked_for(bench: Bench) -> None:
    assert SPEAKER in {thread.name for thread in threading.enumerate()}


# -- programs -----------------------------------------------------------------------------------------------


@pytest.mark.ray
def test_the_blocking_way_in_works_again_and_again_and_in_a_thread(place: Place) -> None:
    program = place.python("-c", TWICE)
    assert program.stdout
    said = [program.stdout.readline() for _ in range(3)]
    began = time.monotonic()
    rest, err = program.communicate(timeout=60)
    assert time.monotonic() - began < EXIT_S
    assert (said, rest, err) == (["done with one\n", "done with two\n", "done\n"], "", "")
    assert program.returncode == 0
    assert not place.left() and not place.clusters()


@pytest.mark.ray
def test_an_interrupted_program_ends_soon_and_leaves_nothing_but_a_resumable_run(place: Place) -> None:
    program = place.python("-c", WAITING)
    (run_id,) = until(lambda: [row["run_id"] for row in place.rows() if row["status"] == "running"])
    began = time.monotonic()
    os.kill(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert time.monotonic() - began < EXIT_S
    assert err.splitlines()[-1] == "KeyboardInterrupt" and "loop is closed" not in err
    assert (out, program.returncode) == ("", -signal.SIGINT)
    assert not place.left() and not place.clusters()
    assert [(row["run_id"], row["status"]) for row in place.rows()] == [(run_id, "running")]


@pytest.mark.ray
def test_an_error_of_the_users_own_comes_through_and_the_program_ends_soon(place: Place) -> None:
    program = place.python("-c", FAILING)
    assert program.stdout and program.stdout.readline() == "done\n"
    began = time.monotonic()
    out, err = program.communicate(timeout=60)
    assert time.monotonic() - began < EXIT_S
    assert (out, program.returncode) == ("", 1)
    assert err.splitlines()[-1] == "ValueError: of the user's own" and "loop is closed" not in err
    assert not place.left() and not place.clusters()


@pytest.mark.ray
def test_a_program_answers_what_its_run_asks_and_sees_it_go_on(place: Place) -> None:
    out, err = place.python("-c", DECIDING).communicate(timeout=120)
    said = ["awaiting_approval", 'give {"amount":5}', "done with gift", "True"]
    assert (out.splitlines(), err) == (said, "")
    assert [entry.partition(":")[2] for entry in place.entries()] == ["3"], "the edited arguments are what ran, once"


@pytest.mark.ray
def test_commands_end_soon_after_their_runs_have_completed_or_failed(place: Place) -> None:
    (place.folder / "good.jsonl").write_text('{"text": "bye"}\n')
    (place.folder / "short.jsonl").write_text('{"tool_calls": [{"name": "pay"}]}\n')
    good = place.start("run", "agent.py:agent", "x", "--model", "script:good.jsonl")
    bad = place.start("run", "agent.py:agent", "x", "--model", "script:short.jsonl", "--db", "other.db")
    for command, end, code in ((good, "run_completed", 0), (bad, "run_failed", 1)):
        lines_until(command, end)
        began = time.monotonic()
        command.communicate(timeout=60)
        assert time.monotonic() - began < EXIT_S
        assert command.returncode == code
    assert not place.left() and not place.clusters()


@pytest.mark.parametrize("run_id", ["", "a/b", "../a", "a b", "ä", "x" * 65])
def test_a_run_id_that_could_not_name_a_file_is_refused(run_id: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("from perdure import Agent\nagent = Agent(name='a', model=lambda r: 'hi')\n")
    loaded = check_agent(f"{tmp_path}/agent.py:agent")
    with pytest.raises(UsageError, match="run id"):
        create(loaded, Request("hi", run_id=run_id))
