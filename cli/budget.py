"""`budget`: what runs that share a budget have spent of it, and changing its caps."""

from __future__ import annotations

from typing import Any, Final

import click

from ..actors.prices import in_dollars
from ..client.budgets import cap_budget, caps_of, find_budget
from ..store.budgets import Amount, Budget
from ..store.sql import open_log
from .options import asynchronous, bound, db_option, json_option
from .read import open_reader
from .terminal import Terminal
from .text import json_line, line, table

HEAD: Final = "BUDGET", "CAP", "SPENT", "ESTIMATED", "HELD"


@click.command("budget")
@click.argument("name", required=False)
@click.option("--cost", callback=bound, metavar="USD|none", help="Set the cap in US dollars, or lift it.")
@click.option("--tokens", callback=bound, metavar="N|none", help="Set the cap in tokens, or lift it.")
@json_option
@db_option
@asynchronous
async def show_budget(db: str, name: str | None, as_json: bool, **caps: Any) -> None:
    """Show what is spent of shared budgets, or of the budget NAME; set its caps.

    SPENT is what model calls did cost. ESTIMATED is the part of it for calls whose answer was lost, which are charged
    with what was reserved for them. HELD is reserved for calls under way. Runs that have failed for want of budget go
    on with `perdure resume RUN`, or `perdure batch ... --retry-failed`, once the cap is raised.
    """
    changes = caps_of({kind: given[0] for kind, given in caps.items() if given is not None})
    if changes and name is None:
        raise click.UsageError("caps are set of one budget: give NAME")
    if changes and name is not None:
        event_log = await open_log(db, create=False)
        try:
            found = [await cap_budget(event_log, (await find_budget(event_log, name)).name, changes)]
        finally:
            await event_log.close()
    else:
        async with open_reader(db) as reader:
            found = await reader.budgets() if name is None else [await find_budget(reader, name)]
    terminal = Terminal()
    if as_json:
        for budget in found:
            terminal.put(json_line(budget_json(budget)))
    elif not found:
        terminal.say("no budgets here: `perdure batch ... --budget-cost USD` makes one")
    else:
        for text in table(HEAD, [_cells(budget) for budget in found]):
            terminal.put(text)


def budget_json(budget: Budget) -> dict[str, Any]:
    """A budget for a program; dollars are text, which is exact."""
    parts = {"spent": budget.spent, "held": budget.held, "estimated": budget.estimated}
    amounts = {name: {"tokens": part.tokens, "cost": f"{part.cost:f}"} for name, part in parts.items()}
    cost = None if budget.cap.cost is None else f"{budget.cap.cost:f}"
    return {"budget": budget.name, "cap": {"tokens": budget.cap.tokens, "cost": cost}, **amounts}


def budget_line(budget: Budget) -> str:
    """A budget in a sentence."""
    _, cap, spent, estimated, held = _cells(budget)
    parts = [f"budget {line(budget.name)!r}: {spent} spent of {cap}"]
    parts += [f"{estimated} of it estimated"] if budget.estimated.tokens else []
    parts += [f"{held} held for calls under way"] if budget.held.tokens else []
    return ", ".join(parts)


def _cells(budget: Budget) -> tuple[str, ...]:
    cap = [in_dollars(budget.cap.cost)] if budget.cap.cost is not None else []
    cap += [f"{budget.cap.tokens} tokens"] if budget.cap.tokens is not None else []
    amounts = (_amount(part) for part in (budget.spent, budget.estimated, budget.held))
    return line(budget.name, 40), " and ".join(cap) or "any", *amounts


def _amount(amount: Amount) -> str:
    return f"{in_dollars(amount.cost)}, {amount.tokens} tokens" if amount.cost else f"{amount.tokens} tokens"
