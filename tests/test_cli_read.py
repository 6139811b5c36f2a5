"""Commands on a store without a cluster: they read and decide, start nothing, and tell mistakes on one line."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from perdure import UsageError
from perdure.batch.plan import run_id
from perdure.cli.app import COMMANDS
from perdure.client.cluster import check_reachable
from perdure.client.launching import Request, check_agent
from perdure.client.launching import create as create_run
from perdure.store.events import TurnStarted
from perdure.store.log import Append, Claim, Mark
from perdure.store.log import Result as ToolDone
from perdure.store.sql import SqlLog, open_log

from .batch_kit import LEASE, write_agent
from .command_kit import create, fill, no_cluster, perdure, refusal, within
from .store_kit import message, request, result, started

__all__ = ["no_cluster"]

ESCAPES = "\x1b]0;owned\x07\x9b31m\r\u202ered"


pytestmark = pytest.mark.usefixtures("no_cluster")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return fill(
        tmp_path / "runs.db",
        [create("aaaa1111", batch="b", sample="1"), create("aaaa2222", input=ESCAPES)],
        create("bbbb1111", metadata={"who": ESCAPES}, correlation_id="c-1"),
    )


# -- reading ------------------------------------------------------------------------------------------------


def test_list_shows_the_newest_first_and_filters(store: Path) -> None:
    lines = perdure("list", "--db", store).stdout.splitlines()
    assert lines[0].split() == ["RUN", "STATUS", "TURNS", "TOKENS", "CREATED", "AGENT", "BATCH", "SAMPLE", "WHY"]
    assert lines[1].startswith("bbbb1111  queued")
    assert {line.split()[0] for line in lines[2:]} == {"aaaa1111", "aaaa2222"}
    found = perdure("list", "--db", store, "--json", "--batch", "b", "--status", "completed").stdout.splitlines()
    assert [json.loads(line)["run_id"] for line in found] == ["aaaa1111"]
    assert json.loads(found[0])["usage"]["input_tokens"] == 10


def test_the_store_is_named_before_or_after_the_command_or_in_the_environment(store: Path, tmp_path: Path) -> None:
    after = perdure("list", "--json", "--db", store).stdout
    assert perdure("--db", store, "list", "--json").stdout == after
    assert perdure("list", "--json", env={"PERDURE_DB": str(store)}).stdout == after
    assert perdure("--db", tmp_path / "none.db", "list", "--json", "--db", store).stdout == after


def test_show_tells_a_run_and_its_json_has_it_all(store: Path) -> None:
    text = perdure("show", "aaaa1111", "--db", store).stdout
    for told in ("status      completed", "input       refund?", "output      done with refund?", "respawns    0"):
        assert told in text
    facts = json.loads(perdure("show", "bbbb", "--db", store, "--json").stdout)
    assert (facts["status"], facts["correlation_id"], facts["metadata"]) == ("queued", "c-1", {"who": ESCAPES})


def test_show_calls_gives_a_receipt_of_every_call(tmp_path: Path) -> None:
    turn = (TurnStarted(turn_index=0), message(), request("c1"), request("c2", "read_only"))
    path = fill(
        tmp_path / "runs.db",
        [],
        create("cccc1111"),
        Claim("cccc1111", "claim", LEASE.nonce, 0),
        Append("cccc1111", 1, 2, turn),
        Mark("cccc1111", started("c1")),
        ToolDone("cccc1111", result("c1")),
    )
    first, second = json.loads(perdure("show", "cccc1111", "--calls", "--json", "--db", path).stdout)["calls"]
    assert [(attempt["pid"], attempt["node"], attempt["epoch"]) for attempt in first["attempts"]] == [(7, "node-a", 1)]
    assert (first["result"]["source"], first["result"]["content"]) == ("tool", '"done"')
    assert first["attempts"][0]["ended_at"] == first["result"]["at"]
    assert (len(second["attempts"]), second["attempts"][0]["started_at"], second["result"]) == (1, None, None)
    text = perdure("show", "cccc1111", "--calls", "--db", path).stdout
    assert "attempt 1, epoch 1, process 7 on node node-a" in text
    assert "open call   c2" in text


def test_events_are_lines_or_json_and_begin_where_they_are_asked_to(store: Path) -> None:
    lines = perdure("events", "aaaa1111", "--db", store).stdout.splitlines()
    assert [line.split()[2] for line in lines] == [
        "run_created",
        "run_claimed",
        "turn_started",
        "assistant_message",
        "run_completed",
    ]
    found = perdure("events", "aaaa1111", "--db", store, "--json", "--after", "4").stdout.splitlines()
    assert [(event["seq"], event["type"]) for event in map(json.loads, found)] == [(5, "run_completed")]
    assert len(perdure("events", "aaaa1111", "--db", store, "--follow").stdout.splitlines()) == 5


@pytest.mark.parametrize(
    "command", [["show"], ["events"], ["show", "--json"], ["events", "--json"], ["show", "--calls"]], ids=" ".join
)
@pytest.mark.parametrize("run", ["aaaa2222", "bbbb1111"])
def test_escape_codes_of_models_and_tools_never_reach_a_terminal(store: Path, command: list[str], run: str) -> None:
    text = perdure(*command, run, "--db", store).stdout
    assert not set(text) & set("\x1b\x07\x9b\r\u202e"), ascii(text)


def test_reading_imports_little_and_no_ray_and_leaves_the_store_alone(store: Path) -> None:
    code = (
        "import sys\nfrom perdure.cli.app import root\n"
        "for words in (['list'], ['show', 'aaaa1111', '--calls'], ['events', 'aaaa1111']):\n"
        "    root([*words, '--db', sys.argv[1]], standalone_mode=False)\n"
        "assert not {'perdure.actors.agent', 'psutil', 'sqlalchemy.orm', 'sqlalchemy.ext.asyncio'} & set(sys.modules)\n"
        "root(['status', '--db', sys.argv[1]], standalone_mode=False)\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'ray']\n"
    )
    before = sorted(path.name for path in store.parent.iterdir())
    done = subprocess.run([sys.executable, "-c", code, store], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in store.parent.iterdir() if "-" not in path.name) == [
        name for name in before if "-" not in name
    ]


def test_reading_ten_thousand_runs_takes_well_below_a_second(tmp_path: Path) -> None:
    path = fill(tmp_path / "runs.db", [create(f"{number:08x}", batch="b") for number in range(10_000)])
    for command in (["list"], ["show", "00000f0f"], ["events", "00000f0f"], ["status"], ["list", "--batch", "b"]):
        began = time.process_time()
        assert perdure(*command, "--db", path).exit_code == 0
        assert time.process_time() - began < 0.5, command


# -- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "events", "cancel", "resume"])
def test_a_run_is_found_by_an_unambiguous_prefix_only(store: Path, command: str) -> None:
    assert "no run 'zzzz'" in refusal(command, "zzzz", "--db", store)
    assert "at least the first 4" in refusal(command, "bbb", "--db", store)
    assert "is ambiguous: aaaa" in refusal(command, "aaaa", "--db", store)
    assert "no run" in refusal(command, "a\x1b\0%", "--db", store)


@pytest.mark.parametrize("command", [["list"], ["show", "aaaa"], ["events", "aaaa"], ["cancel", "aaaa"], ["resume"]])
def test_a_store_that_is_not_there_is_not_made(tmp_path: Path, command: list[str]) -> None:
    assert "no runs here yet" in refusal(*command, "--db", tmp_path / "none.db")
    assert not list(tmp_path.iterdir())


def test_a_database_of_a_newer_build_is_refused_untouched(store: Path) -> None:
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE meta SET value = '99'")
    connection.close()
    for command in (["list"], ["cancel", "bbbb1111"], ["resume"]):
        assert "has schema version 99" in refusal(*command, "--db", store)


def test_what_is_no_database_is_told_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database at all, but long enough to look at" * 20)
    assert "notes.txt" in refusal("list", "--db", path)
    assert "is a folder" in refusal("list", "--db", tmp_path)
    assert "cannot keep runs in" in refusal("list", "--db", "mysql://host/x")


AGENTS = {
    "none.py:agent": (None, "there is no file"),
    "raises.py:agent": ("raise ValueError('bro\\nken')", "importing it raised ValueError"),
    "quits.py:agent": ("import sys; sys.exit(3)", "importing it raised SystemExit"),
    "syntax.py:agent": ("def (", "importing it raised SyntaxError"),
    "missing.py:agent": ("import no_such_module_here", "no module named 'no_such_module_here'"),
    "other.py:agent": ("bot = 1", "has no Agent named 'agent'"),
    "plain": (None, "write it as module:name"),
}


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("command", ["run", "batch"])
def test_a_wrong_agent_is_told_before_anything_is_made(tmp_path: Path, agent: str, command: str) -> None:
    code, told = AGENTS[agent]
    place = tmp_path / agent.partition(":")[0]
    if code:
        place.write_text(code)
    data = tmp_path / "data.jsonl"
    data.write_text('"x"\n')
    name = f"{tmp_path / agent}" if ":" in agent else agent
    assert told in refusal(command, name, data, "--db", tmp_path / "runs.db")
    assert not (tmp_path / "runs.db").exists()


@pytest.fixture
def agent(tmp_path: Path) -> str:
    return write_agent(tmp_path / "code")


def test_a_wrong_model_or_script_line_is_told_before_anything_is_made(tmp_path: Path, agent: str) -> None:
    (tmp_path / "code" / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": "typo"}\n')
    assert "unknown model" in refusal("run", agent, "x", "--model", "gpt", "--db", tmp_path / "runs.db")
    told = refusal("run", agent, "x", "--model", "script:bad.jsonl", "--db", tmp_path / "runs.db")
    assert "bad.jsonl, line 2: txt" in told
    assert not (tmp_path / "runs.db").exists()


@pytest.mark.parametrize("command", ["run", "batch"])
def test_a_missing_key_is_told_before_anything_is_launched(
    tmp_path: Path, agent: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    data = tmp_path / "data.jsonl"
    data.write_text('"x"\n')
    told = refusal(command, agent, data, "--model", "openai:gpt-5-mini", "--db", tmp_path / "runs.db")
    assert "cannot be asked: Set the `OPENAI_API_KEY` environment variable" in told
    assert perdure("list", "--json", "--db", tmp_path / "runs.db").stdout == ""


def test_bad_input_and_bad_data_sets_are_told_before_anything_starts(tmp_path: Path, agent: str) -> None:
    db = tmp_path / "runs.db"
    assert "the input is not JSON" in refusal("run", agent, "{", "--input-json", "--db", db)
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": 1, "input": "x"}\n{"id": "1", "input": "y"}\n')
    assert "line 2: id '1' is that of line 1 too" in refusal("batch", agent, data, "--db", db)
    assert "cannot be read" in refusal("batch", agent, tmp_path / "none.jsonl", "--db", db)
    assert json.loads(perdure("status", "--json", "--db", db).stdout)["runs"] == {}


def test_a_second_supervisor_is_refused_before_a_cluster_starts(tmp_path: Path, agent: str) -> None:
    db = fill(tmp_path / "runs.db", [])
    done = threading.Event()

    async def renew() -> None:
        event_log = await open_log(db)
        lease = LEASE
        while not done.is_set():
            lease = replace(lease, boot_id="elsewhere", expires_at=time.time() + 10)
            await event_log.take_lease(lease, LEASE.nonce)
            await asyncio.sleep(0.1)
        await event_log.close()

    holder = threading.Thread(target=lambda: asyncio.run(renew()))
    holder.start()
    try:
        for command in (["run", agent, "x"], ["up"]):
            assert "another supervisor (process 100" in refusal(*command, "--db", db)
    finally:
        done.set()
        holder.join()
    assert json.loads(perdure("status", "--json", "--db", db).stdout)["runs"] == {}


@pytest.mark.parametrize("address", ["auto", "somewhere", "host:port", "127.0.0.1:99999", "127.0.0.1:1"])
def test_an_address_where_no_cluster_is_is_told_at_once(address: str) -> None:
    with pytest.raises(UsageError, match=re.escape(address)):
        check_reachable(address)


# -- decisions ----------------------------------------------------------------------------------------------


def test_resuming_what_is_done_starts_nothing(store: Path, tmp_path: Path) -> None:
    assert "aaaa1111 is completed" in refusal("resume", "aaaa1111", "--db", store)
    done = perdure("resume", "--db", fill(tmp_path / "done.db", [create("eeee1111")]))
    assert (done.exit_code, done.stderr) == (0, "nothing to resume\n")


def test_a_batch_that_is_done_reports_without_a_cluster(tmp_path: Path, agent: str) -> None:
    loaded = check_agent(agent)
    requests = [Request(f"q{n}", run_id("data-echo", str(n)), "data-echo", str(n)) for n in range(3)]
    db = fill(tmp_path / "runs.db", [create_run(loaded, request) for request in requests], failing=True)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"id": {n}, "input": "q{n}"}}\n' for n in range(3)))
    done = perdure("batch", agent, data, "--db", db, "--output", tmp_path / "out.jsonl", "--json")
    assert done.exit_code == 1
    assert [json.loads(line)["error"] for line in done.stdout.splitlines()] == ["model_error", "refusal", "model_error"]
    assert done.stdout == (tmp_path / "out.jsonl").read_text()
    assert "failed  0: model_error: the model said \\x1b[31mno" in done.stderr
    assert "3 failed (failed: 2 model_error, 1 refusal)" in done.stderr.splitlines()[-1]


def test_status_and_down_work_where_nothing_runs(store: Path, tmp_path: Path) -> None:
    assert perdure("status", "--db", store).stdout.splitlines()[0] == "supervisor  none"
    assert perdure("down", "--db", store).stdout == "nothing was up\n"
    assert "no runs here yet" in perdure("status", "--db", tmp_path / "none.db").stdout


def test_every_command_has_a_help_text() -> None:
    text = perdure("--help").stdout
    assert len(COMMANDS) > 10
    for name in COMMANDS:
        assert f"  {name} " in text
        assert "--db" in perdure(name, "--help").stdout


# -- blobs --------------------------------------------------------------------------------------------------


def test_a_blob_is_written_as_it_is_and_what_is_none_is_told(store: Path, tmp_path: Path) -> None:
    data = [b"\x1b[31m\xff" * 200_000, b"\n\0"]
    digest = hashlib.sha256(b"".join(data)).hexdigest()

    async def keep(event_log: SqlLog) -> None:
        for number, part in enumerate(data):
            await event_log.keep(digest, number, part)
        await event_log.keep("0" * 64, 0, b"another")

    within(store, keep)
    assert perdure("blob", digest, "--db", str(store)).stdout_bytes == b"".join(data)
    assert perdure("blob", digest, "--out", str(tmp_path / "out"), "--db", str(store)).exit_code == 0
    assert (tmp_path / "out").read_bytes() == b"".join(data)
    assert "names no blob" in refusal("blob", digest[:10], "--db", str(store))
    assert f"no blob {'1' * 64} in this store" in refusal("blob", "1" * 64, "--db", str(store))
    damaged = perdure("blob", "0" * 64, "--db", str(store))
    assert damaged.exit_code and "is damaged" in damaged.stderr
    assert "cannot be written" in refusal("blob", digest, "--out", "/nowhere/at/all", "--db", str(store))
