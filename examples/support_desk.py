"""A support desk: an agent that looks orders up, notes what it found, and pays damaged orders back.

    perdure run examples/support_desk.py:desk "Refund order 17"

Its world is a folder outside of perdure: one file a note, and a ledger of payments that keeps the idempotency key
of each, as a payment provider does. The model is a plain function of its request, so no network is needed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from perdure import Agent, ModelReply, ModelRequest, Settled, ToolContext, ToolUse, tool

ITEMS = ("teapot", "lamp", "chair", "clock", "mirror")
THINKS_MS = 150
HANG_S = 40


def shop_order(order_id: str) -> dict[str, Any]:
    """What the shop knows of an order: two of three arrive damaged."""
    number = int(order_id)
    price = f"{number * 7 % 90 + 10}.50"
    return {"order_id": order_id, "item": ITEMS[number % 5], "amount": price, "damaged": number % 3 != 0}


def world(ctx: ToolContext) -> Path:
    """The folder that the run's effects go to."""
    folder = Path(str(ctx.metadata.get("world") or Path(tempfile.gettempdir()) / "support-desk"))
    (folder / "notes").mkdir(parents=True, exist_ok=True)
    return folder


def payments(folder: Path) -> Iterator[dict[str, Any]]:
    """The ledger, line by line."""
    ledger = folder / "ledger.jsonl"
    return (json.loads(line) for line in (ledger.read_text().splitlines() if ledger.exists() else ()))


@tool(effect="read_only")
def find_order(order_id: str) -> dict[str, Any]:
    """Look an order up."""
    return shop_order(order_id)


@tool(effect="idempotent_write")
def add_note(ctx: ToolContext, text: str) -> str:
    """Write a note for the customer's file. The same key writes the same note, so that it may be repeated."""
    (world(ctx) / "notes" / ctx.idempotency_key).write_text(text)
    return "noted"


@tool(effect="non_idempotent", timeout_s=60, settles_after_s=0)  # a local file: nothing is on its way any more
def refund(ctx: ToolContext, order_id: str, amount: Decimal) -> str:
    """Pay an order back. This ledger, like many services, would pay a second time if it was asked again."""
    hang(ctx, order_id, "before")
    entry = {"key": ctx.idempotency_key, "run": ctx.run_id, "order": order_id, "amount": str(amount)}
    ledger = os.open(world(ctx) / "ledger.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(ledger, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(ledger)
    hang(ctx, order_id, "after")
    return f"paid {amount}"


@refund.reconcile
def was_paid(ctx: ToolContext, order_id: str, amount: Decimal) -> Settled:
    """Ask the ledger whether an interrupted refund was paid."""
    if any(entry["key"] == ctx.idempotency_key for entry in payments(world(ctx))):
        return Settled.happened(f"paid {amount}")
    return Settled.did_not_happen()


def hang(ctx: ToolContext, order_id: str, moment: str) -> None:
    """For the demonstration: a payment that hangs on its first attempt, so that there is time to kill somebody."""
    if ctx.attempt == 1 and ctx.metadata.get("hangs") == f"{moment} paying {order_id}":
        time.sleep(HANG_S)


def answer(request: ModelRequest) -> ModelReply:
    """The model: look everything up, note the result, refund what is damaged, say so."""
    found = [json.loads(result["content"]) for result in results(request, "find_order")]
    damaged = [order for order in found if order["damaged"]]
    if not found:
        orders = re.findall(r"\d+", str(request.input))
        calls = [ToolUse(name="find_order", arguments={"order_id": order}) for order in orders]
    elif not list(results(request, "add_note")):
        calls = [ToolUse(name="add_note", arguments={"text": f"{len(damaged)} of {len(found)} orders damaged"})]
    elif not list(results(request, "refund")):
        calls = [ToolUse(name="refund", arguments={k: order[k] for k in ("order_id", "amount")}) for order in damaged]
    else:
        calls = []
    if calls:
        return ModelReply(tool_calls=tuple(calls), delay_ms=THINKS_MS)
    refunded = ", ".join(f"{order['order_id']} ({order['item']})" for order in damaged)
    return ModelReply(text=f"Refunded: {refunded or 'nothing, no order is damaged'}.")


def results(request: ModelRequest, name: str) -> Iterator[dict[str, Any]]:
    """The results of one tool so far."""
    for message in request.messages:
        yield from (result for result in message.get("results", ()) if result["name"] == name)


desk = Agent(name="support desk", model=answer, tools=(find_order, add_note, refund))
