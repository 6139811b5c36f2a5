"""Providers over the wire: what is asked and what comes back, through the official SDKs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic_ai.models.test import TestModel

from perdure.actors.model import Interrupted, ModelError, Stream
from perdure.actors.partial import Partial, interrupted
from perdure.actors.providers.pace import Pace
from perdure.actors.providers.provider import Provider
from perdure.store.events import Usage, canonical

from .fakes import until
from .provider_kit import HELLO, Clock, asked, keys, opened, request, said
from .wire import Call, Fault, Says, Text, Thinking, Wire, chunk, fragment, usage_chunk

BOTH = pytest.mark.parametrize("kind", ["anthropic", "openai"])
ALL = pytest.mark.parametrize("kind", ["anthropic", "openai", "responses"])
DEEP = "[" * 20_000 + "]" * 20_000
BAD = ["", "null", "{", "[1]", '"{}"', '"{\\"x\\": 1}"', '{"x": NaN}', DEEP, '{"x": "a', '{"x": 1e999}']


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys(monkeypatch)


@ALL
async def test_text_comes_in_pieces_and_every_token_is_counted_once(kind: str) -> None:
    async with Wire(Says([Text("All of it, in pieces.")], tokens=(3, 12_304, 0, 550))) as wire:
        stream = Stream()
        reply = await opened(kind, wire).answer(request(), {}, stream)
    assert reply.text == stream.received == "All of it, in pieces."
    assert reply.usage == Usage(input_tokens=3, cache_creation_input_tokens=12_304, output_tokens=550)
    assert stream.told == reply.usage and reply.stop_reason == "end_turn"


@ALL
@pytest.mark.parametrize("tokens", [(4, 0, 12_304, 1), (9_007_199_254_740_993, 1, 2, 3), (1, 0, 0, 0)])
async def test_what_was_read_from_a_cache_is_no_fresh_input(kind: str, tokens: tuple[int, int, int, int]) -> None:
    async with Wire(Says([Text("x")], tokens=tokens)) as wire:
        usage = (await asked(opened(kind, wire))).usage
    counted = usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens, usage.output_tokens
    assert counted == tokens


async def test_thoughts_and_their_signatures_go_back_as_they_came() -> None:
    first = Says([Thinking("Löök \u2028 twice.", "EqQ+/é=="), Text("Looking."), Call("look", '{"x": 1}', "toolu_1")])
    async with Wire(first, Says([Text("Done.")])) as wire:
        provider = opened("anthropic", wire)
        reply = await asked(provider)
        kept = json.loads(json.dumps(reply.native))
        again = reply.model_copy(update={"native": kept})
        await asked(provider, request([HELLO, *said(again, '"seen"')]))
        _, answered = wire.served
    blocks = answered.body["messages"][1]["content"]
    assert blocks[0] == {"type": "thinking", "thinking": "Löök \u2028 twice.", "signature": "EqQ+/é=="}
    assert blocks[2] == {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"x": 1}}
    assert answered.body["messages"][2]["content"][0]["content"] == [{"type": "text", "text": "seen"}]


@ALL
async def test_digits_of_arguments_come_as_they_were_written(kind: str) -> None:
    written = (
        '{"id": 9007199254740993, "text": "1234567890123456789", "price": 12.10, "all": [1e5, 0.5, {"p": -1.20E+2}]}'
    )
    async with Wire(Says([Call("look", written)]), Says([Text("Done.")])) as wire:
        provider = opened(kind, wire)
        reply = await asked(provider)
        await asked(provider, request([HELLO, *said(reply, '"ok"')]))
        again = json.loads(wire.served[1].raw)
    (use,) = reply.tool_calls
    assert use.raw == written and not use.cut
    if kind == "anthropic":
        assert written.replace(" ", "") in wire.served[1].raw.decode()
        assert again["messages"][1]["content"][0]["input"] == json.loads(written)
    else:
        assert json.dumps(written) in json.dumps(again), "the model sees its own digits"


@ALL
@pytest.mark.parametrize("arguments", BAD)
async def test_a_call_with_any_arguments_can_go_back(kind: str, arguments: str) -> None:
    async with Wire(Says([Text("Hm."), Call("look", arguments)]), Says([Text("Done.")])) as wire:
        provider = opened(kind, wire)
        reply = await asked(provider)
        assert reply.tool_calls[0].raw == arguments or (not arguments and reply.tool_calls[0].raw == "{}")
        messages = said(reply, '"no"')
        messages[0]["tool_calls"][0]["arguments"] = "{}"
        assert (await asked(provider, request([HELLO, *messages]))).text == "Done."


@ALL
@pytest.mark.parametrize("name", ["", "delete all!", "x" * 90, "münze", "a.b/c"])
async def test_a_made_up_name_reaches_the_run_and_can_go_back(kind: str, name: str) -> None:
    async with Wire(Says([Call("look", id="a"), Call(name, id="b")]), Says([Text("Done.")])) as wire:
        provider = opened(kind, wire)
        reply = await asked(provider)
        assert [use.name for use in reply.tool_calls] == ["look", name]
        assert (await asked(provider, request([HELLO, *said(reply, '"a"', '"b"')]))).text == "Done."


@ALL
async def test_repeated_ids_are_told_apart_within_a_turn_and_across_turns(kind: str) -> None:
    twice = Says([Call("look", '{"x": 1}', "call_0"), Call("look", '{"x": 2}', "call_0")])
    async with Wire(twice, twice, Says([Text("Done.")])) as wire:
        provider = opened(kind, wire)
        first = said(await asked(provider), '"1"', '"2"')
        second = said(await asked(provider, request([HELLO, *first])), '"3"', '"4"', turn=1)
        assert (await asked(provider, request([HELLO, *first, *second]))).text == "Done."
        sent = [asked.body.get("messages") or asked.body["input"] for asked in wire.served]
        head = len(sent[0])
    assert sent[2][:head] == sent[0] and sent[2][: len(sent[1])] == sent[1], "a later turn changed an earlier one"


async def test_fragments_in_any_order_of_their_indexes_make_the_calls_that_were_meant() -> None:
    frames = [
        chunk({"role": "assistant", "content": None}),
        chunk(fragment(3, "", "look", "b")),
        chunk(fragment(0, '{"x', "look", "a")),
        chunk(fragment(3, '{"x": 2')),
        chunk(fragment(0, '": 1}')),
        chunk(fragment(3, "}")),
        chunk({}, "tool_calls"),
        usage_chunk((1, 0, 0, 1)),
    ]
    async with Wire(Says(frames=frames)) as wire:
        uses = (await asked(opened("openai", wire))).tool_calls
    assert {use.id: use.raw for use in uses} == {"a": '{"x": 1}', "b": '{"x": 2}'}


@ALL
async def test_the_last_call_of_an_answer_that_was_cut_off_is_marked(kind: str) -> None:
    cut = [Call("look", '{"x": 1}', "a"), Call("look", '{"x": "unfin', "b")]
    whole = [Call("look", '{"x": 1}', "a")]
    async with Wire(
        Says(cut, "max_tokens"), Says(whole, tokens=(9, 0, 0, 64)), Says(whole, tokens=(9, 0, 0, 63))
    ) as wire:
        provider = opened(kind, wire)
        assert [use.cut for use in (await asked(provider)).tool_calls] == [False, True]
        assert [use.cut for use in (await asked(provider, max_tokens=64)).tool_calls] == [True]
        assert [use.cut for use in (await asked(provider, max_tokens=64)).tool_calls] == [False]


@BOTH
async def test_settings_and_what_the_budget_has_room_for_are_passed_on(kind: str) -> None:
    async with Wire(*[Says([Text("x")])] * 3) as wire:
        provider = opened(kind, wire)
        await asked(provider, request(max_output_tokens=100), stop_sequences=["END"])
        await asked(provider, request(max_output_tokens=100), max_tokens=50)
        await asked(provider, request(tools=(), withheld=request().tools), max_tokens=50)
        bodies = [each.body for each in wire.served]
    limits = [body.get("max_tokens") or body.get("max_completion_tokens") for body in bodies]
    assert limits == [100, 50, 50] and (bodies[0].get("stop_sequences") or bodies[0]["stop"]) == ["END"]
    assert bodies[0]["tools"] == bodies[2]["tools"]
    assert bodies[2]["tool_choice"] == ({"type": "none"} if kind == "anthropic" else "none")


@ALL
async def test_a_model_is_told_at_the_end_of_a_request_when_few_turns_remain(kind: str) -> None:
    async with Wire(*[Says([Text("x")])] * 3) as wire:
        provider = opened(kind, wire)
        for few, notice in ((False, None), (True, None), (True, "the last one")):
            await asked(provider, request(turns_left="3 turns remain", few_turns_left=few, notice=notice))
        first, second, third = (canonical(each.body) for each in wire.served)
    assert "3 turns remain" in second and "3 turns remain" not in first and first == third


@ALL
async def test_an_empty_result_is_no_empty_message(kind: str) -> None:
    async with Wire(Says([Text(""), Call("look")]), Says([Text("Done.")])) as wire:
        provider = opened(kind, wire)
        odd = request(instructions="Be \ud800 brief.")
        assert (await asked(provider, request([HELLO, *said(await asked(provider, odd), '""')]))).text == "Done."
        assert b"(empty)" in wire.served[1].raw


@ALL
@pytest.mark.parametrize("blank", [" \n", "\t"])
async def test_blanks_are_no_message_either(kind: str, blank: str) -> None:
    async with Wire(Says([Text(blank), Call("look")]), Says([Text(blank)]), Says([Text("Done.")])) as wire:
        provider = opened(kind, wire)
        user = {"role": "user", "content": blank}
        messages = [user, *said(await asked(provider, request([user])), canonical(blank))]
        messages += [*said(await asked(provider, request(messages))), {"role": "user", "content": [blank]}]
        assert (await asked(provider, request(messages, instructions=blank))).text == "Done."
        assert "system" not in wire.served[2].body
        assert json.dumps(canonical(blank))[1:-1] in wire.served[1].raw.decode(), "a result shows which blanks they are"


REFUSED = Says([Text("I would ")], "refusal")


@pytest.mark.parametrize(
    ("kind", "says", "text", "stop"),
    [
        ("anthropic", REFUSED, "I would ", "refusal"),
        ("anthropic", Says((), "refusal"), "", "refusal"),
        ("anthropic", Says([Call("look")], "refusal"), "", "refusal"),
        ("openai", Says(refusal="I cannot do that."), "I cannot do that.", "refusal"),
        ("openai", Says([Text("Half a ")], "content_filter"), "Half a ", "content_filter"),
    ],
)
async def test_a_refusal_is_no_answer_and_is_not_asked_again(kind: str, says: Says, text: str, stop: str) -> None:
    async with Wire(says) as wire:
        reply = await asked(opened(kind, wire))
    assert (reply.text, reply.stop_reason, reply.tool_calls) == (text, stop, ())
    assert reply.usage.output_tokens == 5


@ALL
@pytest.mark.parametrize("blocks", [[], [Text("")], [Thinking("Hm.", "sig")]])
async def test_an_answer_without_text_is_an_empty_one(kind: str, blocks: Any) -> None:
    async with Wire(Says(blocks)) as wire:
        reply = await asked(opened(kind, wire))
    assert (reply.text, reply.tool_calls, reply.usage.output_tokens) == ("", (), 5)


ANTHROPIC_ERROR = {"type": "error", "error": {"type": "invalid_request_error", "message": "bad"}}


def _error(kind: str, message: str, code: str | None = None) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "code": code, "message": message}}


@pytest.mark.parametrize(
    ("kind", "fault", "code"),
    [
        ("anthropic", Fault(400, _error("invalid_request_error", "Your credit balance is too low")), "no_credit"),
        ("anthropic", Fault(402, _error("billing_error", "pay")), "no_credit"),
        ("anthropic", Fault(400, _error("invalid_request_error", "prompt is too long: 3 > 2")), "context_too_long"),
        ("anthropic", Fault(413, _error("request_too_large", "too large")), "context_too_long"),
        ("anthropic", Fault(404, _error("not_found_error", "model: x")), "unknown_model"),
        ("anthropic", Fault(403, _error("permission_error", "no")), "bad_key"),
        ("anthropic", Fault(400, _error("invalid_request_error", "max_tokens: no")), "rejected"),
        ("openai", Fault(429, _error("insufficient_quota", "You exceeded", "insufficient_quota")), "no_credit"),
        ("openai", Fault(402, _error("billing", "pay")), "no_credit"),
        ("openai", Fault(400, _error("x", "long", "context_length_exceeded")), "context_too_long"),
        ("openai", Fault(400, _error("x", "maximum context length is 4096 tokens")), "context_too_long"),
        ("openai", Fault(404, _error("x", "no such model", "model_not_found")), "unknown_model"),
        ("openai", Fault(422, _error("x", "what?")), "rejected"),
    ],
)
async def test_what_cannot_pass_ends_the_call_at_once_under_its_own_name(kind: str, fault: Fault, code: str) -> None:
    async with Wire(fault) as wire:
        with pytest.raises(ModelError) as failed:
            await asked(opened(kind, wire))
        assert failed.value.code == code and len(wire.asked) == 1, failed.value.message
    assert "\n" not in failed.value.message and fault.body["error"]["message"][:8] in failed.value.message


@ALL
async def test_a_bad_key_is_an_end_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys(monkeypatch, "sk-another")
    async with Wire() as wire:
        with pytest.raises(ModelError) as failed:
            await asked(opened(kind, wire))
        assert failed.value.code == "bad_key" and len(wire.asked) == 1


DONE = Says([Text("Done.")])


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        ("anthropic", Fault(429, _error("rate_limit_error", "slow down"), {"retry-after": "2"})),
        ("anthropic", Fault(429, _error("rate_limit_error", "your quota for now"))),
        ("anthropic", Fault(529, _error("overloaded_error", "Overloaded"))),
        ("anthropic", Fault(500, "<html>Bad gateway</html>")),
        ("anthropic", Fault(200, _error("overloaded_error", "Overloaded"))),
        ("anthropic", Says([Text("Half an answer")], cut_after=4)),
        ("anthropic", Says([Text("Half an answer")], ends_after=4)),
        ("anthropic", Says(frames=[_error("overloaded_error", "Overloaded")])),
        ("anthropic", Says([Text("Half")], ends_after=4, error=_error("overloaded_error", "Overloaded"))),
        ("openai", Fault(429, _error("requests", "slow down"), {"retry-after": "2"})),
        ("openai", Fault(429, _error("requests", "You exceeded your current quota for requests per minute"))),
        ("openai", Fault(503, _error("server_error", "overloaded"))),
        ("openai", Fault(200, _error("server_error", "busy"))),
        ("openai", Says([Text("Half an answer")], cut_after=3)),
        ("openai", Says([Text("Half an answer")], ends_after=3)),
        ("openai", Says([Call("look", '{"x": 1}')], ends_after=3)),
        ("responses", Says([Text("Half an answer")], cut_after=4)),
        ("responses", Says([Text("Half an answer")], ends_after=4)),
        ("responses", Says([Call("look", '{"x": 1}')], ends_after=4)),
        ("openai", Says(frames=[_error("server_error", "The server is overloaded")])),
        ("openai", Says([Text("Half")], ends_after=2, error=_error("server_error", "The server is overloaded"))),
    ],
)
async def test_what_passes_is_waited_out_and_asked_again(kind: str, trouble: Any) -> None:
    clock = Clock()
    async with Wire(trouble, trouble, DONE) as wire:
        reply = await asked(opened(kind, wire, clock))
        assert reply.text == "Done." and reply.usage.output_tokens == 5
        assert len(wire.asked) == 3 and len({each.raw for each in wire.asked}) == 1, "asked again in other words"
    waits = getattr(trouble, "headers", {}).get("retry-after")
    assert clock.now >= (4 if waits else 0.5), "the provider named the time to wait"


class Plain(TestModel):
    """A model of a provider without streams, and without words for why an answer ends."""

    def request_stream(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


async def test_a_provider_without_streams_is_asked_all_the_same() -> None:
    for model in (Plain(call_tools=["look"]), TestModel(call_tools=["look"])):
        reply = await asked(Provider("other:x", model))
        assert [use.name for use in reply.tool_calls] == ["look"] and reply.usage.input_tokens
        results = said(reply, '"seen"')
        assert "seen" in (await asked(Provider("other:x", model), request([HELLO, *results]))).text


class MistralModel(TestModel):
    """A model whose provider says why an answer ends, but not now."""


async def test_an_answer_that_does_not_say_why_it_ends_is_none_where_they_do() -> None:
    provider = Provider("mistral:x", MistralModel())
    provider.pace = Pace(clock := Clock(), clock.sleep)
    with pytest.raises(Interrupted, match="the stream ended before the answer did"):
        await provider.answer(request(), {}, Stream())


@BOTH
async def test_a_server_that_falls_silent_is_asked_again_once_the_timeout_is_over(kind: str) -> None:
    async with Wire(Says([Text("x")], wait_after=0), DONE) as wire:
        assert (await asked(opened(kind, wire), timeout=0.05)).text == "Done."
        assert len(wire.asked) == 2


@BOTH
async def test_what_was_thought_until_a_call_is_given_up_is_in_its_estimate(kind: str) -> None:
    blocks = (Thinking("Hm. " * 400, "sig"), Call("look", '{"x": 1}'), Text("So."))
    async with Wire(Says(blocks, tokens=(70, 0, 0, 9), wait_after=55)) as wire:
        stream = Stream()
        asking = asyncio.create_task(opened(kind, wire).answer(request(), {}, stream))
        await wire.reached.wait()
        async with asyncio.timeout(20):
            while not (stream.told and stream.told.output_tokens >= 400):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        asking.cancel()
    lost = interrupted(Partial("", stream.told, complete=False), 0, 4_000)
    assert lost.estimated and 400 <= lost.usage.output_tokens < 420
    assert lost.usage.input_tokens == (70 if kind == "anthropic" else 1_000)


async def test_a_call_that_is_given_up_closes_its_connection() -> None:
    async with Wire(Says([Text("A long answer, in many pieces")], wait_after=5)) as wire:
        stream = Stream()
        asking = asyncio.create_task(opened("anthropic", wire).answer(request(), {}, stream))
        await wire.reached.wait()
        await until(lambda: bool(stream.received))
        asking.cancel()
        async with asyncio.timeout(1):
            await wire.asked[0].gone.wait()
    assert "A long answer".startswith(stream.received) and stream.told and stream.told.input_tokens == 10
