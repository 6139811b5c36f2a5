"""The receipts of tool calls, folded from the log: what was intended, approved, attempted, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..store.events import (
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    CodeChanged,
    Event,
    RunClaimed,
    Stored,
    ToolCallProbed,
    ToolCallRequested,
    ToolCallRetried,
    ToolCallSettled,
    ToolCallStarted,
    ToolCallUnsettled,
    ToolEvidence,
    ToolResult,
)
from ..store.rows import CallRow
from .text import clock, duration, line

Receipt = dict[str, Any]
_REPORTED = ("tool", "crash", "timeout", "cancel")
"""Sources of results that are the end of their attempt, if it had begun."""
_NEVER_BEGAN = ("validation", "policy", "limit", "loop")


def receipts_json(stored: Sequence[Stored], calls: Sequence[CallRow]) -> list[Receipt]:
    """The receipt of every call, in order of request.

    An attempt's `epoch` is that of its start mark, or else of the event that opened it; `owner` is the supervisor that
    had claimed the run then. Times are seconds on the store's clock; `ended_at` is when its end was known, `end` how it
    ended if it did not return. Of one that writes no start mark it is known by its end that it had begun, and where.
    """
    receipts: dict[str, Receipt] = {
        call.tool_call_id: {
            "tool_call_id": call.tool_call_id,
            "turn_index": call.turn_index,
            "name": call.name,
            "effect": call.effect,
            "arguments": None,
            "idempotency_key": None,
            "requested_at": None,
            "standing": standing(call),
            "approvals": [],
            "attempts": [],
            "result": None,
        }
        for call in calls
    }
    for one in stored:
        if receipt := receipts.get(getattr(one.event, "tool_call_id", None) or ""):
            _note_approval(receipt, one)
            _note_attempt(receipt, one)
    owners = {one.epoch: one.event.owner for one in stored if isinstance(one.event, RunClaimed)}
    for receipt in receipts.values():
        for attempt in receipt["attempts"]:
            attempt["owner"] = owners.get(attempt["epoch"])
    return list(receipts.values())


def _note_approval(receipt: Receipt, stored: Stored) -> None:
    match event := stored.event:
        case ApprovalRequested():
            due_at = None if event.timeout_s is None else stored.at + event.timeout_s
            asked = {"question": event.event_id, "asked_at": stored.at, "reason": event.reason, "due_at": due_at}
            asked |= {"default": event.default, "digest": event.digest, "expired_at": None, "decided": None}
            receipt["approvals"].append(asked)
            receipt["attempts"] = []  # nothing of it had begun, or it could not be asked for
        case ApprovalExpired():
            receipt["approvals"][-1]["expired_at"] = stored.at
        case ApprovalDecided():
            decided = {"at": stored.at, "decision": event.decision, "by": event.by, "reason": event.reason}
            receipt["approvals"][-1]["decided"] = decided | {"arguments": event.arguments}


def _note_attempt(receipt: Receipt, stored: Stored) -> None:
    attempts: list[Receipt] = receipt["attempts"]
    match event := stored.event:
        case ToolCallRequested():
            receipt |= {"arguments": event.arguments, "idempotency_key": event.idempotency_key}
            receipt["requested_at"] = stored.at
            attempts.append(_attempt(1, stored, ""))
        case ToolCallRetried():
            if event.pid:
                _note_end(attempts[-1], stored.at, event.node, event.pid, event.ran_s)
                attempts[-1]["end"] = event.reason
            attempts.append(_attempt(event.attempt, stored, event.reason))
        case ToolCallStarted():
            where = {"started_at": stored.at, "epoch": stored.epoch, "node": event.node, "pid": event.pid}
            _of(attempts, event.attempt).update(where)
        case ToolCallProbed():
            probed: Receipt = {"at": stored.at, "answer": event.answer, "why": event.why}
            probed |= {"node": event.node, "pid": event.pid, "took_s": event.took_s}
            attempt = _of(attempts, event.attempt)
            attempt["probes"].append(probed)
            attempt |= {"ended_at": attempt["ended_at"] or stored.at, "end": event.end}
        case ToolCallUnsettled():
            asked = {"question": event.event_id, "asked_at": stored.at, "why": event.why, "settled": None}
            attempt = _of(attempts, event.attempt)
            attempt["unsettled"].append(asked)
            attempt["ended_at"] = attempt["ended_at"] or stored.at
        case ToolCallSettled():
            settled = {"at": stored.at, "outcome": event.outcome, "by": event.by, "reason": event.reason}
            _of(attempts, event.attempt)["unsettled"][-1]["settled"] = settled
        case ToolEvidence():
            told = {"at": stored.at, "why": event.why, "content": event.content, "is_error": event.is_error}
            _of(attempts, event.attempt)["evidence"].append(told)
        case ToolResult():
            _note_result(receipt, event, stored.at, stored.epoch)


def _note_result(receipt: Receipt, event: ToolResult, at: float, epoch: int) -> None:
    told = {"attempt": event.attempt, "at": at, "source": event.source, "content": event.content}
    receipt["result"] = told | {"is_error": event.is_error, "took_s": event.took_s}
    if event.source in _NEVER_BEGAN:
        if all(attempt["epoch"] == epoch for attempt in receipt["attempts"]):  # a later owner knows less
            receipt["attempts"] = []
    elif event.source in _REPORTED:
        attempt = _of(receipt["attempts"], event.attempt)
        if event.source != "cancel" or event.pid or attempt["started_at"]:
            _note_end(attempt, at, event.node, event.pid, event.took_s)


def _note_end(attempt: Receipt, at: float, node: str, pid: int, took_s: float | None) -> None:
    attempt |= {"ended_at": attempt["ended_at"] or at, "took_s": took_s}
    if pid:
        attempt |= {"node": node, "pid": pid}
    if took_s is not None and attempt["started_at"] is None:
        attempt["started_at"] = at - took_s


def _attempt(number: int, opened: Stored, why: str) -> Receipt:
    return {
        "attempt": number,
        "epoch": opened.epoch,
        "opened_at": opened.at,
        "why": why,
        "started_at": None,
        "node": "",
        "pid": 0,
        "ended_at": None,
        "took_s": None,
        "end": "",
        "probes": [],
        "unsettled": [],
        "evidence": [],
    }


def _of(attempts: list[Receipt], number: int) -> Receipt:
    return next(attempt for attempt in attempts if attempt["attempt"] == number)


def standing(call: CallRow) -> str:
    """How a call stands: closed, or what it waits for."""
    if call.result_seq is not None:
        return "closed"
    if call.unsettled:
        return f"attempt {call.attempt}: it is unknown whether it took effect, a person is asked"
    if call.withdrawn:
        return f"{call.decision_text}, is to run again"
    if call.started and not call.pid:
        return f"attempt {call.attempt}, it may have run before its tool was declared {call.effect}"
    if call.started:
        return f"attempt {call.attempt}, started {clock(call.started_at)} by process {call.pid}"
    return {
        "due": "is to be approved, a person will be asked when the run goes on",
        "asked": "waits for approval",
        "expired": "nobody decided in time",
        "approved": "approved, has not begun" if call.attempt == 0 else f"attempt {call.attempt}, no start mark",
        "": f"attempt {call.attempt}, no start mark",
    }[call.gate]


# -- for people ---------------------------------------------------------------------------------------------


def receipts_lines(stored: Sequence[Stored], calls: Sequence[CallRow]) -> list[str]:
    """The receipts for people: of each call a line for everything that happened to it."""
    texts: dict[str, list[str]] = {}
    for call in calls:
        head = f"{line(call.tool_call_id)}  {line(call.name)}  turn {call.turn_index}, {call.effect}"
        texts[call.tool_call_id] = ["", head]
    for one in stored:
        if isinstance(one.event, CodeChanged):
            for call_id, raised in one.event.raised.items():
                texts[call_id].append(f"    {'raised':<12}{clock(one.at)}  its tool is {raised.effect} now")
        told = texts.get(getattr(one.event, "tool_call_id", None) or "")
        if told is not None and (entry := _entry(one.event, one.epoch)):
            told.append(f"    {entry[0]:<12}{clock(one.at)}  {entry[1]}".rstrip())
    for call in calls:
        if call.result_seq is None:
            texts[call.tool_call_id].append(f"    {'open':<12}{standing(call)}")
    return [text for told in texts.values() for text in told]


def _entry(event: Event, epoch: int) -> tuple[str, str] | None:
    """What happened to a call, and the rest of what is known of it."""
    match event:
        case ToolCallRequested():
            return "intended", f"epoch {epoch}, key {line(event.idempotency_key[:12])}: {line(event.arguments, None)}"
        case ToolCallRetried():
            before = "" if not event.pid else f" ({_ran(event.ran_s)} {_place(event.node, event.pid)})"
            return f"attempt {event.attempt}", f"epoch {epoch}: {line(event.reason)}{before}"
        case ToolCallStarted():
            return "started", f"attempt {event.attempt}, epoch {epoch}, {_place(event.node, event.pid)}"
        case ToolCallProbed():
            answer = event.answer.replace("_", " ")
            told = f"attempt {event.attempt}, which had ended ({line(event.end)}): {answer}{_reason(event.why)}"
            return "probed", told + (f", {_place(event.node, event.pid)}" if event.pid else "")
        case ToolEvidence():
            told = f"attempt {event.attempt}, {line(event.why)}{_error(event.is_error)}: {line(event.content)}"
            return "late", told
        case ToolResult():
            took = "" if event.took_s is None else f", took {duration(event.took_s)}"
            place = f", {_place(event.node, event.pid)}" if event.pid else ""
            told = f"attempt {event.attempt}, by {event.source}{_error(event.is_error)}{place}{took}"
            return "result", f"{told}: {line(event.content)}"
    return _entry_of_people(event)


def _entry_of_people(event: Event) -> tuple[str, str] | None:
    match event:
        case ApprovalRequested():
            until = "" if event.timeout_s is None else f", {duration(event.timeout_s)} to decide"
            return "asked", f"may it run?{until}{_reason(event.reason)}"
        case ApprovalDecided():
            edited = "" if event.arguments is None else f", with other arguments: {line(event.arguments, None)}"
            word = "approved" if event.decision == "approve" else "rejected"
            return word, f"by {line(event.by)}{_reason(event.reason)}{edited}"
        case ApprovalExpired():
            return "expired", "nobody decided in time"
        case ToolCallUnsettled():
            return "unsettled", f"attempt {event.attempt}, did it happen?{_reason(event.why)}"
        case ToolCallSettled():
            outcome = event.outcome.replace("_", " ")
            return "settled", f"attempt {event.attempt}, {outcome}, by {line(event.by)}{_reason(event.reason)}"
    return None


def _place(node: str, pid: int) -> str:
    return f"process {pid} on node {line(node[:12])}"


def _ran(ran_s: float | None) -> str:
    return "in" if ran_s is None else f"after {duration(ran_s)} in"


def _reason(text: str) -> str:
    return f": {line(text)}" if text else ""


def _error(is_error: bool) -> str:
    return ", error" if is_error else ""
