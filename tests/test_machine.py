"""The pure machine: every state meets every event, and its fold agrees with the store's projections."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, get_args

import pytest

from perdure.actors.machine import (
    CallModel,
    Execute,
    Finish,
    State,
    Wait,
    evolve,
    evolve_all,
    fold,
    idempotency_key,
    messages,
    next_step,
)
from perdure.store.errors import CorruptLog, IllegalTransition
from perdure.store.events import (
    AssistantMessage,
    CancelRequested,
    Event,
    RunCancelled,
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunRequeued,
    Stored,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolEvidence,
    ToolResult,
    TurnStarted,
    Usage,
    decode,
    encode,
)
from perdure.store.states import TERMINAL, TRANSITIONS, Status, status_after

from .fakes import check_messages, created

CALL = "t0c0"


def requested(number: int = 0, turn: int = 0, effect: Any = "non_idempotent") -> ToolCallRequested:
    call_id = f"t{turn}c{number}"
    return ToolCallRequested(
        turn_index=turn,
        tool_call_id=call_id,
        provider_id="call_0",
        name="pay",
        arguments="{}",
        effect=effect,
        idempotency_key=f"key of {call_id}",
    )


def marked(attempt: int = 1) -> ToolCallStarted:
    return ToolCallStarted(
        tool_call_id=CALL,
        attempt=attempt,
        nonce="n",
        node="node",
        boot_id="boot",
        pid=1,
        pid_started=1.0,
        lock="/lock",
        hold_s=1.0,
    )


def result(call_id: str = CALL, content: str = '"ok"') -> ToolResult:
    return ToolResult(tool_call_id=call_id, attempt=1, content=content)


def answer(turn: int = 0, text: str = "hm") -> AssistantMessage:
    return AssistantMessage(turn_index=turn, text=text, stop_reason="end_turn", usage=Usage(input_tokens=1))


CLAIMED = RunClaimed(epoch=1, owner="s", reason="start")
BEGAN: tuple[Event, ...] = (CLAIMED, TurnStarted(turn_index=0), answer())
TWO_CALLS: tuple[Event, ...] = (*BEGAN, requested(0), requested(1))
ONE_OF_EACH: dict[str, Event] = {
    event.type: event
    for event in (
        created(),
        CLAIMED,
        TurnStarted(turn_index=0),
        answer(),
        requested(),
        marked(),
        ToolCallRetried(tool_call_id=CALL, attempt=2, reason="gone"),
        ToolCallUnsettled(tool_call_id=CALL, attempt=1, why="no probe"),
        result(),
        ToolEvidence(tool_call_id=CALL, attempt=1, content='"ok"', is_error=False, why="late"),
        CancelRequested(by="me"),
        RunCompleted(output="x", stop_reason="end_turn"),
        RunFailed(code="c", message="m", phase="model"),
        RunCancelled(reason="r"),
        RunRequeued(by="me"),
    )
}
LEGAL: dict[Status, dict[str, Status]] = {
    Status.QUEUED: {
        "run_claimed": Status.RUNNING,
        "tool_result": Status.QUEUED,
        "tool_evidence": Status.QUEUED,
        "cancel_requested": Status.QUEUED,
        "run_cancelled": Status.CANCELLED,
    },
    Status.RUNNING: {
        "run_claimed": Status.RUNNING,
        "turn_started": Status.RUNNING,
        "assistant_message": Status.RUNNING,
        "tool_call_requested": Status.AWAITING_TOOL,
        "tool_result": Status.RUNNING,
        "tool_evidence": Status.RUNNING,
        "cancel_requested": Status.RUNNING,
        "run_completed": Status.COMPLETED,
        "run_failed": Status.FAILED,
        "run_cancelled": Status.CANCELLED,
    },
    Status.AWAITING_TOOL: {
        "run_claimed": Status.AWAITING_TOOL,
        "tool_call_requested": Status.AWAITING_TOOL,
        "tool_call_started": Status.AWAITING_TOOL,
        "tool_call_retried": Status.AWAITING_TOOL,
        "tool_call_unsettled": Status.AWAITING_TOOL,
        "tool_result": Status.RUNNING,
        "tool_evidence": Status.AWAITING_TOOL,
        "cancel_requested": Status.AWAITING_TOOL,
        "run_failed": Status.FAILED,
        "run_cancelled": Status.CANCELLED,
    },
    Status.AWAITING_APPROVAL: {
        "run_claimed": Status.AWAITING_APPROVAL,
        "tool_call_requested": Status.AWAITING_TOOL,
        "tool_result": Status.RUNNING,
        "tool_evidence": Status.AWAITING_APPROVAL,
        "cancel_requested": Status.AWAITING_APPROVAL,
        "run_cancelled": Status.CANCELLED,
    },
    Status.COMPLETED: {"tool_evidence": Status.COMPLETED},
    Status.FAILED: {"tool_evidence": Status.FAILED, "run_requeued": Status.QUEUED},
    Status.CANCELLED: {"tool_evidence": Status.CANCELLED, "run_requeued": Status.QUEUED},
    Status.TIMED_OUT: {"tool_evidence": Status.TIMED_OUT, "run_requeued": Status.QUEUED},
}
"""What each event does in each state when no call is left open by it; what is missing here is illegal."""
every_pair = pytest.mark.parametrize(("status", "kind"), list(product(Status, ONE_OF_EACH)))


def test_the_table_of_events_covers_every_event() -> None:
    kinds = {kind.model_fields["type"].default for kind in get_args(Event)}
    assert set(ONE_OF_EACH) == kinds
    assert set(LEGAL) == set(Status) == set(TRANSITIONS)


@every_pair
def test_a_state_and_an_event_lead_where_the_table_says_or_nowhere(status: Status, kind: str) -> None:
    open_calls = 1 if kind == "run_claimed" and status is Status.AWAITING_TOOL else 0
    if kind in LEGAL[status]:
        after = status_after(status, ONE_OF_EACH[kind], open_calls)
        assert after is LEGAL[status][kind]
        assert after is status or after in TRANSITIONS[status]
    else:
        with pytest.raises(IllegalTransition) as refusal:
            status_after(status, ONE_OF_EACH[kind], open_calls)
        assert repr(str(status)) in str(refusal.value) and repr(kind) in str(refusal.value)
        assert pickle.loads(pickle.dumps(refusal.value)).args == refusal.value.args


def at(status: Status) -> State:
    """A state with this status, with an open call where the status means one."""
    paths: dict[Status, list[Event]] = {
        Status.QUEUED: [],
        Status.RUNNING: [CLAIMED],
        Status.AWAITING_TOOL: [*BEGAN, requested()],
        Status.COMPLETED: [*BEGAN, RunCompleted(output="hm", stop_reason="end_turn")],
        Status.FAILED: [*BEGAN, requested(), RunFailed(code="c", message="m", phase="tool")],
        Status.CANCELLED: [RunCancelled(reason="r")],
    }
    if status in paths:
        return evolve_all(State(created()), paths[status])
    reached = evolve_all(State(created()), paths[Status.AWAITING_TOOL])  # states that no event of this version leads to
    return State(reached.created, status, reached.seq, reached.epoch, turn=reached.turn)


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
        status_after(Status.RUNNING, ONE_OF_EACH["run_completed"], 1)


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
    assert next_step(evolve(state, result("t0c0"))) == CallModel(1, False)


def test_a_model_call_that_was_under_way_is_made_again() -> None:
    state = evolve_all(State(created()), [CLAIMED, TurnStarted(turn_index=0), CLAIMED])
    assert next_step(state) == CallModel(0, True)


@pytest.mark.parametrize("status", [Status.QUEUED, Status.AWAITING_APPROVAL, *TERMINAL])
def test_an_owner_has_nothing_to_do_for_a_run_that_waits_or_has_ended(status: Status) -> None:
    assert next_step(at(status)) == Wait()


def test_the_turns_that_a_run_may_take_are_bounded_by_its_own_snapshot() -> None:
    state = evolve_all(State(created(config={"limits": {"max_turns": 1}})), [*BEGAN, requested(), result()])
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


def test_a_run_fails_as_unsettled_only_when_every_open_call_is_in_question() -> None:
    unsettled = [ToolCallUnsettled(tool_call_id=f"t0c{n}", attempt=1, why="no probe") for n in (0, 1)]
    state = evolve_all(State(created()), [*TWO_CALLS, unsettled[0]])
    assert isinstance(next_step(state), Execute)
    state = evolve(state, unsettled[1])
    step = next_step(state)
    assert isinstance(step, Finish) and isinstance(step.events[0], RunFailed)
    assert step.events[0].code == "unsettled_effect"
    requeued = evolve_all(state, [*step.events, RunRequeued(by="me"), CLAIMED])
    assert isinstance(next_step(requeued), Execute), "a resume asks again"


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
