"""The pure machine where a person has to decide: gates, questions, answers, and what a resumed run asks anew."""

from __future__ import annotations

import pytest

from perdure.actors.machine import Ask, Execute, Finish, State, Wait, evolve, evolve_all, messages, next_step
from perdure.store.errors import IllegalTransition
from perdure.store.events import (
    ApprovalExpired,
    CancelRequested,
    Event,
    RunCancelled,
    RunFailed,
    RunRequeued,
    RunTimedOut,
    ToolCallRetried,
    ToolResult,
)
from perdure.store.states import Status

from .fakes import created
from .machine_kit import (
    BEGAN,
    CALL,
    CLAIMED,
    TWO_CALLS,
    asked,
    decided,
    due,
    marked,
    requested,
    result,
    settled,
    unsettled,
)


def test_a_run_waits_for_a_person_only_when_every_open_call_does() -> None:
    state = evolve_all(State(created()), [*TWO_CALLS, asked()])
    assert state.status is Status.AWAITING_TOOL
    step = next_step(state)
    assert isinstance(step, Execute) and [call.tool_call_id for call in step.calls] == ["t0c1"]
    for last in (result("t0c1"), unsettled("t0c1"), asked("t0c1", "q2")):
        parked = evolve(state, last)
        assert parked.status is Status.AWAITING_APPROVAL and next_step(parked) == Wait()


def test_an_approved_call_is_released_without_an_attempt_and_runs_with_the_arguments_that_it_was_given() -> None:
    state = evolve_all(State(created()), [*BEGAN, requested(), asked(), decided(arguments='{"x":7}')])
    step = next_step(state)
    assert state.status is Status.AWAITING_TOOL and isinstance(step, Execute)
    (call,) = step.calls
    assert (call.gate, call.attempt, call.arguments, call.effective.arguments) == ("approved", 0, '{"x":7}', '{"x":7}')
    assert call.effective.idempotency_key == call.request.idempotency_key and call.request.arguments == "{}"
    done = evolve_all(state, [ToolCallRetried(tool_call_id=CALL, attempt=1, reason="approved"), marked(), result()])
    (seen,) = messages(done)[-1]["results"]
    assert seen["note"] == 'a person changed the arguments to {"x":7}'


def test_nothing_is_noted_beside_a_result_whose_arguments_were_left_alone() -> None:
    for arguments in (None, "{}"):
        state = evolve_all(State(created()), [*BEGAN, requested(), asked(), decided(arguments=arguments), result()])
        assert "note" not in messages(state)[-1]["results"][0]


def test_a_rejection_waits_on_until_its_result_closes_the_call() -> None:
    rejected = evolve_all(State(created()), [*BEGAN, requested(), asked(), decided("reject")])
    assert rejected.status is Status.AWAITING_APPROVAL
    assert next_step(evolve(rejected, result(content='"too dear"'))) == due(1)


@pytest.mark.parametrize("ended", [RunCancelled(reason="r"), RunTimedOut(reason="r")], ids=["cancelled", "timed out"])
def test_a_resumed_run_asks_anew_what_nobody_has_decided(ended: Event) -> None:
    events: list[Event] = [*TWO_CALLS, asked(), asked("t0c1", "q2")]
    events += [decided(), ApprovalExpired(tool_call_id="t0c1", question="q2"), result(), ended, RunRequeued(by="me")]
    state = evolve_all(State(created()), [*events, CLAIMED])
    assert state.status is Status.AWAITING_TOOL, "nobody is asked yet"
    step = next_step(state)
    assert isinstance(step, Ask) and [call.tool_call_id for call in step.calls] == ["t0c1"]
    again = evolve(state, asked("t0c1", "q3"))
    assert again.status is Status.AWAITING_APPROVAL and again.open_calls[0].question == "q3"
    with pytest.raises(IllegalTransition):
        evolve(again, decided(tool_call_id="t0c1", question="q2"))
    assert next_step(evolve(again, decided(tool_call_id="t0c1", question="q3"))) != Wait()


def test_what_was_approved_stays_so_in_a_resumed_run() -> None:
    failed = RunFailed(code="crash_loop", message="m", phase="p")
    events: list[Event] = [*BEGAN, requested(), asked(), decided(arguments='{"x":7}'), failed, RunRequeued(by="me")]
    step = next_step(evolve_all(State(created()), [*events, CLAIMED]))
    assert isinstance(step, Execute)
    assert (step.calls[0].gate, step.calls[0].arguments) == ("approved", '{"x":7}')


def test_edited_arguments_are_those_that_are_asked_about_again() -> None:
    events = [*BEGAN, requested(), asked(), decided(arguments='{"x":7}'), asked(question="q2")]
    state = evolve_all(State(created()), [*events, decided(question="q2")])
    assert state.open_calls[0].arguments == '{"x":7}'


def test_a_call_of_which_it_is_unknown_what_it_did_waits_for_a_person_and_is_settled_once() -> None:
    state = evolve_all(State(created()), [*BEGAN, requested(), marked(), unsettled()])
    assert state.status is Status.AWAITING_APPROVAL and next_step(state) == Wait()
    with pytest.raises(IllegalTransition):
        evolve(state, settled("an older question"))
    again = evolve(state, settled())
    assert again.status is Status.AWAITING_TOOL and not again.open_calls[0].waits
    with pytest.raises(IllegalTransition):
        evolve(again, settled())
    assert evolve(state, result()).status is Status.RUNNING, "a late result answers the question"
    ended = RunCancelled(reason="r")
    resumed = evolve_all(state, [ended, RunRequeued(by="me"), CLAIMED])
    assert isinstance(next_step(resumed), Execute), "a resume finds out anew"


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ([], decided()),
        ([], ApprovalExpired(tool_call_id=CALL, question="q1")),
        ([], settled()),
        ([asked()], decided(question="q0")),
        ([asked()], asked(question="q2")),
        ([asked()], settled()),
        ([asked(), decided()], decided()),
        ([asked(), ApprovalExpired(tool_call_id=CALL, question="q1")], decided()),
        ([marked()], asked()),
    ],
    ids=[
        "answer to nothing",
        "deadline of nothing",
        "settled and not asked",
        "stale answer",
        "asked twice",
        "settled in place of decided",
        "decided twice",
        "late answer",
        "asked about what began",
    ],
)
def test_an_answer_belongs_to_the_question_that_is_open(before: list[Event], event: Event) -> None:
    state = evolve_all(State(created()), [*BEGAN, requested(), *before])
    with pytest.raises(IllegalTransition, match="does not wait for that"):
        evolve(state, event)


def test_a_cancelled_run_says_of_a_gated_call_that_it_never_started_and_of_an_unsettled_one_that_nobody_knows() -> None:
    events = [*BEGAN, requested(effect="idempotent_write"), requested(1), requested(2), asked()]
    mark = marked().model_copy(update={"tool_call_id": "t0c1"})
    state = evolve_all(State(created()), [*events, mark, unsettled("t0c1", "q2"), CancelRequested(by="me")])
    step = next_step(state)
    assert isinstance(step, Finish)
    gated, unknown, fresh = [event.content for event in step.events if isinstance(event, ToolResult)]
    assert "never started" in gated and "never started" in fresh and "outcome unknown" in unknown
