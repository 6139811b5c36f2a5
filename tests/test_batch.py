"""Batches over a store whose runs end by themselves: what is launched, what is not, and what is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import UsageError
from perdure.batch.dataset import Dataset
from perdure.batch.drive import drive, window
from perdure.batch.plan import Batch, Plan, batch_name, make_plan, run_id
from perdure.batch.results import Report, check_output, replacing, results
from perdure.client.launching import check_agent
from perdure.store.events import RunFailed
from perdure.store.log import Create
from perdure.store.sql import SqlLog, open_log
from perdure.store.states import LIVE, Status

from .batch_kit import DriverDied, FakeDoor, completes, fails, play, write_agent


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqlLog]:
    event_log = await open_log(tmp_path / "runs.db")
    yield event_log
    await event_log.close()


def batch_of(folder: Path, count: int, name: str = "b", **changes: Any) -> Batch:
    """A batch of numbered samples; `changes` replace a sample's input by its id."""
    path = folder / "data.jsonl"
    lines = ({"id": number, "input": changes.get(f"s{number}", f"q{number}")} for number in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Batch(name, check_agent(write_agent(folder / "code")), Dataset(path))


async def driven(door: FakeDoor, batch: Batch, retry: bool = False, most: int = 256) -> Plan:
    plan = await make_plan(door.log, batch, retry)
    await drive(door, batch, plan, most, lambda counts: None)
    return plan


def test_run_ids_are_hashes_of_batch_and_sample_without_ambiguity() -> None:
    ids = {run_id(*pair) for pair in (("a", "b"), ("ab", ""), ("", "ab"), ('a", "b', ""), ("b", "a"))}
    assert len(ids) == 5
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)
    assert run_id("a", "b") == "3554d2b8a1e34099053865de8576d146", "an id must never change: it would launch again"


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\x1bb", "\udcff"])
def test_a_batch_needs_a_printable_name(name: str) -> None:
    with pytest.raises(UsageError, match="a batch needs a name"):
        batch_name(name)


async def test_every_sample_gets_one_run_and_the_same_batch_again_none(tmp_path: Path, log: SqlLog) -> None:
    batch, door = batch_of(tmp_path, 30), FakeDoor(log)
    assert (await driven(door, batch)).new == 30
    assert door.launched == [run_id("b", str(number)) for number in range(30)]
    again = await driven(door, batch)
    assert (again.new, again.counts) == (0, {Status.COMPLETED: 30})
    assert len(door.launched) == 30


async def test_a_driver_that_dies_again_and_again_launches_nothing_twice(tmp_path: Path, log: SqlLog) -> None:
    batch, launched = batch_of(tmp_path, 50), []
    for dies_after in (20, 10, 15):
        door = FakeDoor(log, dies_after=dies_after)
        with pytest.raises(DriverDied):
            await driven(door, batch, most=5)
        launched += door.launched
    last = FakeDoor(log)
    plan = await driven(last, batch)
    launched += last.launched
    assert plan.new == 50 - 45
    assert len(launched) == len(set(launched)) == 50


async def test_what_failed_stays_failed_until_it_is_to_be_retried(tmp_path: Path, log: SqlLog) -> None:
    def end(create: Create) -> Any:
        return fails(create) if create.event.sample in ("1", "3") else completes(create)

    batch, door = batch_of(tmp_path, 5), FakeDoor(log, end)
    await driven(door, batch)
    await driven(door, batch)
    assert (await log.counts("b"))[Status.FAILED] == 2
    plan = await driven(door, batch, retry=True)
    assert (plan.again, plan.new) == (2, 0)
    assert await log.counts("b") == {Status.COMPLETED: 5}


async def test_another_input_for_a_known_sample_is_refused(tmp_path: Path, log: SqlLog) -> None:
    door = FakeDoor(log)
    await driven(door, batch_of(tmp_path, 3))
    with pytest.raises(UsageError, match=r"line 2: batch 'b' has run sample '1' with another input; choose"):
        await make_plan(log, batch_of(tmp_path, 4, s1="changed"))
    await driven(door, batch_of(tmp_path, 4, name="c", s1="changed"))
    assert await log.counts() == {Status.COMPLETED: 7}


async def test_another_agent_or_model_under_the_same_name_is_refused(tmp_path: Path, log: SqlLog) -> None:
    batch = batch_of(tmp_path, 2)
    await driven(FakeDoor(log), batch)
    other = Batch("b", check_agent(write_agent(tmp_path / "other")), batch.dataset)
    with pytest.raises(UsageError, match="with another agent"):
        await make_plan(log, other)
    with pytest.raises(UsageError, match="with another model"):
        await make_plan(log, Batch("b", batch.loaded, batch.dataset, model="script:x.jsonl"))


async def test_changed_code_of_the_same_agent_is_noted(tmp_path: Path, log: SqlLog) -> None:
    await driven(FakeDoor(log), batch_of(tmp_path, 2))
    (tmp_path / "code").joinpath("helper.py").write_text("x = 1\n")
    batch = batch_of(tmp_path, 3)
    code = tmp_path / "code" / "agent.py"
    assert (await make_plan(log, Batch("b", check_agent(f"{code}:agent"), batch.dataset))).other_code == 2


async def test_without_credit_no_more_is_launched_until_the_batch_is_gone_on_with(tmp_path: Path, log: SqlLog) -> None:
    credit = False

    def end(create: Create) -> Any:
        refused = int(str(create.event.sample)) >= 7 and not credit
        return RunFailed(code="no_credit", message="top up", phase="model") if refused else completes(create)

    batch, door = batch_of(tmp_path, 40), FakeDoor(log, end)
    await driven(door, batch, most=5)
    assert len(door.launched) == 10
    assert await log.counts("b") == {Status.COMPLETED: 7, Status.FAILED: 3}
    await driven(door, batch, most=5)
    assert len(door.launched) == 15, "failures of before do not hold the batch up, new ones do"
    credit = True
    await driven(door, batch, retry=True, most=5)
    assert await log.counts("b") == {Status.COMPLETED: 40} and len(door.launched) == 40


async def test_few_runs_are_outstanding_at_any_time(tmp_path: Path, log: SqlLog) -> None:
    most_seen, waiting = 0, list[Create]()

    class Slow(FakeDoor):
        """Runs end only when the next ones are created."""

        async def create(self, creates: Sequence[Create]) -> None:
            nonlocal most_seen
            await self.log.commit(creates)
            waiting.extend(creates)
            counts = await self.log.counts("b")
            most_seen = max(most_seen, sum(counts.get(status, 0) for status in LIVE))
            if len(waiting) >= 7:
                await play(self.log, waiting)
                waiting.clear()

    await driven(Slow(log), batch_of(tmp_path, 35), most=7)
    assert most_seen == 7
    assert await log.counts("b") == {Status.COMPLETED: 35}


def test_the_window_grows_with_the_slots() -> None:
    assert window(None) == window(4) == 256
    assert window(1000) == 4000


async def test_a_bad_last_line_launches_nothing(tmp_path: Path, log: SqlLog) -> None:
    batch = batch_of(tmp_path, 600)
    batch.dataset.path.write_text(batch.dataset.path.read_text() + "{oops\n")
    with pytest.raises(UsageError, match="line 601"):
        await make_plan(log, batch)
    assert await log.counts() == {}


async def test_results_come_in_the_order_of_the_data_set_with_their_errors(tmp_path: Path, log: SqlLog) -> None:
    def end(create: Create) -> Any:
        return fails(create) if create.event.sample == "1" else completes(create)

    batch, report = batch_of(tmp_path, 4), Report()
    await driven(FakeDoor(log, end), batch)
    found = [result async for result in results(log, batch, report)]
    assert [result["id"] for result in found] == ["0", "1", "2", "3"]
    assert found[0]["output"] == "done with q0" and found[0]["error"] is None
    assert (found[1]["status"], found[1]["error"], found[1]["output"]) == ("failed", "refusal", None)
    assert report.usage.input_tokens == 40
    assert [sample for sample, _ in report.failures] == ["1"]


async def test_runs_of_samples_that_left_the_data_set_do_not_count(tmp_path: Path, log: SqlLog) -> None:
    await driven(FakeDoor(log), batch_of(tmp_path, 10))
    plan = await make_plan(log, batch_of(tmp_path, 4))
    assert plan.own(await log.counts("b"))[Status.COMPLETED] == 4


def test_a_results_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    with pytest.raises(DriverDied), replacing(path) as file:
        file.write("half")
        raise DriverDied
    assert path.read_text() == "old"
    with replacing(path) as file:
        file.write("new")
    assert path.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_results_may_not_go_over_the_data_set_or_nowhere(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('"x"\n')
    for output in (data, tmp_path, tmp_path / "none" / "out.jsonl"):
        with pytest.raises(UsageError, match="--output"):
            check_output(output, data)
