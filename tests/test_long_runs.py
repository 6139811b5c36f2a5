"""Long runs: what a turn costs in space and time does not grow with the turns before it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner

from perdure.actors.agent import Agent
from perdure.actors.attempt import Outcome, Work
from perdure.actors.guards import Limits
from perdure.actors.journal import Journal, serve
from perdure.actors.machine import fold
from perdure.actors.requests import Execute, Start
from perdure.actors.run import Owner
from perdure.actors.tools import Tool, ToolOptions
from perdure.cli.app import root
from perdure.cli.read import PAGE
from perdure.store.events import Event, ToolResult, TurnStarted
from perdure.store.log import Append, Create
from perdure.store.sql import SqlLog, open_log

from .fakes import RUN, NoProcesses, accepted, claim, created, loader, new_run
from .store_kit import message, request

TURNS = 500
RESULT_BYTES = 100_000


class LargeResults(NoProcesses):
    """Tools that return a lot at once."""

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        assert await self.journal.begin(work.run_id, work.tool_call_id, work.attempt, "node", None) is None
        return Outcome(kind="result", content=json.dumps(work.tool_call_id.ljust(RESULT_BYTES, ".")))

    def __init__(self, log: SqlLog) -> None:
        self.journal = Journal(log, self, "store")


def stored_bytes(path: Path) -> int:
    """The size of a database with its write-ahead file."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


async def test_every_turn_of_a_run_with_large_results_costs_the_same(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    log = await open_log(path)
    sizes, append_s, journal = list[int](), list[float](), LargeResults(log).journal

    async def model(request: Any) -> dict[str, Any]:
        sizes.append(stored_bytes(path))
        return {"tool_calls": [{"name": "fetch"}]} if request.turn_index < TURNS else {"text": "bye"}

    async def ask(payload: Any) -> Any:
        began = time.perf_counter()
        answer = await serve(journal, payload)
        if isinstance(payload, Execute):
            append_s.append(time.perf_counter() - began)
        return answer

    tool = Tool(lambda: None, ToolOptions("read_only"), "fetch")
    agent = Agent(name="a", model=model, tools=(tool,), limits=Limits(max_turns=TURNS + 1))
    await new_run(log, created(config=agent.snapshot()))
    ended = await Owner(Start(RUN, await claim(log)), ask, loader(agent)).drive()
    assert ended.status == "completed"
    state = fold(await log.read(RUN))
    assert sum(len(call.result.content) for turn in state.turns for call in turn.calls if call.result) >= 50_000_000
    await log.close()

    first, second = sizes[TURNS // 2] - sizes[0], stored_bytes(path) - sizes[TURNS // 2]
    assert second < 1.5 * first
    assert stored_bytes(path) < 1.2 * TURNS * RESULT_BYTES
    tenth = len(append_s) // 10
    assert median(append_s[-tenth:]) < 3 * median(append_s[:tenth])


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a live run of more than ten thousand events with results of a kilobyte."""
    path = tmp_path_factory.mktemp("long") / "runs.db"

    async def fill() -> None:
        log = await open_log(path)
        await new_run(log)
        epoch, seq = await claim(log), 2
        for turn in range(2_500):
            call_id = f"t{turn}c0"
            done = ToolResult(tool_call_id=call_id, attempt=1, content=json.dumps("." * 1_000))
            asked = request(call_id, "read_only", turn)
            events: tuple[Event, ...] = (TurnStarted(turn_index=turn), message(turn), asked, done)
            seq = (await accepted(log, Append(RUN, epoch, seq, events))).row.seq
        await accepted(log, Create("s" * 20, created()))
        await log.close()

    asyncio.run(fill())
    return path


async def test_a_run_of_ten_thousand_events_is_read_and_folded_in_seconds(long_run: Path) -> None:
    log = await open_log(long_run)
    began = time.process_time()
    state = fold(await log.read(RUN))
    assert time.process_time() - began < 3.0
    assert (state.seq, state.turn_count) == (10_002, 2_500)
    await log.close()


def test_the_events_of_a_long_run_are_listed_page_by_page(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, read = list[int](), SqlLog.read

    async def counted(log: SqlLog, run_id: str, after: int = 0, limit: int | None = None) -> Any:
        page = await read(log, run_id, after, limit)
        pages.append(len(page))
        return page

    monkeypatch.setattr(SqlLog, "read", counted)
    began = time.process_time()
    shown = CliRunner().invoke(root, ["events", RUN, "--db", os.fspath(long_run), "--json"], catch_exceptions=False)
    assert time.process_time() - began < 5.0
    assert [json.loads(line)["seq"] for line in shown.stdout.splitlines()] == list(range(1, 10_003))
    assert max(pages) == PAGE
