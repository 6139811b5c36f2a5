"""MCP servers that behave in every way, each called in an attempt: what is recorded, and that nothing is left."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure import Agent, MCPServer, ToolContext, UsageError, actors
from perdure.actors import mcp_client
from perdure.actors.attempt import Outcome, Work, perform
from perdure.actors.children import MARK, adopt_orphans
from perdure.actors.model import ToolUse
from perdure.actors.servers import mapped, with_servers
from perdure.actors.turn import checked_arguments, unfit
from perdure.store.events import AgentRef, Effect, ToolCallStarted

from .agents import fake_mcp, mcp_agent
from .fakes import STORE

REF = AgentRef(ref=f"{mcp_agent.__file__}:odd", digest="d")


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(MARK, "")
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    adopt_orphans()
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def call(
    server: str,
    tool: str = "look",
    effect: Effect = "read_only",
    agent: AgentRef = REF,
    written: str | None = None,
    **arguments: Any,
) -> Outcome:
    (found,) = [each for each in mcp_agent.servers if each.name == server]
    work = Work(
        run_id="r" * 20,
        turn_index=0,
        tool_call_id="t0c0",
        attempt=1,
        name=mapped(server, tool),
        arguments=written or json.dumps(arguments or {"do": "it"}),
        effect=effect,
        idempotency_key="the key",
        agent=agent,
        metadata={},
        timeout_s=found.options.timeout_s,
        store=STORE,
        remote=(server, tool),
    )
    return perform(work, begin, "node")


def begin(mark: ToolCallStarted | None) -> str | None:
    return None


def value(outcome: Outcome) -> Any:
    assert (outcome.kind, outcome.is_error, outcome.left) == ("result", False, False), outcome
    return json.loads(outcome.content)


def failure(outcome: Outcome) -> dict[str, Any]:
    assert outcome.is_error, outcome
    error: dict[str, Any] = json.loads(outcome.content)
    return error


def test_a_call_gets_its_value_and_the_server_the_key_but_not_our_environment() -> None:
    assert value(call("plain")) == "look it"
    assert value(call("plain", do="key")) == "the key"
    names = value(call("plain", do="env")).split()
    assert "PATH" in names and MARK in names and "SECRET_OF_OURS" not in names


PRICE = "0.12345678901234567890"


def test_decimals_reach_a_server_digit_for_digit() -> None:
    assert value(call("plain", written=f'{{"do":"price","price":{PRICE}}}')) == PRICE


def test_arguments_that_are_nested_too_deep_are_not_sent() -> None:
    def nested(levels: int) -> Outcome:
        return call("plain", "act", "non_idempotent", written='{"do":"it","x":' + "[" * levels + "]" * levels + "}")

    assert value(nested(150)) == "act it"
    assert "nested too deeply" in failure(nested(300))["message"]


def test_the_time_of_a_call_does_not_begin_before_the_sdk_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, mcp_client.__name__)
    monkeypatch.delattr(actors, "mcp_client")
    shown = agent_of(MCPServer("plain", command=["x"])).listed({"plain": [LISTING]})
    shown.offered[0].bind(print, ToolContext("r", 0, "t0c0", 1, "k", 0.0), "{}")
    assert mcp_client.__name__ in sys.modules


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("image", [{"type": "image", "data": fake_mcp.PIXEL, "media_type": "image/png"}]),
        ("structured", {"id": 9007199254740993}),
        ("nothing", ""),
        ("half", "half \\ud83d an emoji"),
    ],
)
def test_content_of_every_kind_is_passed_on(do: str, expected: Any) -> None:
    assert value(call("plain", do=do)) == expected


def test_a_resource_is_passed_on_beside_the_text() -> None:
    said, resource = value(call("plain", do="resource"))
    assert (said, resource["resource"]["text"]) == ("see", "the file")


def test_an_answer_that_says_error_or_is_none_is_an_error_result() -> None:
    assert "there is no order 17" in failure(call("plain", "act", "non_idempotent", do="fail"))["message"]
    refused = call("plain", "act", "non_idempotent", do="refuse")
    assert refused.kind == "result" and "no such thing (code -32000)" in failure(refused)["message"]
    junk = call("plain", "act", "non_idempotent", do="junk")
    assert junk.kind == "result" and "no result of a tool" in failure(junk)["message"]


def test_lines_that_are_no_message_are_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert value(call("banner")) == "look it"
    assert [record.getMessage()[:43] for record in caplog.records] == ["MCP server banner prints what is no message"]


@pytest.mark.parametrize(
    ("server", "text"),
    [
        ("mute", "is not ready within 0.7 s"),
        ("crash", "it ended with code 1; it said: no such database"),
        ("absent", "/nowhere/at/all cannot be started"),
        ("remote", "is not ready: "),
    ],
)
def test_a_server_that_is_not_ready_is_an_error_of_which_nothing_has_happened(server: str, text: str) -> None:
    began = time.monotonic()
    outcome = call(server, "act", "non_idempotent")
    assert outcome.kind == "result" and time.monotonic() - began < 4
    error = failure(outcome)
    assert error["error"] == "NotReady" and text in error["message"] and "nothing was asked" in error["message"]


def test_a_server_that_dies_in_a_call_leaves_its_effect_unknown(tmp_path: Path) -> None:
    outcome = call("plain", "act", "non_idempotent", do="die", dir=str(tmp_path))
    assert outcome.kind == "exited"
    assert "ended with code 7; it said: the disk is full" in failure(outcome)["message"]


def test_one_that_hangs_in_a_call_times_out_and_is_ended_with_its_tree(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = call("brief", do="hang", dir=str(tmp_path))
    assert outcome.kind == "timeout" and not outcome.left and (tmp_path / "hangs").exists()
    assert time.monotonic() - began < 5


def test_a_server_that_heeds_nothing_is_killed_and_the_next_one_gets_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value(call("deaf")) == "look it"
    assert value(call("deaf")) == "look it"


@pytest.fixture(params=["plain", "json"])
def over_http(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentRef]:
    """A server that runs by itself, and the agent that knows its address."""
    program = str(Path(__file__).parent / "agents" / "http_mcp.py")
    server = subprocess.Popen([sys.executable, program, request.param], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    monkeypatch.setenv("FAKE_MCP_URL", f"http://127.0.0.1:{int(server.stdout.readline())}/mcp")
    yield REF.model_copy(update={"digest": request.param})
    server.kill()
    server.wait()
    server.stdout.close()


def test_a_server_over_http_answers_hangs_and_dies(over_http: AgentRef, tmp_path: Path) -> None:
    raw = value(call("remote", "act", agent=over_http, written=f'{{"do":"raw","price":{PRICE}}}'))
    assert f'"price":{PRICE}' in raw
    assert "there is no order 17" in failure(call("remote", "act", agent=over_http, do="fail"))["message"]
    began = time.monotonic()
    hung = call("remote", "act", "non_idempotent", agent=over_http, do="hang", dir=str(tmp_path))
    assert hung.kind == "timeout" and (tmp_path / "hangs").exists() and time.monotonic() - began < 8
    dead = call("remote", "act", "non_idempotent", agent=over_http, do="die", dir=str(tmp_path))
    assert dead.kind == "exited" and "lost before it answered" in failure(dead)["message"]
    gone = call("remote", "act", "non_idempotent", agent=over_http)
    assert gone.kind == "result" and "nothing was asked" in failure(gone)["message"]


# -- what a server has --------------------------------------------------------------------------------------


def agent_of(*servers: Any) -> Agent:
    return Agent(name="a", model="script:x", tools=servers)


def test_the_tools_of_a_server_are_kept_with_the_run_and_offered_without_it() -> None:
    agent = agent_of(mcp_agent.fake("plain", "plain", start_timeout_s=1.9))
    config = json.loads(json.dumps(agent.snapshot()))
    offered = with_servers(agent, config).offered
    assert with_servers(agent, config) is with_servers(agent, config)
    assert {tool.name for tool in offered} == set(config["tools"])
    looks, _, acts = offered[:3]
    assert (looks.name, looks.description, looks.schema) == ("plain__look", "Look.", fake_mcp.DO)
    assert [tool.options.effect for tool in offered[:4]] == [
        "read_only",
        "idempotent_write",
        "non_idempotent",
        "non_idempotent",
    ]
    assert acts.options.remote == ("plain", "act") and acts.options.timeout_s == 2.0


def test_effects_and_the_choice_of_tools_are_the_users() -> None:
    options: Any = {"effects": {"act": "read_only"}, "only": ["act", "put"], "approval": "always"}
    agent = agent_of(mcp_agent.fake("plain", "plain", start_timeout_s=1.9, **options))
    put, act = with_servers(agent, agent.snapshot()).offered
    assert (put.options.effect, act.options.effect) == ("idempotent_write", "read_only")
    assert put.approval.rule == "always"


def test_names_are_mapped_one_to_one_into_what_providers_take() -> None:
    names = ["look", "odd/name.v2", "odd.name/v2", "", "x" * 90 + "1", "x" * 90 + "2", "ä", "\ud800", "_look"]
    ours = [mapped(server, name) for server in ("a", "b", "a-b") for name in names]
    assert len(set(ours)) == len(ours)
    assert all(len(name) <= 64 and name.replace("_", "").replace("-", "").isalnum() and name.isascii() for name in ours)
    assert mapped("a", "odd/name.v2") == "a__odd_name_v2_78faeb6e"  # stable over versions too


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"only": ["look", "lok"]}, "MCP server 'plain' has no tool 'lok'; it has act, look"),
        ({"effects": {"lok": "read_only"}}, "MCP server 'plain' has no tool 'lok'"),
    ],
)
def test_a_tool_that_the_server_does_not_have_is_told_at_launch(options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        agent_of(mcp_agent.fake("plain", "plain", start_timeout_s=1.9, **options)).snapshot()


@pytest.mark.parametrize(("server", "text"), [("mute", "not ready within 0.7 s"), ("crash", "no such database")])
def test_a_server_that_does_not_tell_its_tools_stops_the_launch(server: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"MCP server '{server}' does not tell its tools: .*{text}"):
        agent_of(mcp_agent.fake(server, server)).snapshot()


async def test_tools_are_asked_for_in_an_event_loop_too() -> None:
    agent = agent_of(mcp_agent.fake("loop", "plain", start_timeout_s=1.9))
    assert len(agent.snapshot()["tools"]) == len(fake_mcp.TOOLS)  # type: ignore[arg-type]


LISTING = {"name": "pay", "description": "", "schema": {"type": "object"}, "hints": {}}


@pytest.mark.parametrize(
    ("listing", "text"),
    [
        ([LISTING, LISTING], "its tools 'pay' and 'pay' have one name"),
        ([LISTING | {"schema": {"type": "object", "properties": 3}}], "the schema of its tool 'pay' is broken"),
        ([LISTING | {"schema": {"type": "string"}}], "the schema of its tool 'pay' is broken: it is of no object"),
    ],
)
def test_tools_that_no_provider_could_be_told_of_are_refused(
    listing: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "list_tools", lambda server: listing)
    with pytest.raises(UsageError, match=text):
        MCPServer(f"shop-{len(text)}", command=["x"]).listed()


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"},
        {"name": "a__b"},
        {"name": "a_"},
        {"name": "a", "command": "npx server"},
        {"name": "a", "command": [], "url": ""},
        {"name": "a", "url": "http://x"},
        {"name": "a", "timeout_s": 1},
        {"name": "a", "effects": {"x": "harmless"}},
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="MCP server"):
        MCPServer(**({"command": ["x"]} | wrong))


def test_two_servers_of_one_name_are_refused_and_a_tool_like_one_of_theirs() -> None:
    with pytest.raises(ValueError, match="two MCP servers are named plain"):
        agent_of(mcp_agent.servers[0], mcp_agent.servers[0])
    from perdure import tool

    clash = tool("read_only", name="plain__pay")(lambda: "x")
    agent = agent_of(MCPServer("plain", command=["x"]), clash)
    with pytest.raises(UsageError, match="two tools are named plain__pay"):
        agent.listed({"plain": [LISTING]})


def test_arguments_are_held_to_the_servers_schema_before_anything_is_recorded_as_released() -> None:
    agent = agent_of(MCPServer("plain", command=["x"]))
    shown = agent.listed({"plain": [LISTING | {"schema": fake_mcp.DO}]})
    (pay,) = shown.offered
    assert unfit(pay, '{"do":"it"}') == "" and "'do' is a required property" in unfit(pay, "{}")
    assert unfit(pay, "[]") == "the arguments are no object"
    assert "do: 3 is not of type 'string'" in unfit(pay, '{"do":3}')
    _, fit = checked_arguments(ToolUse(name="plain__pay", arguments={"do": 3}), shown)
    assert isinstance(fit, str) and "InvalidArguments" in fit
    far = LISTING | {"schema": {"type": "object", "properties": {"do": {"$ref": "https://example.org/x"}}}}
    assert "cannot be applied" in unfit(agent.listed({"plain": [far]}).offered[0], '{"do":3}')


def test_the_sdk_is_imported_only_where_a_server_is_spoken_to() -> None:
    server = "perdure.MCPServer('b', command=['c'])"
    agent = f"perdure.Agent(name='a', model='script:x', tools=({server},))"
    code = f"import perdure, sys; {agent}; print('mcp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "False\n"
