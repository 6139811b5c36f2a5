"""The customer message, on real clusters: everything is killed between delivery and record, and nothing is doubled."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure import ApprovalAsk, Settled, ToolContext
from perdure.examples.customer_message import send_message, was_sent, who_may_send

from .cli_kit import Place, place, until

__all__ = ["place"]

HERE = Path(__file__).parent
AGENTS = HERE / "agents" / "messages.py"
SCRIPT = HERE.parent / "examples" / "customer_message.jsonl"


class Outside:
    """The world of the customer message, in the folder of a place."""

    def __init__(self, place: Place) -> None:
        self.place, self.folder = place, place.folder / "world"

    def launch(self, name: str) -> tuple[str, ...]:
        model, world = f"script:{SCRIPT}", f"world={self.folder}"
        return "run", f"{AGENTS}:{name}", "Tell customer 17", "--model", model, "--metadata", world

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def notes(self) -> list[str]:
        return [path.read_text() for path in (self.folder / "notes").iterdir()]

    def kill_when_delivered(self, *command: str) -> None:
        """Give a command, and kill -9 all of its processes once the message is out and before that is recorded."""
        process = self.place.start(*command)
        until(lambda: self.lines("outbox.jsonl"))
        os.kill(process.pid, signal.SIGKILL)
        for one in self.place.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate(timeout=60)
        until(lambda: not self.place.left())

    def receipts(self, run_id: str) -> dict[str, Any]:
        said = json.loads(self.place.run("show", run_id, "--calls", "--json")[1])
        return {receipt["name"]: receipt for receipt in said["calls"]}

    def check(self, run_id: str) -> None:
        """One message, which its probe found by its id; the lookup was made once, the note written once."""
        receipts = self.receipts(run_id)
        (message,) = map(json.loads, self.lines("outbox.jsonl"))
        sending = receipts["send_message"]
        assert message["id"] == sending["idempotency_key"]
        assert (sending["result"]["source"], sending["result"]["content"]) == ("probe", '"sent"')
        assert len(sending["attempts"]) == len(receipts["find_customer"]["attempts"]) == 1
        assert self.lines("lookups") == [run_id]
        assert self.notes() == ["told that the lamp has shipped"]


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_message_that_went_out_right_before_everything_died_is_found_by_its_id_and_not_sent_again(
    place: Place,
) -> None:
    outside = Outside(place)
    outside.kill_when_delivered(*outside.launch("agent"))
    (row,) = place.rows()
    before = outside.receipts(row["run_id"])
    assert before["send_message"]["result"] is None and before["send_message"]["attempts"][0]["started_at"]
    assert before["find_customer"]["result"] and "add_note" not in before

    code, out, err = place.run("resume", row["run_id"])
    assert (code, out) == (0, "Customer 17 knows that the lamp has shipped.\n"), err
    outside.check(row["run_id"])
    assert outside.receipts(row["run_id"])["find_customer"] == before["find_customer"]


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_an_approved_message_is_not_asked_about_and_not_sent_again_when_everything_died_after_it_went_out(
    place: Place,
) -> None:
    outside = Outside(place)
    code, out, err = place.run(*outside.launch("gated"))
    assert (code, out) == (3, ""), err
    (row,) = place.rows()
    run_id = row["run_id"]
    assert row["status"] == "awaiting_approval"
    assert not outside.lines("outbox.jsonl") and not place.left()

    code, out, err = place.run("approve", run_id, "--by", "ann")
    assert code == 0 and out.startswith(f"run {run_id}, call t1c0: approved by ann"), err
    outside.kill_when_delivered("resume", run_id)
    assert not place.run("questions", run_id)[1], "it was decided for good"

    code, out, err = place.run("resume", run_id)
    assert (code, out) == (0, "Customer 17 knows that the lamp has shipped.\n"), err
    outside.check(run_id)
    (asked,) = outside.receipts(run_id)["send_message"]["approvals"]
    assert (asked["decided"]["decision"], asked["decided"]["by"]) == ("approve", "ann")


@pytest.mark.parametrize(("metadata", "word"), [({}, "allow"), ({"careful": "yes"}, "ask")])
def test_the_examples_policy_has_a_person_asked_in_a_careful_run(metadata: dict[str, Any], word: str) -> None:
    ask = ApprovalAsk("run", "send_message", {}, "non_idempotent", 1, metadata)
    assert who_may_send(ask) == word
    assert send_message.approval.rule is who_may_send


def test_the_examples_probe_knows_the_messages_that_were_sent(tmp_path: Path) -> None:
    one, other = (ToolContext("r", 1, "t1c0", 1, key, 0.0, {"world": str(tmp_path)}) for key in ("k1", "k2"))
    assert was_sent(one, "a", "hello") == Settled.did_not_happen()
    send_message(one, "a", "hello")
    assert was_sent(one, "a", "hello") == Settled.happened("sent")
    assert was_sent(other, "a", "hello") == Settled.did_not_happen()
