"""An agent that looks a customer up, sends a message, and notes that it did: one tool of each effect class.

    perdure run examples/customer_message.py:agent "Tell customer 17 that the lamp has shipped"
    perdure run examples/customer_message.py:agent "Tell customer 17 that the lamp has shipped" --metadata careful=yes
    perdure drill examples/customer_message.py:agent "Tell customer 17 that the lamp has shipped" --yes

The messages go to an outbox, one line each. It stands for a message service that sends whatever it is handed, twice if
it is told twice, but can be asked for a message by its id; that id is the call's idempotency key. In a careful run a
person has to approve each message. The model is a script, so no network is needed.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from perdure import Agent, ApprovalAsk, Settled, ToolContext, tool

CUSTOMERS = {"17": "ada@example.com", "18": "bob@example.com"}


def world(ctx: ToolContext) -> Path:
    """The folder that the run's effects go to; the run's metadata may name it."""
    folder = Path(str(ctx.metadata.get("world") or Path(tempfile.gettempdir()) / "customer-message"))
    (folder / "notes").mkdir(parents=True, exist_ok=True)
    return folder


def outbox(ctx: ToolContext) -> Path:
    """What was sent, a line each."""
    return world(ctx) / "outbox.jsonl"


def who_may_send(ask: ApprovalAsk) -> str:
    """The policy: in a careful run a person is asked."""
    return "ask" if ask.metadata.get("careful") else "allow"


@tool(effect="read_only")
def find_customer(customer_id: str) -> dict[str, str]:
    """Look a customer up."""
    return {"customer_id": customer_id, "address": CUSTOMERS[customer_id]}


@tool(effect="non_idempotent", approval=who_may_send, settles_after_s=0)  # a local file: nothing is under way any more
def send_message(ctx: ToolContext, address: str, text: str) -> str:
    """Send a message to a customer."""
    message = {"id": ctx.idempotency_key, "to": address, "text": text}
    file = os.open(outbox(ctx), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(message).encode() + b"\n")
    finally:
        os.close(file)
    return "sent"


@send_message.reconcile
def was_sent(ctx: ToolContext, address: str, text: str) -> Settled:
    """Ask for an interrupted message by its id."""
    lines = outbox(ctx).read_text().splitlines() if outbox(ctx).exists() else []
    if any(json.loads(line)["id"] == ctx.idempotency_key for line in lines):
        return Settled.happened("sent")
    return Settled.did_not_happen()


@tool(effect="idempotent_write")
def add_note(ctx: ToolContext, customer_id: str, text: str) -> str:
    """Write a note into the customer's file. The same key writes the same note, so that it may be repeated."""
    (world(ctx) / "notes" / f"{customer_id}-{ctx.idempotency_key}").write_text(text)
    return "noted"


agent = Agent(
    name="customer message", model="script:customer_message.jsonl", tools=(find_customer, send_message, add_note)
)
