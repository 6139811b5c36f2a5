"""What people decide: approve, reject and settle, each about one open question, durable when the call returns.

A decision names who decided. It carries the id of the question, and an approval the digest of what was asked, so that
it counts for nothing else. Whoever comes second is told how it was decided. No Ray is needed: a supervisor reads the
decision in the store.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from ..actors.schemas import violation
from ..store.errors import NotFound, UsageError
from ..store.events import ApprovalDecided, Decision, Settlement, ToolCallSettled, canonical
from ..store.log import Decide, EventLog, Reason, Refused, Settle
from ..store.rows import CallRow, RunRow
from ..store.secrets import masked
from ..store.states import Status
from .questions import Kind, Question, kind_of, questions

NAME_MAX: Final = 200
SHOWN: Final = 60
"""Characters of a call's arguments where several calls are named."""
_NEXT: Final[dict[Reason, str]] = {
    "decided": "nothing was changed: `perdure show {run} --calls` tells all",
    "closed": "nothing is left to decide: `perdure show {run} --calls` tells all",
    "superseded": "look at what is asked now: `perdure questions {run}`",
    "expired": "once the run has timed out, `perdure resume {run}` asks anew",
}
"""What to do after a refusal."""


@dataclass(frozen=True)
class Decided:
    """A decision that is recorded. `row` is the run's, right after it."""

    question: Question
    decision: Decision | Settlement
    by: str
    arguments: str | None
    """Canonical JSON text of edited arguments, None where they stay."""
    row: RunRow


async def approve(
    event_log: EventLog,
    run_id: str,
    call: str | None = None,
    *,
    arguments: Mapping[str, JsonValue] | None = None,
    by: str | None = None,
    reason: str = "",
) -> Decided:
    """Let a call run, with `arguments` in place of the model's if there are any.

    Without `call` the run must have exactly one open approval; `by` defaults to USER@HOST. Raises UsageError, also
    for arguments that break the tool's schema, and for a question that is not open any more.
    """
    question = await _find(event_log, run_id, "approval", call)
    edited = None if arguments is None else _edited(question, arguments)
    return await _decide(event_log, question, "approve", by, reason, edited)


async def reject(
    event_log: EventLog, run_id: str, call: str | None = None, *, reason: str, by: str | None = None
) -> Decided:
    """Have a call not run; its result tells the model the reason. `call`, `by` and errors as for `approve`."""
    if not reason.strip():
        raise UsageError("a rejection needs a reason (-m WHY): the model is told it")
    question = await _find(event_log, run_id, "approval", call)
    return await _decide(event_log, question, "reject", by, reason, None)


async def settle(
    event_log: EventLog,
    run_id: str,
    outcome: Settlement,
    call: str | None = None,
    *,
    result: JsonValue = None,
    by: str | None = None,
    reason: str = "",
) -> Decided:
    """Say what became of an interrupted attempt.

    It "happened": `result` is the call's result. It did "not_happened": the call is executed again. "abandon": the
    call gets an error result that says that nobody knows. `call`, `by` and errors as for `approve`.
    """
    if outcome not in ("happened", "not_happened", "abandon"):
        raise UsageError(f"{outcome!r} settles nothing: say happened, not_happened or abandon")
    if outcome != "happened" and result is not None:
        raise UsageError("only a call that happened has a result")
    content = _canonical(result, "the result") if outcome == "happened" else ""
    question = await _find(event_log, run_id, "settlement", call)
    event = ToolCallSettled(
        tool_call_id=question.tool_call_id,
        attempt=question.attempt,
        question=question.question,
        outcome=outcome,
        by=who(by),
        reason=reason,
    )
    row = await _commit(event_log, Settle(run_id, event, content), question)
    return Decided(question, outcome, event.by, None, row)


async def _decide(
    event_log: EventLog, question: Question, decision: Decision, by: str | None, reason: str, edited: str | None
) -> Decided:
    event = ApprovalDecided(
        tool_call_id=question.tool_call_id,
        question=question.question,
        digest=question.digest,
        decision=decision,
        by=who(by),
        reason=reason,
        arguments=edited,
    )
    row = await _commit(event_log, Decide(question.run_id, event), question)
    return Decided(question, decision, event.by, edited, row)


async def _commit(event_log: EventLog, command: Decide | Settle, question: Question) -> RunRow:
    (verdict,) = await event_log.commit([command])
    if isinstance(verdict, Refused):
        then = _NEXT.get(verdict.reason, "").format(run=question.run_id)
        raise UsageError(f"{verdict.message}; {then}" if then else verdict.message) from verdict
    return verdict.row


def who(by: str | None) -> str:
    """The name of who decides, USER@HOST without one. Raises UsageError for what is no name."""
    name = (by if by is not None else _user()).strip()
    if not name or len(name) > NAME_MAX or not name.isprintable():
        raise UsageError(f"who decides is named with 1 to {NAME_MAX} printable characters, not {name[:80]!a}")
    return name


def _user() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


# -- which question -----------------------------------------------------------------------------------------


async def _find(event_log: EventLog, run_id: str, kind: Kind, call_id: str | None) -> Question:
    """The one open question of this kind. Raises UsageError saying why there is not exactly one."""
    asked = await questions(event_log, run_id)
    fitting = [one for one in asked if one.kind == kind and call_id in (None, one.tool_call_id)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(f"{one.tool_call_id} {one.tool}({one.arguments[:SHOWN]})" for one in fitting)
        raise UsageError(f"run {run_id} has {len(fitting)} open questions, name the call: {names}")
    row, calls = await event_log.run(run_id), await event_log.calls(run_id)
    if row is None:
        raise NotFound(f"no run {run_id} in this store")
    if call_id is None:
        raise UsageError(_none_open(row, calls, kind))
    for call in calls:
        if call.tool_call_id == call_id:
            raise UsageError(f"call {call_id} of run {run_id}: {_standing(row, call, kind)}")
    raise UsageError(f"run {run_id} has no call {call_id!a}; `perdure show {run_id} --calls` tells what there is")


def _none_open(row: RunRow, calls: Sequence[CallRow], kind: Kind) -> str:
    what = "approval" if kind == "approval" else "settlement"
    text = f"no call of run {row.run_id} waits for {what}"
    others = [call for call in calls if kind_of(row, call) or call.gate or call.decision_text]
    if not others:
        return f"{text}; the run is {row.status}"
    return f"{text}; call {others[-1].tool_call_id}: {_standing(row, others[-1], kind)}"


def _standing(row: RunRow, call: CallRow, kind: Kind) -> str:
    """Why a call has no open question of this kind."""
    run = row.run_id
    match kind_of(row, call):
        case "settlement" if kind == "approval":
            return f"it is asked whether it happened: `perdure settle {run} {call.tool_call_id}`"
        case "approval" if kind == "settlement":
            return f"it waits for approval: `perdure approve {run} {call.tool_call_id}`"
    if call.decision_text:
        return f"it was {call.decision_text}"
    if row.cancel:
        return f"the run is {'cancelled' if row.status is Status.CANCELLED else 'being cancelled'}"
    if call.result_seq is not None:
        return f"it has its result: `perdure show {run} --calls`"
    if row.status is Status.TIMED_OUT:
        return f"the time to decide has passed; `perdure resume {run}` asks anew"
    if call.gate == "expired":
        return f"the time to decide has passed; {_NEXT['expired'].format(run=run)}"
    if call.gate == "due":
        return "it is asked for when the run goes on"
    return f"nothing is asked about it; the run is {row.status}"


# -- edited arguments ---------------------------------------------------------------------------------------


def _edited(question: Question, arguments: Mapping[str, JsonValue]) -> str | None:
    """Edited arguments as canonical JSON text, None if they are those that were asked about. Raises UsageError."""
    if not isinstance(arguments, Mapping):
        raise UsageError("arguments are a JSON object: names and values")
    text = _canonical(dict(arguments), "the arguments")
    if masked(text, as_json=True) != text:
        raise UsageError("these arguments hold a key or another secret, which cannot be kept; nothing was recorded")
    if wrong := violation(question.arguments_schema or {}, json.loads(text)):
        raise UsageError(f"these arguments do not suit tool {question.tool}: {wrong}; nothing was recorded")
    return None if text == question.arguments else text


def _canonical(value: JsonValue, what: str) -> str:
    try:
        return canonical(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{what} cannot be written as JSON: {error}") from error
