"""Declarations of tools and agents: the schema comes from the signature, and what makes no sense is refused."""

from __future__ import annotations

import functools
import json
import pickle
import threading
from decimal import Decimal
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ValidationError

from perdure.actors.agent import Agent
from perdure.actors.approvals import approval_digest
from perdure.actors.guards import Limits
from perdure.actors.tools import Approval, ApprovalAsk, Settled, Tool, ToolContext, ToolOptions, Word, tool
from perdure.store.errors import UsageError
from perdure.store.events import canonical

CONTEXT = ToolContext("r", 0, "t0c0", 1, "key", 0.0)


class Address(BaseModel):
    city: str


@tool(effect="idempotent_write", timeout_s=5)
def send(ctx: ToolContext, order: str, amount: Decimal, to: Address, how: Literal["fast", "slow"] = "fast") -> str:
    """Send an order."""
    return f"{order} {amount + 1} {to.city} {how} {ctx.idempotency_key}"


def test_name_description_and_schema_come_from_the_function() -> None:
    assert (send.name, send.description, send.options.effect) == ("send", "Send an order.", "idempotent_write")
    assert send.schema["required"] == ["order", "amount", "to"]
    properties = send.schema["properties"]
    assert isinstance(properties, dict) and set(properties) == {"order", "amount", "to", "how"}
    assert properties["how"] == {"default": "fast", "enum": ["fast", "slow"], "title": "How", "type": "string"}


def test_arguments_are_parsed_to_the_types_of_the_signature() -> None:
    text = '{"order": "7", "amount": "1.5", "to": {"city": "Bern"}}'
    assert send.bind(send.handler, CONTEXT, text)() == "7 2.5 Bern fast key"


@pytest.mark.parametrize("text", ["{}", "[]", '{"order": 7, "amount": 1, "to": {"city": "x"}}', "not json"])
def test_arguments_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        send.bind(send.handler, CONTEXT, text)


def test_a_declared_tool_is_still_a_function() -> None:
    assert send(CONTEXT, "7", Decimal(1), Address(city="Bern")) == "7 2 Bern fast key"


def test_a_context_is_passed_only_where_one_is_taken() -> None:
    def without(x: int) -> int:
        return x

    def by_name(ctx: Any, x: int) -> Any:
        return ctx.tool_call_id, x

    for handler, value in ((without, 1), (by_name, ("t0c0", 1))):
        declared = Tool(handler, ToolOptions("read_only"))
        assert set(declared.schema["properties"]) == {"x"}  # type: ignore[arg-type]
        assert declared.bind(declared.handler, CONTEXT, '{"x": 1}')() == value


class Machine:
    async def __call__(self, ctx: ToolContext, x: int) -> int:
        return x


def test_names_of_objects_and_partials_are_those_of_what_they_wrap() -> None:
    def look(y: int, x: int) -> int:
        return x + y

    assert Tool(functools.partial(look, 1), ToolOptions("read_only")).name == "look"
    machine = Tool(Machine(), ToolOptions("read_only"))
    assert machine.name == "Machine" and machine.takes_context
    assert Tool(look, ToolOptions("read_only"), "other").name == "other"


def starred(*x: int) -> None: ...
def keywords(**x: int) -> None: ...
def positional(x: int, /) -> None: ...
def unknown_type(x: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def without_schema(x: threading.Event) -> None: ...
def underscored(_x: int) -> None: ...
def configured(model_config: int) -> None: ...


@pytest.mark.parametrize(
    "handler", [starred, keywords, positional, unknown_type, without_schema, underscored, configured]
)
def test_a_signature_that_no_model_can_call_is_refused_when_it_is_declared(handler: Any) -> None:
    with pytest.raises(UsageError, match=f"tool '{handler.__name__}'"):
        tool(effect="read_only")(handler)


@pytest.mark.parametrize(
    "options",
    [
        {"effect": "write"},
        {"effect": "read_only", "timeout_s": 0},
        {"effect": "read_only", "attempts_max": 0},
        {"effect": "read_only", "approval": "sometimes"},
        {"effect": "read_only", "approval": None},
        {"effect": "read_only", "approval": "always", "approval_timeout_s": 0},
        {"effect": "read_only", "approval": "always", "approval_timeout_s": float("inf")},
        {"effect": "read_only", "approval": "always", "approval_timeout_s": float("nan")},
        {"effect": "read_only", "approval": "always", "approval_timeout_s": 9.0, "approval_default": "allow"},
        {"effect": "read_only", "approval": "always", "approval_default": "reject"},
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(UsageError):
        tool(**options)


def test_a_tool_says_who_has_to_approve_its_calls() -> None:
    def policy(ask: ApprovalAsk) -> Word:
        return "ask" if ask.arguments["x"] > 100 else "allow"

    def pay(x: int) -> int:
        return x

    assert tool(effect="read_only")(pay).approval == Approval("never", None, None)
    gated = tool(effect="read_only", approval=policy, approval_timeout_s=3600, approval_default="reject")(pay)
    assert gated.approval == Approval(policy, 3600, "reject")
    assert pickle.loads(pickle.dumps(gated.options)) == gated.options, "the policy would travel with the options"


def test_a_schema_is_json_whatever_the_defaults_are() -> None:
    def wait(longest: float = float("inf")) -> None: ...

    assert json.loads(canonical(Tool(wait, ToolOptions("read_only")).schema))["properties"]["longest"] == {
        "default": "Infinity",
        "title": "Longest",
        "type": "number",
    }


def test_a_digest_is_of_tool_arguments_and_schema() -> None:
    digests = {
        approval_digest("pay", '{"x":1}', {"a": 1, "b": 2}),
        approval_digest("pay", '{"x":1}', {"b": 2, "a": 1}),
        approval_digest("pay", '{"x":2}', {"a": 1, "b": 2}),
        approval_digest("send", '{"x":1}', {"a": 1, "b": 2}),
        approval_digest("pay", '{"x":1}', {"a": 1, "b": 3}),
    }
    assert len(digests) == 4


def test_only_effects_that_are_settled_have_a_probe() -> None:
    with pytest.raises(UsageError, match="only non_idempotent"):
        send.reconcile(lambda **_: Settled.did_not_happen())
    pay = Tool(lambda x: x, ToolOptions("non_idempotent", timeout_s=7.0), "pay")
    assert not pay.options.has_probe
    pay.reconcile(lambda x: Settled.unknown("?"))
    assert pay.options.has_probe and pay.options.timeout_s == 7.0


def test_the_world_is_quiet_after_the_timeout_unless_the_tool_says_otherwise() -> None:
    assert ToolOptions("non_idempotent", timeout_s=7.0).quiet_s == 7.0
    assert ToolOptions("non_idempotent", timeout_s=7.0, settles_after_s=0).quiet_s == 0


def test_an_agent_does_not_have_two_tools_of_one_name() -> None:
    with pytest.raises(ValidationError, match="two tools are named send"):
        Agent(name="a", model="script:x", tools=(send, send))


def test_limits_are_bounded_and_unknown_settings_refused() -> None:
    with pytest.raises(ValidationError):
        Limits(max_turns=0)
    with pytest.raises(ValidationError):
        Agent(name="a", model="script:x", tols=())  # type: ignore[call-arg]


def test_the_snapshot_of_an_agent_names_its_model_only_if_it_is_a_string() -> None:
    assert Agent(name="a", model="script:x").snapshot()["model"] == "script:x"
    assert Agent(name="a", model=lambda request: "x").snapshot()["model"] is None
    assert Agent(name="a", model=lambda request: "x").snapshot("script:y")["model"] == "script:y"
