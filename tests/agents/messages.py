"""The agent of examples/customer_message.py, for tests: lookups are counted, and a message that was sent is reported
only once the file `go` is in the world. `agent` sends without asking, `gated` asks a person about each message."""

from __future__ import annotations

import functools
import time
from typing import Any

from perdure import Agent, Tool, ToolContext
from perdure.actors.tools import Approval
from perdure.examples.customer_message import add_note, find_customer, send_message, was_sent, world


@functools.wraps(send_message.handler)
def send_and_linger(ctx: ToolContext, **arguments: str) -> Any:
    sent = send_message(ctx, **arguments)
    while not (world(ctx) / "go").exists():
        time.sleep(0.01)
    return sent


def find_and_count(ctx: ToolContext, customer_id: str) -> Any:
    with (world(ctx) / "lookups").open("a") as file:
        file.write(f"{ctx.run_id}\n")
    return find_customer(customer_id)


def customer_agent(approval: Approval) -> Agent:
    sending = Tool(send_and_linger, send_message.options, "send_message", approval)
    sending.reconcile(was_sent)
    counted = Tool(find_and_count, find_customer.options, "find_customer")
    return Agent(name="customer message", model="script:messages.jsonl", tools=(counted, sending, add_note))


agent = customer_agent(Approval("never"))
gated = customer_agent(Approval("always"))
