"""Policies of tools: which calls a person is asked about, and that a policy which fails lets nothing pass."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure.actors import approvals
from perdure.actors.approvals import approval_digest
from perdure.actors.model import ModelReply, ToolUse
from perdure.actors.tools import Approval, ApprovalAsk, Policy, Tool, ToolOptions
from perdure.store.events import ApprovalRequested, ToolResult
from perdure.store.log import Leave

from .fakes import RUN, held, refused
from .gate_kit import LOOK, ONE, Office, paying
from .shapes import asks, says


async def test_a_gated_call_parks_its_run_and_nothing_of_it_begins() -> None:
    office = Office(ONE, paying())
    assert await office.drive() == "awaiting_approval"
    (question,) = await office.events(ApprovalRequested)
    assert (question.name, question.arguments, question.effect) == ("pay", '{"x":0}', "idempotent_write")
    assert question.digest == approval_digest("pay", '{"x":0}', paying().schema)
    assert question.arguments_schema == paying().schema and "needs approval" in question.reason
    assert office.tools.works == []
    assert await refused(office.log, Leave(RUN, "t0c0", 0)) == "gated"
    await office.check()


@pytest.mark.parametrize(("levels", "end"), [(150, "awaiting_approval"), (300, "completed"), (20_000, "completed")])
async def test_arguments_of_a_gated_call_are_asked_about_as_deep_as_they_are_taken(levels: int, end: str) -> None:
    async def give(what: Any) -> str:
        raise AssertionError("nobody has approved it")

    seen: list[Any] = []

    def ruling(ask: ApprovalAsk) -> str:
        seen.append(ask.arguments)
        return "ask"

    raw = '{"what":' + "[" * levels + "1.10" + "]" * levels + "}"
    gate = Tool(give, ToolOptions("non_idempotent"), "give", Approval(ruling))
    office = Office([ModelReply(tool_calls=(ToolUse(name="give", raw=raw),)), says("done")], gate)
    assert await office.drive() == end
    questions = await office.events(ApprovalRequested)
    assert [question.arguments for question in questions] == ([raw] if end == "awaiting_approval" else [])
    assert len(seen) == len(questions)
    await office.check()


def raising(ask: ApprovalAsk) -> Any:
    raise ValueError("no table of limits")


async def exiting(ask: ApprovalAsk) -> Any:
    raise SystemExit(3)


async def cancelling(ask: ApprovalAsk) -> Any:
    raise asyncio.CancelledError


async def allowing(ask: ApprovalAsk) -> Any:
    return "allow"


class Denying:
    def __call__(self, ask: ApprovalAsk) -> Any:
        return "deny", f"{ask.tool} is closed"


def silent(ask: ApprovalAsk) -> Any:
    return None


RULINGS: dict[str, tuple[Policy, str, str]] = {
    "allows": (lambda ask: "allow", "allow", ""),
    "allows, async": (allowing, "allow", ""),
    "asks": (lambda ask: "ask", "ask", ""),
    "asks with a reason": (lambda ask: ("ask", "over the limit \ud800"), "ask", "over the limit \\ud800"),
    "denies": (lambda ask: "deny", "deny", "policy denies"),
    "denies with a reason": (Denying(), "deny", "pay is closed"),
    "raises": (raising, "ask", "ValueError: no table of limits"),
    "exits": (exiting, "ask", "SystemExit: 3"),
    "cancels itself": (cancelling, "ask", "CancelledError"),
    "says nothing": (silent, "ask", "answered a NoneType"),
    "says nonsense": (lambda ask: "yes", "ask", "answered 'yes'"),
    "gives a reason that is none": (lambda ask: ("deny", 7), "ask", "('deny', 7)"),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("policy", RULINGS)
async def test_a_policy_allows_asks_or_denies_and_one_that_fails_asks(policy: str) -> None:
    rule, word, reason = RULINGS[policy]
    office = Office(ONE, paying(Approval(rule)))
    assert await office.drive() == ("awaiting_approval" if word == "ask" else "completed")
    questions, results = await office.events(ApprovalRequested), await office.events(ToolResult)
    assert [reason in question.reason for question in questions] == [True] * (word == "ask")
    if word == "deny":
        assert reason in str(office.seen()[0]["content"]), "the model is told"
        assert results[0].is_error and results[0].source == "policy" and reason in results[0].content
    assert bool(office.tools.works) == (word == "allow")
    await office.check()


async def test_a_policy_that_does_not_answer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(ask: ApprovalAsk) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(approvals, "POLICY_S", 0)
    office = Office(ONE, paying(Approval(never)))
    assert await office.drive() == "awaiting_approval"
    assert "not answered within 0 s" in (await office.events(ApprovalRequested))[0].reason


async def test_an_owner_that_is_cancelled_while_a_policy_thinks_is_cancelled() -> None:
    thinking = asyncio.Event()

    async def never(ask: ApprovalAsk) -> Any:
        thinking.set()
        await asyncio.Event().wait()

    office = Office(ONE, paying(Approval(never)))
    driving = await office.start()
    await held(thinking.wait())
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held(driving)
    assert await office.log.calls(RUN) == []


async def test_a_policy_knows_the_call_and_the_run_and_changes_neither() -> None:
    seen: list[ApprovalAsk] = []

    def policy(ask: ApprovalAsk) -> Any:
        seen.append(ask)
        ask.arguments["x"] = 99
        ask.metadata["tier"].append("gold")  # type: ignore[union-attr]
        return "allow"

    office = Office((asks("look"), asks("pay"), says("ok")), LOOK, paying(Approval(policy)), metadata={"tier": ["new"]})
    assert await office.drive() == "completed"
    (ask,) = seen
    assert (ask.run_id, ask.tool, ask.effect, ask.turn_index) == (RUN, "pay", "idempotent_write", 1)
    assert office.seen()[0]["content"] == "paid 0"
    assert (await office.state()).created.metadata == {"tier": ["new"]}


async def test_a_policy_is_not_asked_about_arguments_that_do_not_fit() -> None:
    def policy(ask: ApprovalAsk) -> Any:
        raise AssertionError("asked")

    reply = ModelReply(tool_calls=(ToolUse(name="pay", arguments={"x": "many"}),))
    office = Office((reply, says("sorry")), paying(Approval(policy)))
    assert await office.drive() == "completed"
    assert (await office.events(ToolResult))[0].source == "validation"
