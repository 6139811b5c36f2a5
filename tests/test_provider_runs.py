"""Runs that ask a provider over the wire: kills, cuts, costs and errors, with the log outside of the provider."""

from __future__ import annotations

import asyncio
import json
import random
from decimal import Decimal
from typing import Any

import pytest

from perdure.actors import providers, reception
from perdure.actors.agent import Agent
from perdure.actors.model import Stream
from perdure.actors.providers.pace import Pace
from perdure.actors.providers.provider import Provider
from perdure.actors.tools import Tool, ToolOptions
from perdure.store.events import (
    AssistantDelta,
    AssistantInterrupted,
    AssistantMessage,
    CancelRequested,
    RunCompleted,
    RunFailed,
    ToolCallRequested,
    ToolResult,
)
from perdure.store.log import Cancel

from .fakes import RUN, accepted, created, held, new_run
from .gate_kit import Office
from .provider_kit import MODELS, Clock, keys, request
from .wire import Block, Call, Fault, Says, Text, Thinking, Wire

BOTH = pytest.mark.parametrize("kind", ["anthropic", "openai"])
SEEN: list[Any] = []
"""What the tools were given: the effects, outside of the product."""


def note(id: int = 0, text: str = "", price: Decimal = Decimal(0), rest: Any = None) -> str:
    SEEN.append((id, text, price, rest))
    return f"noted {len(SEEN)}"


NOTE = Tool(note, ToolOptions("idempotent_write"), "note")


class Asking(Office):
    """One run of an agent with a provider's model, at this server."""

    def __init__(self, kind: str, wire: Wire, **limits: Any) -> None:
        super().__init__([], NOTE)
        url = wire.anthropic if kind == "anthropic" else wire.openai
        settings = {"max_tokens": 256}
        self.agent = Agent(name="a", model=MODELS[kind], tools=(NOTE,), base_url=url, model_settings=settings)
        self.limits = limits
        self.budget: str | None = None
        self.new_journal()

    async def start(self) -> asyncio.Task[Any]:
        if await self.log.run(RUN) is None:
            snapshot = self.agent.snapshot(limits=self.limits)
            await new_run(self.log, created(config=snapshot, budget=self.budget))
        return await super().start()

    async def end(self) -> Any:
        await self.drive()
        await self.check()
        return (await self.log.read(RUN))[-1].event

    async def die(self, driving: asyncio.Task[Any]) -> None:
        """Kill the owner of the run."""
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, no effects yet, and a pace whose waits take no time."""
    clock = Clock()

    def opened(name: str, base_url: str | None) -> Provider:
        provider = Provider.open(name, base_url)
        provider.pace = Pace(clock, clock.sleep, random.Random(1))
        return provider

    keys(monkeypatch)
    SEEN.clear()
    monkeypatch.setattr(providers, "_opened", opened)
    monkeypatch.setattr(reception, "PIECE_S", 0)


THOUGHT = Thinking("Two notes, then an answer. \u00e9\u2028", "EqQBCkgIBRABGAIiQL8+/w==")
NOTES = Call("note", '{"id": 1}', "toolu_a"), Call("note", '{"id":2}', "toolu_b")
TWO: tuple[Block, ...] = (THOUGHT, Text("Noting."), *NOTES)
ONE: tuple[Block, ...] = (Thinking("One more.", "EqQBother="), Call("note", '{"id": 3}', "toolu_c"))


def story(kind: str, **last: Any) -> list[Says]:
    """A run of three turns: two calls, one call, an answer."""
    return [Says(TWO), Says(ONE), Says([Thinking("So.", "EqQBlast="), Text("All is noted.")], **last)]


@pytest.mark.parametrize("kind", ["anthropic", "openai", "responses"])
async def test_requests_after_a_kill_are_byte_for_byte_those_of_an_undisturbed_run(kind: str) -> None:
    async with Wire(*story(kind)) as wire:
        case = Asking(kind, wire)
        assert isinstance(await case.end(), RunCompleted)
        undisturbed = [asked.raw for asked in wire.served]
    assert len(undisturbed) == 3 and SEEN and [seen[0] for seen in SEEN] == [1, 2, 3]
    SEEN.clear()

    first, second, last = story(kind)
    stuck = Says(last.blocks, wait_after=6)
    async with Wire(first, second, stuck, stuck, last) as wire:
        case = Asking(kind, wire)
        driving = await case.start()
        await wire.reached.wait()
        await case.die(driving)  # in mid-stream
        await wire.asked[2].gone.wait()
        wire.reached.clear()
        driving = await case.start()  # from its log, as a new process has it
        await wire.reached.wait()
        await case.die(driving)
        assert isinstance(await case.end(), RunCompleted)
        asked = [_without_address(each.raw, wire) for each in wire.served]
    assert asked == [undisturbed[0], undisturbed[1], undisturbed[2], undisturbed[2], undisturbed[2]]
    assert [seen[0] for seen in SEEN] == [1, 2, 3], "no effect was doubled"


def _without_address(raw: bytes, wire: Wire) -> bytes:
    assert str(wire.port).encode() not in raw, "the address is no part of what is asked"
    return raw


@BOTH
async def test_a_run_killed_between_its_turns_goes_on_with_the_same_request(kind: str) -> None:
    async with Wire(*story(kind)) as wire:
        case = Asking(kind, wire)
        assert isinstance(await case.end(), RunCompleted)
        undisturbed = [asked.raw for asked in wire.served]
    SEEN.clear()
    async with Wire(*story(kind)) as wire:
        case = Asking(kind, wire)
        case.tools.holding["note"] = asyncio.Event()
        driving = await case.start()
        async with asyncio.timeout(20):
            while len(case.tools.works) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await case.die(driving)
        case.tools.holding["note"].set()
        case.new_journal()
        assert isinstance(await case.end(), RunCompleted)
        assert [asked.raw for asked in wire.served] == undisturbed


@BOTH
async def test_a_stream_that_breaks_off_is_paid_for_and_asked_again_and_is_no_turn(kind: str) -> None:
    broken = Says([Text("Half an answ")], tokens=(70, 0, 0, 9), cut_after=4)
    async with Wire(broken, Says([Text("A whole one.")], tokens=(70, 0, 0, 3))) as wire:
        case = Asking(kind, wire)
        end = await case.end()
        assert end.output == "A whole one." and len({asked.raw for asked in wire.served}) == 1
    (lost,) = await case.events(AssistantInterrupted)
    (message,) = await case.events(AssistantMessage)
    assert message.turn_index == 0 and lost.estimated and lost.usage.output_tokens > 0
    assert "".join(piece.text for piece in await case.events(AssistantDelta)).startswith("Half")
    row = await case.row()
    assert row.usage.output_tokens == 3 + lost.usage.output_tokens and row.turns == 1


@BOTH
async def test_a_cancel_closes_the_connection_and_keeps_the_text_with_its_cost(kind: str) -> None:
    async with Wire(Says([Text("A long answer, in many pieces")], tokens=(70, 0, 0, 9), wait_after=5)) as wire:
        case = Asking(kind, wire)
        driving = await case.start()
        await wire.reached.wait()
        async with asyncio.timeout(20):
            while not await case.events(AssistantDelta):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await accepted(case.log, Cancel(RUN, CancelRequested(by="ann")))
        case.owner.look()
        assert (await held(driving)).status == "cancelled"
        async with asyncio.timeout(1):
            await wire.asked[0].gone.wait()
    (lost,) = await case.events(AssistantInterrupted)
    text = "".join(piece.text for piece in await case.events(AssistantDelta))
    assert text and "A long answer, in many pieces".startswith(text)
    assert lost.estimated and lost.usage.output_tokens >= 1 and lost.usage.input_tokens > 0
    assert kind == "openai" or lost.usage.input_tokens == 70, "Anthropic tells at the start what the prompt takes"
    assert (await case.row()).usage == lost.usage


async def test_a_stream_that_breaks_off_is_charged_to_the_shared_budget_and_asked_again_in_it() -> None:
    broken = Says([Text("Half an answ")], tokens=(70, 0, 0, 9), cut_after=4)
    async with Wire(broken, broken, Says([Text("A whole one.")], tokens=(70, 0, 0, 3))) as wire:
        case = Asking("anthropic", wire)
        case.budget = "b"
        await case.log.cap_budget("b", {"tokens": 100_000, "cost": None})
        assert (await case.end()).output == "A whole one."
    (budget,) = await case.log.budgets()
    lost = [event.usage for event in await case.events(AssistantInterrupted)]
    assert len(lost) == 2 and budget.held.tokens == 0
    assert budget.spent.tokens >= 73 + sum(usage.input_tokens + usage.output_tokens for usage in lost)


async def test_streams_that_break_off_for_ever_end_the_run_resumably() -> None:
    broken = Says([Text("Half an answer")], cut_after=4)
    async with Wire(*[broken] * 21, Says([Text("Done.")])) as wire:
        case = Asking("anthropic", wire)
        end = await case.end()
        assert (end.code, len(wire.asked)) == ("unavailable", 21)
        await case.resume()
        assert (await case.end()).output == "Done."


@BOTH
async def test_a_call_that_was_cut_off_never_runs_and_the_model_is_told(kind: str) -> None:
    cut = Says([Call("note", '{"id": 1}', "a"), Call("note", '{"id": 2, "text": "unfin', "b")], "max_tokens")
    whole = Says([Call("note", '{"id": 3}', "c")], tokens=(9, 0, 0, 256))  # it says that it has ended, at the limit
    async with Wire(cut, whole, Says([Call("note", '{"id": 4}', "d")]), Says([Text("Done.")])) as wire:
        case = Asking(kind, wire)
        assert (await case.end()).output == "Done."
        told = json.dumps(wire.served[1].body["messages"])
        assert not any(asked.refused for asked in wire.asked)
    assert [seen[0] for seen in SEEN] == [1, 4]
    assert "CutOff" in told and "make it again" in told
    requested = await case.events(ToolCallRequested)
    assert json.loads(requested[1].arguments) == '{"id": 2, "text": "unfin', "the raw text is kept"
    errors = {result.tool_call_id: result.is_error for result in await case.events(ToolResult)}
    assert errors == {"t0c0": False, "t0c1": True, "t1c0": True, "t2c0": False}


@BOTH
async def test_digits_reach_the_tool_as_they_were_written(kind: str) -> None:
    written = (
        '{"id": 9007199254740993, "text": "1234567890123456789", "price": 12.10, '
        '"rest": [0.12345678901234567890, 12345678901234567890123]}'
    )
    exact = '{"id": 1, "price": 0.12345678901234567890123}'
    async with Wire(Says([Call("note", written, "a"), Call("note", exact, "b")]), Says([Text("Done.")])) as wire:
        case = Asking(kind, wire)
        await case.end()
    first, second = sorted(SEEN, reverse=True)
    assert first[:3] == (9007199254740993, "1234567890123456789", Decimal("12.10"))
    assert str(first[2]) == "12.10" and first[3][1] == 12345678901234567890123
    assert second[2] == Decimal("0.12345678901234567890123")
    requested = await case.events(ToolCallRequested)
    assert '"price":12.10' in requested[0].arguments and "0.12345678901234567890," in requested[0].arguments


BAD = ["{", "[1]", '"text"', '{"id": NaN}', '{"id": 1e999}', "[" * 20_000 + "]" * 20_000, '{"id": "x"}', '{"other": 1}']
GOOD = ["", "null", "{}", '"{\\"id\\": 0}"']


@BOTH
async def test_arguments_that_are_none_are_errors_for_the_model_and_never_run(kind: str) -> None:
    async with Wire(Says([Call("note", bad, f"c{n}") for n, bad in enumerate(BAD)]), Says([Text("Done.")])) as wire:
        case = Asking(kind, wire)
        assert (await case.end()).output == "Done." and not any(asked.refused for asked in wire.asked)
    assert SEEN == []
    results = await case.events(ToolResult)
    assert len(results) == len(BAD) and all("InvalidArguments" in result.content for result in results)


@BOTH
async def test_no_arguments_and_those_that_were_encoded_twice_are_what_they_mean(kind: str) -> None:
    async with Wire(Says([Call("note", good, f"c{n}") for n, good in enumerate(GOOD)]), Says([Text("Done.")])) as wire:
        assert (await Asking(kind, wire).end()).output == "Done."
    assert [seen[0] for seen in SEEN] == [0] * len(GOOD)


@BOTH
async def test_unknown_tools_are_answered_and_going_on_with_them_ends_the_run(kind: str) -> None:
    odd = Says([Call("note", '{"id": 1}', "a"), Call("delete_all", "{}", "b"), Call("", "{}", "c")])
    again = Says([Call("delete_all", "{}", "d")])
    async with Wire(odd, *[again] * 6) as wire:
        case = Asking(kind, wire)
        end = await case.end()
        assert end.code == "loop_detected" and not any(asked.refused for asked in wire.asked)
    assert len(SEEN) == 1
    results = {result.tool_call_id: result for result in await case.events(ToolResult)}
    assert len(results) >= 3 and not results["t0c0"].is_error
    assert all("available: note" in results[name].content for name in ("t0c1", "t0c2"))


async def test_lone_surrogates_of_a_model_leave_every_request_valid() -> None:
    odd = Says([Text("half \ud83d an emoji"), Call("note", '{"text": "\ud800"}', "a")])
    async with Wire(odd, Says([Text("Done.")])) as wire:
        case = Asking("anthropic", wire)
        assert (await case.end()).output == "Done."
        assert "half" in wire.served[1].raw.decode()


@BOTH
async def test_a_conversation_that_is_too_long_is_not_asked_again_and_can_be_gone_on_with(kind: str) -> None:
    async with Wire(Says([Call("note", json.dumps({"text": "x" * 3_000}))]), bytes_max=3_000) as wire:
        case = Asking(kind, wire)
        end = await case.end()
        assert (end.code, len(wire.asked)) == ("context_too_long", 2)
        wire._bytes_max, wire.plays = 100_000, [Says([Text("Done.")])]
        await case.resume()
        assert (await case.end()).output == "Done."


@BOTH
async def test_without_credit_a_run_ends_at_once_and_can_be_resumed(kind: str) -> None:
    error = {"type": "billing_error", "code": "insufficient_quota", "message": "Your credit balance is too low"}
    async with Wire(Fault(402, {"error": error}), Says([Text("Done.")])) as wire:
        case = Asking(kind, wire)
        end = await case.end()
        assert isinstance(end, RunFailed) and (end.code, len(wire.asked)) == ("no_credit", 1)
        assert "credit balance is too low" in end.message and "resume" in end.message
        await case.resume()
        assert (await case.end()).output == "Done."


PRICES = {
    "anthropic": (Decimal(2), Decimal("2.5"), Decimal("0.1"), Decimal(10)),
    "openai": (Decimal("2.5"), Decimal("2.5"), Decimal("1.25"), Decimal(10)),
}
"""US dollars for a million tokens of each kind, from the providers' pages."""


@BOTH
async def test_tokens_and_cost_are_what_the_wire_handed_out(kind: str) -> None:
    first = Says([Call("note", '{"id": 1}')], tokens=(3, 12_304, 0, 550))
    async with Wire(first, Says([Text("Done.")], tokens=(4, 0, 12_304, 7))) as wire:
        case = Asking(kind, wire)
        await case.end()
    usage, state = (await case.row()).usage, await case.state()
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (7, 12_304)
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (12_304, 557)
    fresh, written, read, output = PRICES[kind]
    assert state.cost * 1_000_000 == 7 * fresh + 12_304 * written + 12_304 * read + 557 * output


async def test_the_last_turn_has_its_notice_and_may_call_nothing() -> None:
    async with Wire(Says([Call("note", '{"id": 1}')]), Says([Text("As far as I got.")])) as wire:
        case = Asking("anthropic", wire, max_turns=2)
        assert (await case.end()).stop_reason == "final_turn"
        body = wire.served[1].body
    assert body["tool_choice"] == {"type": "none"} and body["tools"]
    assert "last of 2 turns" in body["messages"][-1]["content"][-1]["text"]


async def test_a_missing_key_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Wire() as wire:
        monkeypatch.delenv("ANTHROPIC_API_KEY")
        end = await Asking("anthropic", wire).end()
    assert end.code == "bad_key" and "\n" not in end.message
    assert "Set the `ANTHROPIC_API_KEY` environment variable; check the key" in end.message


async def test_models_of_one_provider_share_its_pace_and_no_run_fails_for_its_limits() -> None:
    limited = {"type": "rate_limit", "message": "Rate limit reached: 30 requests per second"}
    busy = Fault(429, {"error": limited}, {"retry-after-ms": "40"})
    plays = [busy if number % 3 == 0 else Says([Text("Done.")]) for number in range(45)]
    async with Wire(*plays) as wire:
        models = [providers.provided(f"openai-chat:{name}", {}, wire.openai) for name in ("gpt-4o", "gpt-4.1")]
        replies = await asyncio.gather(*(models[number % 2](request(), Stream()) for number in range(30)))
        shared = {id(each.pace) for each in providers._open[asyncio.get_running_loop()].values()}
    assert [reply.text for reply in replies] == ["Done."] * 30
    assert len(wire.asked) == 45 and len(shared) == 1
