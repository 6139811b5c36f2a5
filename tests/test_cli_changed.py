"""What the commands tell of a run whose agent's code has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure.store.events import CodeChanged, Raised, ToolResult
from perdure.store.log import Append, Claim, Leave
from perdure.store.sql import SqlLog

from .ask_kit import begin, done
from .batch_kit import LEASE
from .command_kit import no_cluster, perdure, within
from .store_kit import request

__all__ = ["no_cluster"]

pytestmark = pytest.mark.usefixtures("no_cluster")
RUN = "changed1"


async def changed(log: SqlLog) -> None:
    """Two calls that may have run, and then code in which the one is of a stricter class and the other has no tool."""
    await begin(log, RUN, request("c1", "idempotent_write"), request("c2", "idempotent_write"))
    await done(log, Leave(RUN, "c1", 1), Leave(RUN, "c2", 1))
    await done(log, Claim(RUN, "again", LEASE.nonce, 1, "respawn"))
    row = await log.run(RUN)
    assert row
    raised = {"c1": Raised(effect="non_idempotent", hold_s=65.0)}
    gone = ToolResult(tool_call_id="c2", attempt=1, content='"gone"', is_error=True, source="validation")
    change = CodeChanged(was="d1", digest="d2", tools={}, raised=raised)
    await done(log, Append(RUN, 2, row.seq, (change, gone)))


def test_a_change_of_code_and_what_it_made_of_open_calls_is_told(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    within(path, changed)
    assert "d1 -> d2, c1 is non_idempotent now" in perdure("events", RUN, "--db", path).stdout
    first, second = json.loads(perdure("show", RUN, "--calls", "--json", "--db", path).stdout)["calls"]
    assert first["effect"] == "non_idempotent"
    assert first["standing"] == "attempt 1, it may have run before its tool was declared non_idempotent"
    assert [attempt["attempt"] for attempt in second["attempts"]] == [1], "it may have run, whatever its result says"
    text = perdure("show", RUN, "--calls", "--db", path).stdout
    assert "raised" in text and "its tool is non_idempotent now" in text and "may have run before" in text
