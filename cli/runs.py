"""What `list` and `show` say of a run, folded from its rows and its log."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

from ..actors.guards import Limits, limits_of
from ..actors.partial import unfinished
from ..actors.prices import PriceList, cost, in_dollars, total
from ..client.cancel import certified
from ..client.questions import questions_in
from ..store.budgets import tokens
from ..store.events import (
    AssistantInterrupted,
    AssistantMessage,
    Event,
    RunCancelled,
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunRequeued,
    RunTimedOut,
    Stored,
)
from ..store.rows import CallRow, RunRow
from ..store.states import Status
from .asked import question_json, question_lines, waits_for
from .certified import certificate_json, certificate_lines
from .receipts import standing
from .text import clock, duration, line, safe

HEAD: Final = "RUN", "STATUS", "TURNS", "TOKENS", "CREATED", "AGENT", "BATCH", "SAMPLE", "WHY"
"""The last column is the error of a failed run, the reason of one that ended early, what a waiting one waits for."""


def row_json(row: RunRow, calls: Sequence[CallRow] = ()) -> dict[str, Any]:
    """The projection of a run for a program, and what it waits for."""
    held = None if row.held is None else {"tokens": row.held.tokens, "cost": f"{row.held.cost:f}"}
    return row._asdict() | {"held": held} | {"usage": row.usage.model_dump(), "waits_for": waits_for(calls) or None}


def row_cells(row: RunRow, calls: Sequence[CallRow] = ()) -> tuple[str, ...]:
    """A run in a table, under `HEAD`."""
    return (
        line(row.run_id),
        row.status,
        str(row.turns),
        str(sum(row.usage.model_dump().values())),
        clock(row.created_at),
        line(row.agent.rpartition("/")[2], 40),
        line(row.batch or "", 40),
        line(row.sample or "", 40),
        line(waits_for(calls) or row.error or "", 60),
    )


def run_json(row: RunRow, stored: Sequence[Stored], calls: Sequence[CallRow]) -> dict[str, Any]:
    """A run for a program."""
    created, end = stored[0].event, _end(row, stored)
    partial = unfinished(one.event for one in stored)
    first = created if isinstance(created, RunCreated) else None
    return row_json(row, calls) | {
        "input": first.input if first else None,
        "config": first.config if first else {},
        "limits": _limits(stored).model_dump(mode="json"),
        "cost": None if (spent := _cost(stored)) is None else in_dollars(spent).removeprefix("$"),
        "metadata": first.metadata if first else {},
        "correlation_id": first.correlation_id if first else None,
        "output": end.event.output if end and isinstance(end.event, RunCompleted) else None,
        "message": _message(end.event) if end else None,
        "partial": partial.text if partial else None,
        "estimated_tokens": _estimated(stored),
        "ended_at": end.at if end else None,
        "respawns": _respawns(stored),
        "resumes": sum(isinstance(one.event, RunRequeued) for one in stored),
        "certificate": certificate_json(certified(stored)) if row.status is Status.CANCELLED else None,
        "open_calls": [call.tool_call_id for call in calls if call.result_seq is None],
        "questions": [question_json(question) for question in questions_in(row, calls, stored)],
    }


def run_lines(row: RunRow, stored: Sequence[Stored], calls: Sequence[CallRow], db: str) -> list[str]:
    """A run for people."""
    facts = run_json(row, stored, calls)
    usage = ", ".join(f"{name.removesuffix('_tokens')} {count}" for name, count in facts["usage"].items() if count)
    ended, spent, estimated = facts["ended_at"], _cost(stored), facts["estimated_tokens"]
    bounds = ", ".join(f"{name} {value}" for name, value in facts["limits"].items() if value is not None)
    lasted = f" ({duration(ended - row.created_at)} after its creation)" if ended else ""
    cancelling = ", a cancel is requested" if row.cancel and not row.status.is_terminal else ""
    texts = [
        ("run", line(row.run_id, None)),
        ("status", f"{row.status}{cancelling}"),
        ("agent", line(row.agent, None)),
        ("model", line(facts["config"].get("model") or "the agent's own")),
        ("batch", f"{line(row.batch)}, sample {line(row.sample or '')}" if row.batch is not None else ""),
        ("budget", line(row.budget, None) if row.budget is not None else ""),
        ("correlation", line(facts["correlation_id"] or "")),
        ("metadata", line(facts["metadata"]) if facts["metadata"] else ""),
        ("created", clock(row.created_at)),
        ("ended", f"{clock(ended)}{lasted}" if ended else ""),
        ("turns", str(row.turns)),
        ("tokens", (usage or "0") + (f" ({estimated} of them estimated)" if estimated else "")),
        (
            "cost",
            "" if spent is None else f"{in_dollars(spent)}, at the prices of {facts['config']['prices']['model']}",
        ),
        ("limits", bounds),
        ("respawns", f"{facts['respawns']}" + (f", resumed {facts['resumes']} times" if facts["resumes"] else "")),
        ("events", f"{row.seq} (epoch {row.epoch})"),
        ("input", _block(facts["input"])),
    ]
    if row.status is Status.COMPLETED:
        texts.append(("output", _block(facts["output"])))
    if row.error:
        texts.append(("error", line(f"{row.error}: {facts['message']}" if facts["message"] else row.error, None)))
    if facts["partial"]:
        texts.append(("partial", "an answer that is not complete:\n" + " " * 12 + _block(facts["partial"])))
    texts += [("open call", f"{line(call.tool_call_id)} {line(call.name)} {standing(call)}") for call in _open(calls)]
    told = [f"{name:<12}{text}" for name, text in texts if text]
    if row.status is Status.CANCELLED and row.turns:
        told += ["", *certificate_lines(certified(stored))]
    for question in questions_in(row, calls, stored):
        told += ["", *question_lines(question, db)]
    return told


def _limits(stored: Sequence[Stored]) -> Limits:
    """The limits that a run has now."""
    first = stored[0].event
    resumes = [one.event.limits for one in stored if isinstance(one.event, RunRequeued) and one.event.limits]
    return limits_of(first.config.get("limits") if isinstance(first, RunCreated) else None, resumes)


def _cost(stored: Sequence[Stored]) -> Decimal | None:
    """What a run has spent, in US dollars; None where the prices of its model are not known."""
    first = stored[0].event
    known = first.config.get("prices") if isinstance(first, RunCreated) else None
    if known is None:
        return None
    prices = PriceList.model_validate(known)
    calls = AssistantMessage | AssistantInterrupted
    return total(cost(prices, one.event.usage) for one in stored if isinstance(one.event, calls))


def _estimated(stored: Sequence[Stored]) -> int:
    """Tokens of model calls whose usage is an estimate."""
    cut = [one.event for one in stored if isinstance(one.event, AssistantInterrupted) and one.event.estimated]
    return sum(tokens(event.usage) for event in cut)


def _block(value: Any) -> str:
    """A text over as many lines as it has, indented; other values on one line."""
    if isinstance(value, str):
        return safe(value).replace("\n", "\n" + " " * 12)
    return line(value, None)


def _open(calls: Sequence[CallRow]) -> list[CallRow]:
    return [call for call in calls if call.result_seq is None]


def _message(end: Event) -> str | None:
    match end:
        case RunFailed(message=message) | RunCancelled(reason=message) | RunTimedOut(reason=message):
            return message
    return None


def _end(row: RunRow, stored: Sequence[Stored]) -> Stored | None:
    if row.end_seq is None or not row.status.is_terminal or row.end_seq > len(stored):
        return None
    return stored[row.end_seq - 1]


def _respawns(stored: Sequence[Stored]) -> int:
    return sum(isinstance(one.event, RunClaimed) and one.event.reason not in ("start", "decision") for one in stored)
