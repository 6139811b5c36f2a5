"""Secrets: which they are, and that none reaches the log, the terminal or a blob."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from perdure.actors.agent import Agent
from perdure.actors.model import ModelReply, ToolUse
from perdure.actors.reception import Reception
from perdure.actors.results import error_text, recorded
from perdure.actors.tools import tool
from perdure.actors.turn import checked_arguments, turn_events
from perdure.cli.exits import say_error
from perdure.cli.options import at_store
from perdure.cli.terminal import Terminal
from perdure.store import secrets
from perdure.store.errors import UsageError
from perdure.store.events import (
    AssistantDelta,
    AssistantMessage,
    Event,
    RunCreated,
    RunFailed,
    ToolCallSettled,
    ToolResult,
)
from perdure.store.log import Append, Cancel, Create, EventLog, Settle
from perdure.store.secrets import masked, masked_command, masked_event, masked_value, secret_values, settled, starred

from .store_kit import RUN, accept, cancel, created, started

KEY = "a provider's key of 32 letters"
QUOTED = 'pass"word\\of a database'


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SOME_API_KEY", KEY)
    monkeypatch.setenv("SHOP", "tiny")
    monkeypatch.setenv("LINE", QUOTED)
    monkeypatch.setenv("PERDURE_SECRETS", "SHOP, LINE,UNSET")
    secrets._own.cache_clear()
    yield
    secrets._own.cache_clear()


def test_secret_is_what_is_named_so_and_what_is_configured() -> None:
    names = ["A_API_KEY", "APIKEY", "X_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "client_secret", "NAMED"]
    others = ["TOKENS", "KEYBOARD", "TOKEN_FILE", "PATH", "SECRETARY"]
    found = secret_values(dict.fromkeys(names + others, "x" * 12) | {"PERDURE_SECRETS": "NAMED", "B_TOKEN": "short"})
    assert sorted(found) == sorted(names)
    assert secret_values({"NAMED": "abc", "PERDURE_SECRETS": "NAMED"}) == {}


SHAPES = [
    "sk-ant-api03-abcdefghijklmnopqrstuvwx-1",
    "sk-proj-abcdefghijklmnop1234567890",
    "sk_live_" + "a1" * 12,
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2_" * 6,
    "glpat-" + "x" * 20,
    "xoxb-123456789012-abcdef",
    "AIza" + "Sy1_-" * 7,
    "hf_" + "a" * 34,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc+/=\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nMIIEow that was cut",
]


@pytest.mark.parametrize("key", SHAPES)
def test_a_key_of_a_known_shape_is_masked_in_any_text(key: str) -> None:
    assert masked(f"the key is {key}") == "the key is [masked: a key]"
    text = json.dumps({"said": f'"{key}"', "more": [key, 1]})
    assert json.loads(masked(text, as_json=True))["more"] == ["[masked: a key]", 1]
    assert masked("Authorization: Bearer abcdefghijklmnopqrstuvwxyz") == "Authorization: Bearer [masked: a key]"


@pytest.mark.parametrize(
    "text",
    [
        "task-sk-folding-cube-animation-long-name",
        "sk-folding-cube-animation-long-name",
        "the AKIA of the ASIAN games and AIza",
        "a/AKIAIOSFODNN7EXAMPLE+b",
        "eyJ.eyJ and gh_ and Bearer of news",
        "through github_pat and hf_",
    ],
)
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert masked(text) is text


@pytest.mark.parametrize("begin", ["sk-", "sk-a", "eyJ-", "eyJabcdefghijk.", "-----BEGIN ", "Bearer ", "AKIA", "ghp_a"])
def test_no_text_takes_long_to_be_masked(begin: str) -> None:
    began = time.monotonic()
    text = begin * (300_000 // len(begin))
    assert masked(text) and starred(text)
    assert time.monotonic() - began < 5


def test_a_value_is_masked_as_text_and_as_json() -> None:
    assert masked(f"x{KEY}y{QUOTED}ztinyz") == "x[masked: SOME_API_KEY]y[masked: LINE]z[masked: SHOP]z"
    text = json.dumps({KEY: [QUOTED]})
    assert json.loads(masked(text, as_json=True)) == {"[masked: SOME_API_KEY]": ["[masked: LINE]"]}
    value: Any = {"a": [1, {"b": KEY}], KEY: None}
    assert masked_value(value) == {"a": [1, {"b": "[masked: SOME_API_KEY]"}], "[masked: SOME_API_KEY]": None}
    clean: Any = {"a": [1, {"b": "c"}]}
    assert masked_value(clean) is clean


OURS = """
    event_id v type turn_index tool_call_id attempt usage is_error source node pid agent batch priority epoch
    owner charged was digest tools raised effect stop_reason idempotency_key nonce boot_id pid_started lock hold_s
    arguments_schema timeout_s default question decision by outcome took_s code phase limits offset complete estimated
    budget cost prompt_tokens output_tokens ran_s answer fate gone machines asked
"""
"""Fields of events that hold nothing but words and numbers of our own."""


def test_of_each_field_of_each_event_it_is_known_whether_it_is_ours() -> None:
    kinds: list[type[BaseModel]] = list(get_args(Event))
    for kind in kinds:
        name = kind.model_fields["type"].default
        foreign = set(secrets._FOREIGN.get(name, ()))
        assert foreign <= set(kind.model_fields), name
        unknown = set(kind.model_fields) - foreign - set(OURS.split())
        if name in ("tool_call_requested", "approval_requested"):
            unknown -= {"name"}
        if name == "run_claimed":
            unknown -= {"reason"}
        assert not unknown, f"{name}: {unknown}"
    assert secrets._FOREIGN.keys() <= {kind.model_fields["type"].default for kind in kinds}


def created_with(value: Any) -> RunCreated:
    return created(metadata={"m": value}).model_copy(update={"input": {"q": value}})


def test_commands_are_masked_whatever_they_bring() -> None:
    told = masked_command(Create(RUN, created_with(KEY)))
    assert isinstance(told, Create) and told.event.input == {"q": "[masked: SOME_API_KEY]"}
    server: Any = {"servers": {"shop": [{"name": "look", "description": f"Give it {KEY}."}]}}
    assert KEY not in repr(masked_command(Create(RUN, created(config=server))))
    settled = ToolCallSettled(tool_call_id="t0c0", attempt=1, question="q", outcome="happened", by="me", reason=KEY)
    failed = RunFailed(code="model_error", message=f"401: wrong key {KEY}", phase="model")
    for command in (told, Settle(RUN, settled, json.dumps(KEY)), Append(RUN, 1, 1, (failed,))):
        assert KEY not in repr(masked_command(command))
    clean = Append(RUN, 1, 1, (started(),))
    assert masked_command(clean) is clean


def test_a_models_own_form_is_left_out_only_if_a_secret_is_in_it() -> None:
    native: Any = [{"thinking": "what a task", "signature": "c2ln/AKIAIOSFODNN7EXAMPLE+"}]
    said = AssistantMessage(turn_index=0, text="hello", stop_reason="end_turn", native=native)
    assert masked_event(said) is said
    told = masked_event(said.model_copy(update={"native": [{"thinking": KEY}]}))
    assert isinstance(told, AssistantMessage) and told.native is None and told.text == "hello"


def test_a_piece_of_an_answer_keeps_its_length() -> None:
    piece = AssistantDelta(turn_index=0, offset=3, text=f"the key {KEY} and sk-proj-abcdefghijklmnop1234567890")
    told = masked_event(piece)
    assert isinstance(told, AssistantDelta) and len(told.text) == len(piece.text)
    assert told.text == f"the key {'*' * len(KEY)} and {'*' * 34}" == starred(piece.text)


def test_a_text_that_goes_on_is_sure_up_to_where_a_secret_may_begin() -> None:
    assert [settled(text) for text in ("", "all of it. ", "the last wor", "use a provid", "a b ", f"{KEY} ")] == [
        0,
        11,
        9,
        4,
        4,
        len(KEY) + 1,
    ]
    assert settled("x" * 5_000) == 5_000, "no key is as long"
    assert starred(f"it is {KEY[:9]}", cut=True) == "it is *********" and starred("it is a ", cut=True) == "it is a "


async def test_an_answer_is_said_in_pieces_of_which_none_holds_a_part_of_a_secret() -> None:
    shape = "sk-proj-abcdefghijklmnop1234567890"
    whole = f"It is {KEY}, or Bearer abcdefghijklmnopqrstuvwxyz0, {QUOTED}, {shape} and that is all."
    for size in (1, 5, 17):
        reception = Reception(0, lambda: None)
        said = ""
        for at in range(0, len(whole), size):
            reception.stream.text(whole[at : at + size])
            piece = reception.piece()
            if piece:
                said += piece.text
                reception.keep(piece)
        reception.end()
        last = reception.piece()
        said += last.text if last else ""
        assert said == starred(whole) and len(said) == len(whole) and "*" * len(shape) in said


async def test_no_log_holds_a_secret_and_its_answer_neither(log: EventLog) -> None:
    accepted = await accept(log, Create(RUN, created_with(f"use {KEY}")))
    assert isinstance(accepted.events[0].event, RunCreated)
    assert accepted.events[0].event.input == {"q": "use [masked: SOME_API_KEY]"}
    assert [stored.event for stored in await log.read(RUN)] == [accepted.events[0].event]
    await accept(log, Cancel(RUN, cancel().model_copy(update={"reason": KEY})))
    assert KEY not in repr(await log.read(RUN))


def test_a_result_is_masked_before_it_is_cut() -> None:
    content, blobs = recorded("x" * 47_990 + KEY + "x" * 100_000)
    assert KEY[:10] not in content and KEY.encode() not in blobs[0].data
    assert json.loads(recorded({"env": [KEY, QUOTED]}).content) == {"env": ["[masked: SOME_API_KEY]", "[masked: LINE]"]}
    content, blobs = recorded(("x" * 47_990 + KEY + "x" * 100_000).encode())
    assert KEY[:10] not in content and KEY.encode() not in blobs[0].data
    assert KEY not in error_text(ValueError(KEY * 1000))


@tool("non_idempotent")
def send(key: str) -> None:
    """Never called here."""


async def test_a_call_whose_arguments_hold_a_secret_is_not_made() -> None:
    agent = Agent(name="a", model="script:x", tools=(send,))
    text, why = checked_arguments(ToolUse(name="send", arguments={"key": KEY}), agent)
    assert text == '{"key":"[masked: SOME_API_KEY]"}' and isinstance(why, str) and "SecretInArguments" in why
    reply = ModelReply(tool_calls=(ToolUse(name="send", arguments={"key": KEY}),))
    events = await turn_events("r", 0, reply, agent)
    assert KEY not in repr(events) and isinstance(events[-1], ToolResult) and events[-1].is_error


def test_a_command_that_is_suggested_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:hush@db.example.org:5432/runs"
    assert at_store(url) == "--db 'postgresql://me:***@db.example.org:5432/runs' "
    assert at_store("a:b@c.db") == "--db a:b@c.db "
    monkeypatch.setenv("PERDURE_DB", url)
    assert at_store(url) == ""


def test_what_is_printed_is_masked_and_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.put(f"out {KEY}\x1b]0;owned\x07\r")
    terminal.say(f"err {KEY}")
    say_error(UsageError(f"no {KEY}"))
    out, err = capsys.readouterr()
    assert out == "out [masked: SOME_API_KEY]\\x1b]0;owned\\x07\\r\n"
    assert err == "err [masked: SOME_API_KEY]\nperdure: no [masked: SOME_API_KEY]\n"
