"""Reports that come late: what counts as the result of a call, and what is evidence."""

from __future__ import annotations

from pathlib import Path

from perdure.actors.machine import fold
from perdure.store.events import (
    RunFailed,
    RunRequeued,
    ToolCallSettled,
    ToolResult,
)
from perdure.store.log import Append, Requeue, Settle
from perdure.store.states import Status

from .fakes import (
    RUN,
    accepted,
    claim,
    held,
    refused,
)
from .hands import CALL, Case


async def test_a_late_success_of_a_superseded_attempt_counts_while_the_next_is_unmarked(tmp_path: Path) -> None:
    case = Case(tmp_path, "idempotent_write", probe=False)
    await case.begin()
    await case.dispatched()
    await case.successor()
    second = await case.dispatched()
    assert second.work.attempt == 2
    assert await case.reports(1) == "tool_result"
    assert "closed" in (await case.journal.begin(RUN, CALL, 2, "node", None) or "")
    await case.check()


async def test_a_late_success_is_evidence_once_the_next_attempt_has_begun(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    await case.dispatched()
    await case.successor()
    assert await case.mark((await case.dispatched()).work, "second") is None
    assert await case.reports(1) == "tool_evidence"
    assert (await case.call()).result_seq is None


async def test_a_late_error_of_a_superseded_attempt_is_always_evidence(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    await case.dispatched()
    await case.successor()
    await case.dispatched()
    assert await case.reports(1, is_error=True) == "tool_evidence"
    call = await case.call()
    assert call.result_seq is None and call.evidence_seq is None, "an error is no evidence of an effect"
    await case.check()


async def test_a_second_result_is_kept_as_evidence_and_never_as_a_result(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.begin()
    await case.dispatched()
    assert await case.reports(1, '"one"') == "tool_result"
    assert await case.reports(1, '"two"') == "tool_evidence"
    assert fold(await case.log.read(RUN)).turns[0].calls[0].result.content == '"one"'  # type: ignore[union-attr]


async def parked(tmp_path: Path) -> Case:
    """A run that waits for a person to say whether its call happened."""
    case = Case(tmp_path, probe=False)
    await case.begin()
    await case.mark((await case.dispatched()).work)
    executing = await case.successor()
    case.tasks.dead = True
    await held(executing)
    assert (await case.call()).unsettled
    assert (await case.log.run(RUN)).status is Status.AWAITING_APPROVAL
    return case


async def test_a_late_result_answers_the_question_whether_it_happened_and_the_run_goes_on(tmp_path: Path) -> None:
    case = await parked(tmp_path)
    question = (await case.call()).question
    assert await case.reports(1, '"paid after all"') == "tool_result"
    row = await case.log.run(RUN)
    assert row.status is Status.RUNNING and row.parked, "somebody has to claim it, and that is no respawn"
    settled = ToolCallSettled(tool_call_id=CALL, attempt=1, question=question, outcome="not_happened", by="ann")
    assert await refused(case.log, Settle(RUN, settled)) == "closed"
    await case.check()


async def test_a_late_success_forbids_the_attempt_that_a_person_has_ordered_and_that_has_not_begun(
    tmp_path: Path,
) -> None:
    case = await parked(tmp_path)
    question = (await case.call()).question
    settled = ToolCallSettled(tool_call_id=CALL, attempt=1, question=question, outcome="not_happened", by="ann")
    await accepted(case.log, Settle(RUN, settled))
    case.epoch = await claim(case.log)
    await case.successor()
    second = await case.dispatched()
    assert await case.reports(1) == "tool_result"
    assert "closed" in (await case.mark(second.work, "second") or "")
    await case.check()


async def test_a_result_for_a_run_that_ended_is_used_when_it_is_resumed(tmp_path: Path) -> None:
    case = Case(tmp_path, probe=False)
    await case.begin()
    await case.mark((await case.dispatched()).work)
    row = await case.log.run(RUN)
    failed = RunFailed(code="crash_loop", message="m", phase="supervision")
    await accepted(case.log, Append(RUN, case.epoch, row.seq, (failed,)))
    assert await case.reports(1, '"paid after all"') == "tool_evidence"
    assert (await case.log.run(RUN)).status is Status.FAILED
    await accepted(case.log, Requeue(RUN, RunRequeued(by="me")))
    case.epoch = await claim(case.log)
    executing = await case.successor()
    case.tasks.dead = True
    await held(executing)
    assert case.tasks.tasks == [], "the answer was there"
    last = (await case.log.read(RUN))[-1].event
    assert isinstance(last, ToolResult) and last.content == '"paid after all"' and not last.is_error
    await case.check()
