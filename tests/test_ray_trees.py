"""Process trees of tools on real Ray: what of them is left after timeout, cancel and kills, counted from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from perdure import Runtime
from perdure.actors.kernel import process_started
from perdure.actors.stopping import GRACE_S
from perdure.client.launching import check_agent
from perdure.store.events import CancelRequested, ProcessesChecked, ToolResult
from perdure.store.log import Cancel

from .agents.trees import KINDS
from .ray_kit import Bench, Case, kill, quick, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]
AGENT = f"{Path(__file__).parent / 'agents' / 'trees.py'}:agent"
SOON_S = 12.0


class TreeCase:
    """A run whose tools start processes, and what is seen of these from outside the product."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.run_id = case.run.run_id

    def notes(self, kind: str) -> list[tuple[str, int]]:
        """(call, pid) of the lines of a kind in the ledger."""
        path = self.case.folder / "ledger"
        rows = [line.split(",") for line in path.read_text().splitlines()] if path.exists() else []
        return [(call, int(pid)) for what, call, _, pid in rows if what == kind]

    async def begun(self, count: int = 1) -> list[int]:
        """Wait until that many tools have begun, and started what they start; their pids."""

        async def enough() -> bool:
            return len(self.notes("begin")) >= count

        await until(enough, f"{count} tools begun")
        return [pid for _, pid in self.notes("begin")]

    def tree(self) -> set[int]:
        """Living processes of the run: those with its mark, and the daemons that were forked only, by their word."""
        found = set()
        for path in Path("/proc").iterdir():
            try:
                marked = f".{self.run_id}.".encode() in (path / "environ").read_bytes()
            except (OSError, ValueError):
                continue  # not a process, gone, or another user's
            if marked and process_started(int(path.name)):
                found.add(int(path.name))
        return found | {pid for pid in self.named() if process_started(pid)}

    def named(self) -> list[int]:
        """The daemons that were forked only have said who they are."""
        return [int(path.read_text()) for path in self.case.folder.glob("*/forked")]

    async def nothing_is_left(self) -> None:
        async def none() -> bool:
            return not self.tree()

        await until(none, f"the end of the tree of {self.run_id}", SOON_S)

    async def cancel(self) -> float:
        """Cancel the run and wait for its end; how long that took."""
        began = time.monotonic()
        (done,) = await self.case.bench.runtime.log.commit([Cancel(self.run_id, CancelRequested(by="test"))])
        assert done
        assert (await self.case.outcome()).status == "cancelled"
        told = await self.case.bench.runtime.certificate(self.run_id)
        assert told.checked and isinstance(told.checked.event, ProcessesChecked)
        (machine,) = told.checked.event.machines
        assert (machine.left, told.checked.event.gone) == ((), ())
        return time.monotonic() - began

    async def result(self, call: str) -> ToolResult:
        (result,) = [result for result in await self.case.results() if result.tool_call_id == call]
        return result

    async def said(self, expected: Sequence[tuple[str, str]]) -> None:
        """The results of the first turn's calls come from there, and say so."""
        for number, (source, text) in enumerate(expected):
            result = await self.result(f"t0c{number}")
            assert result.source == source and text in result.content, result.content
        await self.case.check_log()


def zombies_of(pid: int) -> list[int]:
    """Dead children that a process has not buried."""
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in below if not process_started(int(child))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("trees")
    async with quick(Runtime(folder / "runs.db", actors=2, concurrency=12)) as runtime:
        bench = Bench(runtime, folder)
        bench.loaded = check_agent(AGENT)
        yield bench


async def start(bench: Bench, *calls: tuple[str, str]) -> TreeCase:
    return TreeCase(await bench.start(list(calls)))


async def test_after_a_timeout_and_after_the_death_of_the_worker_nothing_is_left(bench: Bench) -> None:
    late, killed = await start(bench, ("glance", "spawn,sleep")), await start(bench, ("read", "spawn,sleep"))
    (other,) = await late.begun()
    assert len(late.tree()) >= len(KINDS)
    (worker,) = await killed.begun()
    assert len(killed.tree()) >= len(KINDS)
    kill(worker)
    for tree, source in ((late, "timeout"), (killed, "crash")):
        assert (await tree.case.outcome()).status == "completed"
        assert tree.tree() == set()
        assert (await tree.result("t0c0")).source == source
    assert zombies_of(other) == []


HEEDS = [
    ("read", "spawn,sleep"),
    ("wait", ""),
    ("put", "run"),
    ("put", "begin,late"),
    ("blind", "begin,sleep"),
    ("send", "begin,act,sleep"),
]
DEAF = [("read", "spawn,ignore"), ("send", "begin,act,grind")]


async def test_a_cancel_stops_or_kills_all_and_says_what_became_of_each_call(bench: Bench) -> None:
    heeds, deaf = await start(bench, *HEEDS), await start(bench, *DEAF)
    workers = await deaf.begun(len(DEAF))
    await heeds.begun(len(HEEDS))
    killed = asyncio.create_task(deaf.cancel())
    assert await heeds.cancel() < SOON_S
    assert heeds.tree() == set()
    assert GRACE_S < await killed < GRACE_S + SOON_S
    assert deaf.tree() == set()
    assert not any(process_started(worker) for worker in workers)
    expected = [
        ("cancel", "stopped before it finished: it was interrupted"),
        ("cancel", "stopped before it finished: it was interrupted"),
        ("cancel", "it may have taken effect, with the idempotency key"),
        ("tool", '"begin,late"'),
        ("cancel", "killed in mid-effect: it is unknown whether it took effect"),
        ("probe", "found in the ledger"),
    ]
    assert [call for call, _ in heeds.notes("interrupted")] == ["t0c1"]
    await heeds.said(expected)
    await deaf.said([("cancel", "stopped before it finished: the process"), ("probe", "found in the ledger")])


async def test_what_a_finished_tool_has_left_ends_with_its_run_and_not_before(bench: Bench) -> None:
    tree = TreeCase(await bench.start([("read", "bare,spawn")], [("put", "begin,look")]))
    await tree.begun(2)
    assert len(tree.named()) == 2 and len(tree.tree()) > len(KINDS)
    await tree.cancel()
    assert tree.tree() == set()


async def test_tools_whose_run_actor_was_killed_go_on_and_can_be_cancelled(bench: Bench) -> None:
    tree = await start(bench, ("read", "spawn,sleep"))
    (worker,) = await tree.begun()
    before = tree.tree()
    pid, _ = await bench.holder(tree.run_id)
    kill(pid)
    other, _ = await bench.holder(tree.run_id)
    assert other != pid and process_started(worker) and tree.tree() == before
    await tree.cancel()
    assert tree.tree() == set()
    assert "stopped before it finished" in (await tree.result("t0c0")).content


async def test_after_the_death_of_the_journal_nothing_of_its_attempts_is_left(bench: Bench) -> None:
    journal = await bench.lease("journal")
    tree, ended = await start(bench, ("glance", "spawn,sleep")), TreeCase(await bench.start([("read", "spawn")]))
    await tree.begun()
    assert (await ended.case.outcome()).status == "completed"
    await ended.nothing_is_left()
    first = tree.tree()
    kill(journal.pid)
    await bench.replaced(journal)
    assert (await tree.case.outcome()).status == "completed"
    assert len(tree.notes("begin")) == 2, "it was dispatched again"
    await tree.nothing_is_left()
    assert not any(process_started(pid) for pid in first)
