"""Code that changes under a run: what becomes of its open calls, and what its log says of it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from perdure.actors.agent import Agent
from perdure.actors.changed import closings, code_change, misfits
from perdure.actors.machine import State, evolve, evolve_all
from perdure.actors.requests import Misfit
from perdure.actors.tools import Tool, ToolOptions
from perdure.store.errors import IllegalTransition
from perdure.store.events import (
    CodeChanged,
    Effect,
    Event,
    Raised,
)
from perdure.store.rows import CallRow
from perdure.store.states import Status

from .changed_kit import NEW, pay, pay_in, tool_of
from .fakes import AGENT, RUN, created
from .machine_kit import BEGAN, CALL, asked, decided, requested, result


def agent_of(*tools: Tool) -> Agent:
    return Agent(name="a", model="script:x", tools=tools)


def row_of(effect: Effect, attempt: int = 1, **fields: Any) -> CallRow:
    return CallRow(RUN, CALL, 0, "pay", effect, attempt, **fields)


def broken(x: int) -> int:
    raise RuntimeError("no table of rates")


def priced(x: Annotated[int, AfterValidator(broken)]) -> None: ...


def state_of(*events: Event, effect: Effect = "idempotent_write", config: Any = None) -> State:
    """A run with one open call of `pay`, and what came after."""
    return evolve_all(State(created(config=config or {})), [*BEGAN, requested(effect=effect), *events])


@pytest.mark.parametrize(
    ("was", "now", "raised"),
    [
        ("read_only", "read_only", None),
        ("read_only", "idempotent_write", "idempotent_write"),
        ("read_only", "non_idempotent", "non_idempotent"),
        ("idempotent_write", "non_idempotent", "non_idempotent"),
        ("idempotent_write", "read_only", None),
        ("non_idempotent", "idempotent_write", None),
    ],
)
def test_an_open_call_takes_the_stricter_class(was: Effect, now: Effect, raised: Effect | None) -> None:
    state = state_of(effect=was)
    event = code_change(state, agent_of(tool_of(now)), "e")
    assert {call_id: one.effect for call_id, one in event.raised.items()} == ({CALL: raised} if raised else {})
    (call,) = evolve(state, event).open_calls
    assert call.effect == call.effective.effect == (raised or was)
    assert call.started == (raised == "non_idempotent"), "what may have run unmarked counts as marked"


def test_a_call_without_an_attempt_and_a_closed_one_are_not_taken_for_begun() -> None:
    approved = state_of(asked(), decided())
    agent = agent_of(tool_of("non_idempotent"))
    (call,) = evolve(approved, code_change(approved, agent, "e")).open_calls
    assert (call.effect, call.attempt, call.started) == ("non_idempotent", 0, False)
    assert code_change(state_of(result()), agent, "e").raised == {}


def test_an_attempt_may_act_for_the_longest_timeout_that_its_tool_has_ever_had() -> None:
    config = {"tools": {"pay": {"schema": "s", "effect": "idempotent_write", "timeout_s": 10.0}}}
    between = CodeChanged(was="d", digest="c", tools={"pay": {"timeout_s": 100.0}, "other": {"timeout_s": 999.0}})
    agent = agent_of(tool_of("non_idempotent", timeout_s=20.0))
    assert code_change(state_of(config=config), agent, "e").raised[CALL].hold_s == 15.0
    assert code_change(state_of(between, config=config), agent, "e").raised[CALL].hold_s == 105.0
    assert code_change(state_of(), agent, "e").raised[CALL].hold_s == 25.0, "an old log says nothing of tools"


def test_the_log_knows_the_newest_code_and_what_its_tools_are() -> None:
    tool = tool_of("read_only")
    state = state_of()
    assert state.code == AGENT
    event = code_change(state, agent_of(tool), "e")
    assert (event.was, event.digest, event.tools) == ("d", "e", {"pay": tool.facts})
    assert evolve(state, event).code == NEW
    assert agent_of(tool).snapshot()["tools"] == {"pay": tool.facts}
    assert tool.facts != tool_of("read_only", pay_in).facts


def test_only_an_open_call_is_raised() -> None:
    event = CodeChanged(was="d", digest="e", tools={}, raised={CALL: Raised(effect="non_idempotent", hold_s=1.0)})
    for state in (state_of(result()), State(created(), Status.RUNNING)):
        with pytest.raises(IllegalTransition):
            evolve(state, event)


def test_a_call_whose_tool_is_gone_renamed_or_takes_other_arguments_is_a_misfit_that_says_so() -> None:
    calls = [call.__class__(call.request.model_copy(update={"arguments": '{"x":1}'})) for call in state_of().open_calls]
    renamed = Tool(pay, ToolOptions("idempotent_write"), "pay_out")

    def judged(*tools: Tool) -> Misfit | None:
        return misfits(calls, agent_of(*tools)).get(CALL)

    assert judged(tool_of("idempotent_write")) is None
    for gone in (judged(), judged(renamed)):
        assert gone and gone.kind == "ToolRemoved" and "'pay' was removed" in gone.problem
    other = judged(tool_of("idempotent_write", pay_in))
    assert other and other.kind == "ToolChanged" and "currency: Field required" in other.problem


def test_a_validator_that_breaks_makes_a_misfit_and_no_crash() -> None:
    calls = [call.__class__(call.request.model_copy(update={"arguments": '{"x":1}'})) for call in state_of().open_calls]
    found = misfits(calls, agent_of(tool_of("idempotent_write", priced)))
    assert "RuntimeError: no table of rates" in found[CALL].problem


MISFIT = {CALL: Misfit("ToolRemoved", "the tool 'pay' was removed")}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (row_of("read_only"), "it may have run, which has changed nothing"),
        (row_of("idempotent_write"), "it may have run, with the idempotency key key"),
        (row_of("idempotent_write", 0, gate="approved"), "it has not run"),
        (row_of("non_idempotent"), "it has not run"),
        (row_of("non_idempotent", 2, started_attempt=1), "it has not run"),
        (row_of("non_idempotent", started_attempt=1), None),
        (row_of("non_idempotent", started_attempt=1, unsettled=True), None),
        (row_of("idempotent_write", 0, gate="asked"), None),
    ],
)
def test_a_call_that_cannot_go_on_is_closed_with_what_is_true_of_it_or_left_to_a_person(
    row: CallRow, said: str | None
) -> None:
    found = closings([row], MISFIT, {CALL: "key"})
    if said is None:
        assert found == []
        return
    (closed,) = found
    assert (closed.is_error, closed.source, closed.attempt) == (True, "validation", row.attempt)
    assert json.loads(closed.content) == {"error": "ToolRemoved", "message": f"the tool 'pay' was removed; {said}"}
    assert closings([row], {}, {}) == []
