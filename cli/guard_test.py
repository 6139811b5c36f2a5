"""`guard-test`: what proposed limits would have made of the runs of a batch. It reads the store and starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from ..actors.guards import Limits, changed
from ..actors.prices import in_dollars
from ..actors.replay import Replayed, replay
from ..store.budgets import Amount
from ..store.errors import NotFound, UsageError
from ..store.rows import RunRow
from ..store.states import Status
from .options import asynchronous, db_option, json_option
from .read import open_reader
from .run import read_object
from .terminal import Terminal
from .text import json_line, line, table

HEAD: Final = "RUN", "SAMPLE", "STATUS", "TURNS", "STOPPED AFTER", "SAVED TOKENS", "SAVED COST", "WHY"
NOTE: Final = "models are taken to have gone on as they did: what follows a refusal is an estimate"


@click.command("guard-test")
@click.argument("limits")
@click.option("--batch", required=True, metavar="NAME", help="Whose runs are gone through.")
@json_option
@db_option
@asynchronous
async def guard_test(db: str, limits: str, batch: str, as_json: bool) -> None:
    """Replay LIMITS over the stored runs of a batch: which would have been stopped, where, why, and what it would have
    saved.

    LIMITS is a JSON object, such as '{"max_turns": 8, "max_cost": "0.50"}', or @FILE. They take the place of each
    run's own; limits that are not named stay. Nothing is asked and nothing is changed.
    """
    changes = read_object(limits, "LIMITS")
    if not changes:
        raise UsageError("LIMITS names no limit")
    changed(Limits(), changes)
    terminal, found = Terminal(), list[Finding]()
    async with open_reader(db) as event_log:
        rows = await event_log.runs(batch=batch, oldest_first=True)
        if not rows:
            raise NotFound(f"no runs in batch {batch!r}")
        for row in rows:
            found.append(Finding(row, replay(await event_log.read(row.run_id), changes)))
    if as_json:
        for told in [*(finding_json(one) for one in found if one.touched), summary_json(found)]:
            terminal.put(json_line(told))
        return
    cut = [finding_cells(one) for one in found if one.replayed.cut]
    for text in table(HEAD, cut) if cut else []:
        terminal.put(text)
    for text in summary_lines(found, dollars="max_cost" in changes):
        terminal.put(text)
    if any(one.replayed.refused for one in found):
        terminal.say(f"({NOTE})")


@dataclass(frozen=True)
class Finding:
    """A run, and what the limits would have made of it."""

    row: RunRow
    replayed: Replayed

    @property
    def touched(self) -> bool:
        return self.replayed.cut is not None or bool(self.replayed.refused)


def finding_cells(finding: Finding) -> tuple[str, ...]:
    """A run that would have been stopped, in a table under `HEAD`."""
    row, cut = finding.row, finding.replayed.cut
    assert cut is not None
    return (
        line(row.run_id),
        line(row.sample or "", 40),
        row.status,
        str(row.turns),
        str(cut.turns),
        str(cut.saved.tokens),
        in_dollars(cut.saved.cost) if finding.replayed.priced else "?",
        f"{cut.code}: {line(cut.why, 100)}",
    )


def finding_json(finding: Finding) -> dict[str, Any]:
    """A run that the limits would have touched, for a program."""
    row, replayed = finding.row, finding.replayed
    cut = replayed.cut
    return {
        "type": "run",
        "run_id": row.run_id,
        "sample": row.sample,
        "status": row.status,
        "turns": replayed.turns,
        "refused_calls": dict(replayed.refused),
        "first_refused_turn": replayed.first_refused,
        "stopped": cut
        and {
            "after_turns": cut.turns,
            "code": cut.code,
            "why": cut.why,
            "saved": _saved(cut.turns_saved, cut.saved, replayed.priced),
        },
    }


def summary_json(found: Sequence[Finding]) -> dict[str, Any]:
    """All runs together, for a program."""
    stopped = [one for one in found if one.replayed.cut]
    turns, saved = _sum(stopped)
    return {
        "type": "summary",
        "runs": len(found),
        "stopped": len(stopped),
        "completed_cut": [one.row.run_id for one in stopped if one.row.status is Status.COMPLETED],
        "only_refused": sum(one.touched for one in found) - len(stopped),
        "not_priced": sum(not one.replayed.priced for one in found),
        "saved": _saved(turns, saved, any(one.replayed.priced for one in stopped)),
    }


def summary_lines(found: Sequence[Finding], dollars: bool) -> list[str]:
    """All runs together, for people."""
    facts = summary_json(found)
    cost = f" and ${facts['saved']['cost']}" if facts["saved"]["cost"] else ""
    texts = [
        f"{facts['stopped']} of {facts['runs']} runs would have been stopped, which would have saved "
        f"{facts['saved']['turns']} turns, {facts['saved']['tokens']} tokens{cost}"
    ]
    if cut := facts["completed_cut"]:
        texts.append(f"{len(cut)} of them completed and would have been cut: {', '.join(map(line, cut))}")
    if facts["only_refused"]:
        texts.append(f"{facts['only_refused']} more would have gone on with some of their calls refused")
    if dollars and facts["not_priced"]:
        texts.append(f"{facts['not_priced']} have no known prices: max_cost was not tested on them")
    return texts


def _sum(stopped: Sequence[Finding]) -> tuple[int, Amount]:
    turns, saved = 0, Amount()
    for one in stopped:
        if one.replayed.cut:
            turns, saved = turns + one.replayed.cut.turns_saved, saved + one.replayed.cut.saved
    return turns, saved


def _saved(turns: int, amount: Amount, priced: bool) -> dict[str, Any]:
    cost = in_dollars(amount.cost).removeprefix("$") if priced else None
    return {"turns": turns, "tokens": amount.tokens, "cost": cost}
