"""MCP servers in tool tasks on real Ray: what is recorded, and what is left, after a timeout, a cancel and kills."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio
from pydantic import JsonValue

from perdure import Run, Runtime
from perdure.actors.kernel import process_started
from perdure.client.blobs import blob_parts
from perdure.client.launching import Request, check_agent
from perdure.store.events import ToolResult

from .ray_kit import Bench, kill, quick, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]
AGENT = f"{Path(__file__).parent / 'agents' / 'mcp_agent.py'}:agent"
SOON_S = 12.0
KEY = "the key of a shop, 123"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("mcp")
    os.environ["SHOP_API_KEY"] = KEY
    async with quick(Runtime(folder / "runs.db", actors=2, concurrency=12)) as runtime:
        bench = Bench(runtime, folder)
        bench.loaded = check_agent(AGENT)
        yield bench
    del os.environ["SHOP_API_KEY"]


class Call:
    """A run that makes one call."""

    def __init__(self, bench: Bench, folder: Path, run: Run) -> None:
        self.bench, self.folder, self.run = bench, folder, run

    def effects(self) -> list[int]:
        """The servers that took effect, by their pids."""
        path = self.folder / "ledger"
        return [int(line.split(",")[3]) for line in path.read_text().splitlines()] if path.exists() else []

    async def hangs(self) -> None:
        async def there() -> bool:
            return (self.folder / "hangs").exists()

        await until(there, "a call that hangs")

    def tree(self) -> list[int]:
        """Living processes with the mark of the run."""
        found = []
        for path in Path("/proc").iterdir():
            try:
                marked = f".{self.run.run_id}.".encode() in (path / "environ").read_bytes()
            except OSError:
                continue  # not a process, gone, or another user's
            if marked and process_started(int(path.name)):
                found.append(int(path.name))
        return found

    def worker(self) -> int:
        """The tool worker: the parent of the server."""
        return int(Path(f"/proc/{self.effects()[-1]}/stat").read_text().rpartition(")")[2].split()[1])

    async def result(self) -> ToolResult:
        stored = await self.bench.runtime.log.read(self.run.run_id)
        (result,) = [each.event for each in stored if isinstance(each.event, ToolResult)]
        return result

    async def status(self) -> str:
        return (await self.run.outcome()).status


async def start(bench: Bench, tool: str, do: str) -> Call:
    folder = bench.folder / uuid4().hex
    folder.mkdir()
    turn: JsonValue = [{"name": tool, "arguments": {"do": do, "dir": str(folder)}}]
    (run,) = await bench.runtime.launch_many(bench.loaded, [Request([turn])])
    return Call(bench, folder, run)


async def test_calls_are_recorded_and_of_those_that_do_not_end_well_nothing_is_left(bench: Bench) -> None:
    asked = [("plain__look", "it"), ("brief__look", "hang"), ("plain__act", "hang"), ("plain__act", "die")]
    good, late, killed, died = [await start(bench, *each) for each in asked]
    await killed.hangs()
    assert len(killed.tree()) == 3  # the server, a sleeper and a daemon
    kill(killed.worker())
    assert await good.status() == "completed" and (await good.result()).content == '"look it"'
    assert await late.status() == "completed" and (await late.result()).source == "timeout"
    for unknown in (killed, died):
        assert await unknown.status() == "awaiting_approval" and len(unknown.effects()) == 1
        (question,) = await bench.runtime.questions(unknown.run.run_id)
        assert question.kind == "settlement"
    assert not [each.tree() for each in (good, late, killed, died) if each.tree()]


async def test_a_call_under_way_outlives_its_run_actor_and_a_cancel_ends_its_server(bench: Bench) -> None:
    call = await start(bench, "plain__act", "hang")
    await call.hangs()
    before = call.tree()
    pid, _ = await bench.holder(call.run.run_id)
    kill(pid)
    other, _ = await bench.holder(call.run.run_id)
    assert other != pid and call.tree() == before
    began = time.monotonic()
    await bench.runtime.cancel(call.run.run_id)
    async with asyncio.timeout(SOON_S):
        assert await call.status() == "cancelled"
    assert time.monotonic() - began < 6 and call.tree() == [] and len(call.effects()) == 1
    assert "it is unknown whether it took effect" in (await call.result()).content


async def test_what_is_too_large_for_the_log_is_kept_beside_it(bench: Bench) -> None:
    call = await start(bench, "plain__look", "much")
    assert await call.status() == "completed"
    said = json.loads((await call.result()).content)
    (digest,) = set(re.findall("[0-9a-f]{64}", said))
    whole = b"".join([part async for part in blob_parts(bench.runtime.log, digest)])
    assert whole == b"begin" + b"x" * 2_000_000 + b"end" and len(said) < 70_000


async def test_a_key_of_the_environment_is_nowhere_in_the_store(bench: Bench) -> None:
    told, asked = await start(bench, "plain__look", "leak"), await start(bench, "plain__look", KEY)
    assert await told.status() == await asked.status() == "completed"
    assert (await told.result()).content == '"[masked: SHOP_API_KEY]"'
    assert (await asked.result()).content == '"look [masked: SHOP_API_KEY]"', "its input had it masked"
    assert not [path for path in bench.folder.glob("runs.db*") if KEY.encode() in path.read_bytes()]
