"""Limits on real Ray: what a run has used survives the death of its actor, and a resume raises what it may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import JsonValue

from perdure import Runtime, UsageError
from perdure.client.launching import Request

from .ray_kit import Bench, Case, kill, quick

pytestmark = pytest.mark.ray


async def test_a_ceiling_outlives_the_actor_and_a_resumed_run_counts_on(tmp_path: Path) -> None:
    async with quick(Runtime(tmp_path / "runs.db", actors=2)) as runtime:
        bench, folder = Bench(runtime, tmp_path), tmp_path / "run"
        folder.mkdir()
        turns: list[JsonValue] = [
            [{"name": "put", "arguments": {"do": "wait,act"}}],
            [{"name": "put", "arguments": {"do": "act"}}, {"name": "put", "arguments": {"do": "act"}}],
        ]
        request = Request({"turns": [*turns, turns[1]]}, metadata={"dir": str(folder)})
        limits = {"max_tool_calls": 2, "max_turns": 2}
        case = Case(bench, folder, (await runtime.launch_many(bench.loaded, [request], limits=limits))[0])
        await case.begun()
        kill((await bench.holder(case.run.run_id))[0])
        case.go()
        outcome = await case.outcome()
        assert (outcome.status, outcome.error) == ("failed", "max_turns")
        with pytest.raises(UsageError, match="max_turns is 2"):
            await runtime.resume([case.run.run_id], limits={"max_turns": 1})
        (case.run,) = await runtime.resume([case.run.run_id], limits={"max_turns": 9})
        outcome = await case.outcome()
        assert (outcome.status, outcome.output) == ("completed", "all done")
        assert [result.source for result in await case.results()] == ["tool", "limit", "limit", "limit", "tool"]
        assert len(case.ledger()) == 2
        await case.check_log()
