"""What `show` says of a run, and the receipts of its tool calls, folded from the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..store.events import (
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunRequeued,
    Stored,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallStarted,
    ToolEvidence,
    ToolResult,
)
from ..store.log import CallRow, RunRow
from ..store.states import Status
from .text import clock, duration, line, safe


def row_json(row: RunRow) -> dict[str, Any]:
    """The projection of a run for a program."""
    return asdict(row) | {"usage": row.usage.model_dump()}


def run_json(row: RunRow, stored: Sequence[Stored], calls: Sequence[CallRow]) -> dict[str, Any]:
    """A run for a program."""
    created, end = stored[0].event, _end(row, stored)
    first = created if isinstance(created, RunCreated) else None
    return row_json(row) | {
        "input": first.input if first else None,
        "config": first.config if first else {},
        "metadata": first.metadata if first else {},
        "correlation_id": first.correlation_id if first else None,
        "output": end.event.output if end and isinstance(end.event, RunCompleted) else None,
        "message": end.event.message if end and isinstance(end.event, RunFailed) else None,
        "ended_at": end.at if end else None,
        "respawns": _respawns(stored),
        "resumes": sum(isinstance(one.event, RunRequeued) for one in stored),
        "open_calls": [call.tool_call_id for call in calls if call.result_seq is None],
    }


def run_lines(row: RunRow, stored: Sequence[Stored], calls: Sequence[CallRow]) -> list[str]:
    """A run for people."""
    facts = run_json(row, stored, calls)
    usage = ", ".join(f"{name.removesuffix('_tokens')} {count}" for name, count in facts["usage"].items() if count)
    ended = facts["ended_at"]
    lasted = f" ({duration(ended - row.created_at)} after its creation)" if ended else ""
    cancelling = ", a cancel is requested" if row.cancel and not row.status.is_terminal else ""
    texts = [
        ("run", line(row.run_id, None)),
        ("status", f"{row.status}{cancelling}"),
        ("agent", line(row.agent, None)),
        ("model", line(facts["config"].get("model") or "the agent's own")),
        ("batch", f"{line(row.batch)}, sample {line(row.sample or '')}" if row.batch is not None else ""),
        ("correlation", line(facts["correlation_id"] or "")),
        ("metadata", line(facts["metadata"]) if facts["metadata"] else ""),
        ("created", clock(row.created_at)),
        ("ended", f"{clock(ended)}{lasted}" if ended else ""),
        ("turns", str(row.turns)),
        ("tokens", usage or "0"),
        ("respawns", f"{facts['respawns']}" + (f", resumed {facts['resumes']} times" if facts["resumes"] else "")),
        ("events", f"{row.seq} (epoch {row.epoch})"),
        ("input", _block(facts["input"])),
    ]
    if row.status is Status.COMPLETED:
        texts.append(("output", _block(facts["output"])))
    if row.error:
        texts.append(("error", line(f"{row.error}: {facts['message']}" if facts["message"] else row.error, None)))
    texts += [("open call", f"{line(call.tool_call_id)} {line(call.name)} {_standing(call)}") for call in _open(calls)]
    return [f"{name:<12}{text}" for name, text in texts if text]


def _block(value: Any) -> str:
    """A text over as many lines as it has, indented; other values on one line."""
    if isinstance(value, str):
        return safe(value).replace("\n", "\n" + " " * 12)
    return line(value, None)


def _open(calls: Sequence[CallRow]) -> list[CallRow]:
    return [call for call in calls if call.result_seq is None]


def _standing(call: CallRow) -> str:
    if call.unsettled:
        return f"attempt {call.attempt}: it is unknown whether it took effect"
    if call.started:
        return f"attempt {call.attempt}, started {clock(call.started_at)} by process {call.pid}"
    return f"attempt {call.attempt}, no start mark"


def _end(row: RunRow, stored: Sequence[Stored]) -> Stored | None:
    if row.end_seq is None or not row.status.is_terminal or row.end_seq > len(stored):
        return None
    return stored[row.end_seq - 1]


def _respawns(stored: Sequence[Stored]) -> int:
    return sum(isinstance(one.event, RunClaimed) and one.event.reason != "start" for one in stored)


# -- receipts -----------------------------------------------------------------------------------------------


def calls_json(stored: Sequence[Stored], calls: Sequence[CallRow]) -> list[dict[str, Any]]:
    """The receipt of every call, in order of request."""
    receipts: dict[str, dict[str, Any]] = {
        call.tool_call_id: {
            "tool_call_id": call.tool_call_id,
            "turn_index": call.turn_index,
            "name": call.name,
            "effect": call.effect,
            "arguments": None,
            "attempts": call.attempt,
            "marks": [],
            "retries": [],
            "evidence": [],
            "result": None,
        }
        for call in calls
    }
    for one in stored:
        event = one.event
        if receipt := receipts.get(getattr(event, "tool_call_id", None) or ""):
            _note(receipt, one)
    return list(receipts.values())


def _note(receipt: dict[str, Any], stored: Stored) -> None:
    match event := stored.event:
        case ToolCallRequested():
            receipt["arguments"] = event.arguments
        case ToolCallStarted():
            mark = {"attempt": event.attempt, "at": stored.at, "node": event.node, "pid": event.pid}
            receipt["marks"].append(mark)
        case ToolCallRetried():
            receipt["retries"].append({"attempt": event.attempt, "at": stored.at, "reason": event.reason})
        case ToolEvidence():
            told = {"attempt": event.attempt, "at": stored.at, "why": event.why, "content": event.content}
            receipt["evidence"].append(told | {"is_error": event.is_error})
        case ToolResult():
            told = {"attempt": event.attempt, "at": stored.at, "source": event.source, "content": event.content}
            receipt["result"] = told | {"is_error": event.is_error}


def calls_lines(stored: Sequence[Stored], calls: Sequence[CallRow]) -> list[str]:
    """The receipts for people."""
    texts: list[str] = []
    for receipt in calls_json(stored, calls):
        name = f"{line(receipt['tool_call_id'])}  {line(receipt['name'])}({line(receipt['arguments'] or '')})"
        texts += ["", f"{name}  turn {receipt['turn_index']}, {receipt['effect']}, attempts {receipt['attempts']}"]
        for mark in receipt["marks"]:
            where = f"process {mark['pid']} on node {line(mark['node'][:12])}"
            texts.append(f"    mark      attempt {mark['attempt']}, {clock(mark['at'])}, {where}")
        for retry in receipt["retries"]:
            texts.append(f"    retry     attempt {retry['attempt']}, {clock(retry['at'])}: {line(retry['reason'])}")
        for kind in (receipt["result"], *receipt["evidence"]):
            if kind:
                source = f"by {kind['source']}" if "source" in kind else f"evidence, {line(kind['why'])}"
                error = ", error" if kind["is_error"] else ""
                label = "result" if "source" in kind else "late"
                told = f"attempt {kind['attempt']}, {clock(kind['at'])}, {source}{error}: {line(kind['content'])}"
                texts.append(f"    {label:<10}{told}")
        if receipt["result"] is None:
            texts.append("    open")
    return texts
