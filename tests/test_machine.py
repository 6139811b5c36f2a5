"""The pure machine: every state meets every event, and its fold agrees with the store's projections."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, get_args

import pytest

from perdure.actors.machine import (
    Execute,
    Finish,
    State,
    Wait,
    begin,
    evolve,
    evolve_all,
    fold,
    idempotency_key,
    messages,
    next_step,
)
from perdure.store.errors import CorruptLog, IllegalTransition
from perdure.store.events import (
    ApprovalExpired,
    CancelRequested,
    Event,
    RunCancelled,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunTimedOut,
    Stored,
    ToolResult,
    TurnStarted,
    decode,
    encode,
)
from perdure.store.states import TERMINAL, TRANSITIONS, Status, status_after

from .fakes import check_messages, created
from .machine_kit import BEGAN, CALL, CLAIMED, ONE_OF_EACH, TWO_CALLS, answer, asked, due, marked, requested, result

BY_CALLS: dict[tuple[int, int], Status] = {
    (0, 0): Status.RUNNING,
    (1, 0): Status.AWAITING_TOOL,
    (2, 1): Status.AWAITING_TOOL,
    (1, 1): Status.AWAITING_APPROVAL,
    (2, 2): Status.AWAITING_APPROVAL,
}
"""Where a run stands that has so many open calls, of which so many wait for a person."""
ABOUT_CALLS = {
    "tool_call_requested": (1, 0),
    "tool_call_retried": (1, 0),
    "tool_call_unsettled": (1, 1),
    "tool_call_settled": (1, 0),
    "approval_requested": (1, 1),
    "approval_decided": (1, 0),
    "approval_expired": (1, 1),
    "tool_result": (0, 0),
}
"""Events after which the calls say where the run stands, each with what it leaves open and waiting at least."""
Moves = dict[str, Status | None]


def aside(status: Status) -> Moves:
    """What is noted in any state, and changes none."""
    return {"tool_evidence": status, "tool_call_probed": status}


CALLS: Moves = dict.fromkeys(ABOUT_CALLS)
LEGAL: dict[Status, Moves] = {
    Status.QUEUED: {
        "run_claimed": None,
        "tool_result": Status.QUEUED,
        **aside(Status.QUEUED),
        "cancel_requested": Status.QUEUED,
        "run_cancelled": Status.CANCELLED,
    },
    Status.RUNNING: {
        **CALLS,
        "run_claimed": None,
        "code_changed": Status.RUNNING,
        "notice_injected": Status.RUNNING,
        "turn_started": Status.RUNNING,
        "budget_reserved": Status.RUNNING,
        "budget_released": Status.RUNNING,
        "assistant_delta": Status.RUNNING,
        "assistant_interrupted": Status.RUNNING,
        "assistant_message": Status.RUNNING,
        **aside(Status.RUNNING),
        "cancel_requested": Status.RUNNING,
        "run_completed": Status.COMPLETED,
        "run_failed": Status.FAILED,
        "run_cancelled": Status.CANCELLED,
    },
    Status.AWAITING_TOOL: {
        **CALLS,
        "run_claimed": None,
        "code_changed": Status.AWAITING_TOOL,
        "tool_call_started": Status.AWAITING_TOOL,
        **aside(Status.AWAITING_TOOL),
        "cancel_requested": Status.AWAITING_TOOL,
        "run_failed": Status.FAILED,
        "run_cancelled": Status.CANCELLED,
    },
    Status.AWAITING_APPROVAL: {
        **CALLS,
        "run_claimed": None,
        **aside(Status.AWAITING_APPROVAL),
        "cancel_requested": Status.AWAITING_APPROVAL,
        "run_cancelled": Status.CANCELLED,
        "run_timed_out": Status.TIMED_OUT,
    },
    Status.COMPLETED: {**aside(Status.COMPLETED)},
    Status.FAILED: {**aside(Status.FAILED), "run_requeued": Status.QUEUED},
    Status.CANCELLED: {
        **aside(Status.CANCELLED),
        "processes_checked": Status.CANCELLED,
        "run_requeued": Status.QUEUED,
    },
    Status.TIMED_OUT: {**aside(Status.TIMED_OUT), "run_requeued": Status.QUEUED},
}
"""Where each event leads in each state, None: where the calls say; what is missing here is illegal."""
every_pair = pytest.mark.parametrize(("status", "kind"), list(product(Status, ONE_OF_EACH)))


def counts_after(status: Status, kind: str) -> list[tuple[int, int]]:
    """What can be open, and wait, after an event in a state; an event that is about no call changes neither."""
    if kind in ABOUT_CALLS:
        least, waiting = ABOUT_CALLS[kind]
        return [counts for counts in BY_CALLS if counts[0] >= least and counts[1] >= waiting]
    if status is Status.QUEUED:
        return [(0, 0), (1, 0)]
    return [counts for counts, stands in BY_CALLS.items() if stands is status] or [(0, 0)]


def test_the_table_of_events_covers_every_event() -> None:
    kinds = {kind.model_fields["type"].default for kind in get_args(Event)}
    assert set(ONE_OF_EACH) == kinds
    assert set(LEGAL) == set(Status) == set(TRANSITIONS)


@every_pair
def test_a_state_and_an_event_lead_where_the_table_says_or_nowhere(status: Status, kind: str) -> None:
    for counts in counts_after(status, kind):
        if kind in LEGAL[status]:
            after = status_after(status, ONE_OF_EACH[kind], *counts)
            assert after is (LEGAL[status][kind] or BY_CALLS[counts])
            step_by_step = {Status.RUNNING, *TRANSITIONS[Status.RUNNING]} if kind == "run_claimed" else set()
            assert after is status or after in TRANSITIONS[status] | step_by_step
        else:
            with pytest.raises(IllegalTransition) as refusal:
                status_after(status, ONE_OF_EACH[kind], *counts)
            assert repr(str(status)) in str(refusal.value) and repr(kind) in str(refusal.value)
            assert pickle.loads(pickle.dumps(refusal.value)).args == refusal.value.args


PATHS: dict[Status, list[Event]] = {
    Status.QUEUED: [],
    Status.RUNNING: [CLAIMED],
    Status.AWAITING_TOOL: [*BEGAN, requested()],
    Status.AWAITING_APPROVAL: [*BEGAN, requested(), asked()],
    Status.COMPLETED: [*BEGAN, RunCompleted(output="hm", stop_reason="end_turn")],
    Status.FAILED: [*BEGAN, requested(), RunFailed(code="c", message="m", phase="tool")],
    Status.CANCELLED: [RunCancelled(reason="r")],
    Status.TIMED_OUT: [
        *BEGAN,
        requested(),
        asked(),
        ApprovalExpired(tool_call_id=CALL, question="q1"),
        RunTimedOut(reason="r"),
    ],
}


def at(status: Status) -> State:
    """A state with this status, with an open call where the status means one."""
    state = evolve_all(State(created()), PATHS[status])
    assert state.status is status
    return state


@every_pair
def test_evolve_refuses_what_the_table_refuses_and_names_both(status: Status, kind: str) -> None:
    state, event = at(status), ONE_OF_EACH[kind]
    if kind in LEGAL[status]:
        return
    with pytest.raises(IllegalTransition) as refusal:
        evolve(state, event)
    assert repr(str(status)) in str(refusal.value) and repr(kind) in str(refusal.value)


def test_no_event_leaves_a_completed_run_and_only_a_requeue_leaves_another_end() -> None:
    for status in TERMINAL:
        left = {kind for kind, to in LEGAL[status].items() if to is not status}
        assert left == (set() if status is Status.COMPLETED else {"run_requeued"})


def test_a_run_does_not_complete_while_a_call_is_open() -> None:
    with pytest.raises(IllegalTransition, match="1 calls are open"):
        status_after(Status.RUNNING, ONE_OF_EACH["run_completed"], 1, 0)


WRONG: dict[str, Callable[[State], Event]] = {
    "a turn that is not due": lambda state: TurnStarted(turn_index=5),
    "a second start of a turn": lambda state: TurnStarted(turn_index=1),
    "a message of no turn": lambda state: answer(3),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_turns_come_in_order(wrong: str) -> None:
    state = evolve_all(State(created()), [*BEGAN, TurnStarted(turn_index=1)])
    with pytest.raises(IllegalTransition):
        evolve(state, WRONG[wrong](state))


@pytest.mark.parametrize(
    "event",
    [result("t0c9"), result("t0c1"), requested(2, turn=1), marked().model_copy(update={"tool_call_id": "t0c1"})],
    ids=["result of nothing", "second result", "call of another turn", "mark of a closed call"],
)
def test_an_event_about_a_call_needs_that_call_to_be_open(event: Event) -> None:
    state = evolve_all(State(created()), [*TWO_CALLS, result("t0c1")])
    with pytest.raises(IllegalTransition):
        evolve(state, event)


def test_one_open_call_keeps_the_run_waiting_for_its_tools() -> None:
    state = evolve_all(State(created()), [*TWO_CALLS, result("t0c1")])
    assert state.status is Status.AWAITING_TOOL
    assert [call.tool_call_id for call in state.open_calls] == ["t0c0"]
    assert evolve(state, result("t0c0")).status is Status.RUNNING


# -- what to do -------------------------------------------------------------------------------------------


def test_nothing_is_asked_of_the_model_before_every_call_has_its_result() -> None:
    state = evolve_all(State(created()), [*TWO_CALLS, result("t0c1")])
    step = next_step(state)
    assert isinstance(step, Execute) and [call.tool_call_id for call in step.calls] == ["t0c0"]
    assert next_step(evolve(state, result("t0c0"))) == due(1)


def test_a_model_call_that_was_under_way_is_made_again() -> None:
    state = evolve_all(State(created()), [CLAIMED, TurnStarted(turn_index=0), CLAIMED])
    assert next_step(state) == due(0, started=True)


@pytest.mark.parametrize("status", [Status.QUEUED, Status.AWAITING_APPROVAL, *sorted(TERMINAL)])
def test_an_owner_has_nothing_to_do_for_a_run_that_waits_or_has_ended(status: Status) -> None:
    assert next_step(at(status)) == Wait()


def test_the_turns_that_a_run_may_take_are_bounded_by_its_own_snapshot() -> None:
    state = evolve_all(begin(created(config={"limits": {"max_turns": 1}})), [*BEGAN, requested(), result()])
    step = next_step(state)
    assert isinstance(step, Finish)
    assert isinstance(step.events[-1], RunFailed) and step.events[-1].code == "max_turns"


@pytest.mark.parametrize(
    ("effect", "started", "text"),
    [
        ("read_only", False, "may have been read"),
        ("idempotent_write", False, "may have run"),
        ("non_idempotent", False, "never started"),
        ("non_idempotent", True, "may have taken effect"),
    ],
)
def test_a_cancelled_run_says_of_each_open_call_what_is_true(effect: str, started: bool, text: str) -> None:
    events: list[Event] = [*BEGAN, requested(effect=effect)]
    events += [marked()] if started else []
    state = evolve_all(State(created()), [*events, CancelRequested(by="me", reason="enough")])
    step = next_step(state)
    assert isinstance(step, Finish)
    closing, end = step.events
    assert isinstance(closing, ToolResult) and closing.is_error and text in closing.content
    assert end == RunCancelled(event_id=end.event_id, reason="enough")
    assert evolve_all(state, step.events).status is Status.CANCELLED


# -- folding ----------------------------------------------------------------------------------------------


def history(turns: int, calls: int = 1) -> Iterator[Stored]:
    """A long run, event by event."""

    def events() -> Iterator[Event]:
        yield created()
        yield CLAIMED
        for turn in range(turns):
            yield TurnStarted(turn_index=turn)
            yield answer(turn)
            yield from (requested(number, turn) for number in range(calls))
            yield from (result(f"t{turn}c{number}") for number in range(calls))

    for seq, event in enumerate(events(), 1):
        yield Stored(seq, float(seq), 1, event)


def test_a_fold_in_pieces_is_the_fold_of_the_whole() -> None:
    log = list(history(20, calls=2))
    whole = fold(log)
    assert whole == fold(log)
    for cut in range(1, len(log)):
        assert fold(log[cut:], fold(log[:cut])) == whole


def test_a_log_with_a_gap_or_without_a_beginning_is_not_folded() -> None:
    log = list(history(3))
    for bad in ([], log[1:], log[:4] + log[5:], [log[0], log[0]]):
        with pytest.raises(CorruptLog):
            fold(bad)


def test_folding_ten_times_the_events_takes_about_ten_times_as_long() -> None:
    short, long = list(history(250)), list(history(2_500))
    assert len(long) > 10_000

    def seconds(log: list[Stored]) -> float:
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            fold(log)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(long) < 40 * seconds(short)


def test_a_conversation_of_many_turns_pairs_every_call() -> None:
    state = fold(history(30, calls=3))
    said = messages(state)
    check_messages(said)
    assert len(said) == 1 + 2 * 30


def test_the_checker_of_conversations_can_fail() -> None:
    good = messages(fold(history(2, calls=2)))
    call, results = good[1], good[2]
    bad: list[list[dict[str, Any]]] = [
        good[:-1],
        [*good[:2], {**results, "results": results["results"][:1]}, *good[3:]],
        [*good[:2], {**results, "results": results["results"][::-1]}, *good[3:]],
        [good[0], call, results, call, results],
        [good[0], results],
    ]
    for messages_ in bad:
        with pytest.raises(AssertionError):
            check_messages(messages_)


def test_keys_differ_by_run_and_call_and_stay_the_same() -> None:
    keys = {idempotency_key(run, call) for run in ("a" * 20, "b" * 20) for call in ("t0c0", "t0c1", "t1c0")}
    assert len(keys) == 6
    assert idempotency_key("a" * 20, "t0c0") in keys


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_an_event_survives_its_codec_and_pickle(kind: str) -> None:
    event = ONE_OF_EACH[kind]
    assert decode(encode(event)) == event
    assert pickle.loads(pickle.dumps(event)) == event
    assert isinstance(event, RunCreated) == (kind == "run_created")
