"""The guards of every command, pure, over the rows of one transaction.

A log loads the rows that a group of commands touches, lets a `Book` judge the commands one by one, and writes
what the Book has gathered, all in one transaction. So the rules stand here once for every log, and what they
compare is what the database holds: nobody's memory is trusted. A refused command leaves the Book as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import assert_never

from .budgets import Budget
from .decisions import cancelled, check_room, checked, closed, decide, expire, outcome_of_waiting, settle, waited_for
from .errors import IllegalTransition
from .events import (
    ApprovalRequested,
    BudgetReserved,
    Event,
    RunClaimed,
    Stored,
    ToolCallRequested,
    ToolEvidence,
)
from .log import (
    Abandon,
    Accepted,
    Answer,
    Append,
    Cancel,
    Check,
    Claim,
    Command,
    Create,
    Decide,
    Expire,
    Leave,
    Mark,
    Probed,
    Reason,
    Refused,
    Requeue,
    Result,
    Retry,
    Settle,
    Unsettle,
    Verdict,
)
from .projections import Fold, first_row
from .rows import CallRow, RunRow
from .states import OWNERS_EVENTS, TERMINAL, Status

Key = tuple[str, str]


class Book:
    """The rows of one transaction: judged, changed in memory, written by the log that made it."""

    def __init__(
        self,
        runs: Mapping[str, RunRow],
        calls: Mapping[Key, CallRow],
        supervisor: str | None,
        now: float,
        budgets: Mapping[str, Budget] = MappingProxyType({}),
    ) -> None:
        self.runs = dict(runs)
        self.calls: dict[str, dict[str, CallRow]] = {}
        for (run_id, call_id), call in calls.items():
            self.calls.setdefault(run_id, {})[call_id] = call
        self.supervisor, self.now, self.budgets = supervisor, now, dict(budgets)
        self.events: dict[str, list[Stored]] = {}
        self.changed_runs: set[str] = set()
        self.changed_calls: dict[Key, None] = {}
        """In order of change, which for new calls is the order of request."""

    def tail_wanted(self, command: Command) -> tuple[str, int] | None:
        """(run, after seq) if judging needs the events that stand behind what the command has seen."""
        if isinstance(command, Append) and (row := self.runs.get(command.run_id)) and command.expected_seq < row.seq:
            return command.run_id, command.expected_seq
        return None

    def judge(self, command: Command, tail: Sequence[Stored] = ()) -> Verdict:
        """The verdict on one command. `tail` is what `tail_wanted` asked for, as read from the database."""
        try:
            if tail or command.run_id in self.events:
                known = {stored.seq for stored in tail}
                mine = self.events.get(command.run_id, ())
                tail = [*tail, *(stored for stored in mine if stored.seq not in known)]
            return self._judge(command, tail)
        except Refused as refusal:
            return refusal
        except IllegalTransition as error:
            return Refused("illegal", f"run {command.run_id}: {error}")

    def _judge(self, command: Command, tail: Sequence[Stored]) -> Accepted:
        match command:
            case Create():
                return self._create(command)
            case Claim():
                return self._claim(command)
            case Append():
                return self._append(command, tail)
            case Mark():
                return self._mark(command)
            case Leave():
                return self._leave(command)
            case Retry():
                return self._retry(command)
            case Result():
                return self._result(command)
            case Probed():
                row, call = self._call(command.run_id, command.event.tool_call_id)
                known = command.event.event_id in call.evidence_ids.split()
                return self._write_if_new(row, () if known else (command.event,))
            case Unsettle():
                return self._unsettle(command)
            case Answer():
                return self._answer(command)
            case Decide():
                row, call = self._call(command.run_id, command.event.tool_call_id)
                return self._write_if_new(row, decide(row, call, command.event, self.now))
            case Settle():
                row, call = self._call(command.run_id, command.event.tool_call_id)
                return self._write_if_new(row, settle(row, call, command))
            case Expire():
                row = self._row(command.run_id)
                self._leased(command.lease)
                return self._write_if_new(row, expire(row, self._open(row.run_id), self.now))
            case Cancel():
                return self._cancel(command)
            case Requeue():
                return self._requeue(command)
            case Check():
                row = self._row(command.run_id)
                return self._write_if_new(row, checked(row, command.event))
            case Abandon():
                return self._abandon(command)
            case _:
                assert_never(command)

    # -- decisions ----------------------------------------------------------------------------------------

    def _create(self, command: Create) -> Accepted:
        event = command.event
        if row := self.runs.get(command.run_id):
            raise Refused("exists", f"run {row.run_id} exists already")
        if event.budget is not None and event.budget not in self.budgets:
            raise Refused("not_found", f"run {command.run_id}: there is no budget {event.budget!r} in this store")
        return self._write(first_row(command.run_id, event, self.now), [event])

    def _claim(self, command: Claim) -> Accepted:
        row = self._row(command.run_id)
        self._leased(command.lease)
        if command.event_id == row.claim_id:
            return Accepted(row, already=True, calls=self._open(row.run_id))
        if row.status in TERMINAL or row.status is Status.AWAITING_APPROVAL:
            raise Refused("ended", f"run {row.run_id} is {row.status} and needs no owner")
        if row.epoch != command.seen_epoch:
            raise Refused("stale_epoch", f"run {row.run_id} was claimed by another owner (epoch {row.epoch})")
        event = RunClaimed(
            event_id=command.event_id,
            epoch=row.epoch + 1,
            owner=command.lease,
            reason=command.reason,
            charged=command.charged,
        )
        return self._write(row, [event])

    def _cancel(self, command: Cancel) -> Accepted:
        row = self._row(command.run_id)
        if command.event.event_id in row.decisions:
            return Accepted(row, already=True)
        if row.status in TERMINAL:
            raise Refused("ended", f"run {row.run_id} has already ended as {row.status}")
        if row.cancel:
            return Accepted(row, already=True)
        return self._write(row, cancelled(row, command.event, self._open(row.run_id)))

    def _requeue(self, command: Requeue) -> Accepted:
        row = self._row(command.run_id)
        if command.event.event_id in row.decisions:
            return Accepted(row, already=True)
        if row.status is Status.COMPLETED:
            raise Refused("ended", f"run {row.run_id} is completed; there is nothing to resume")
        if row.status is Status.AWAITING_APPROVAL:
            raise Refused("not_ended", f"run {row.run_id} waits for a person: {waited_for(self._open(row.run_id))}")
        if row.status not in TERMINAL:
            raise Refused("not_ended", f"run {row.run_id} is {row.status}; it goes on by itself")
        return self._write(row, [command.event])

    def _abandon(self, command: Abandon) -> Accepted:
        row = self._row(command.run_id)
        self._leased(command.lease)
        if command.event.event_id in row.decisions:
            return Accepted(row, already=True)
        if row.status in TERMINAL:
            raise Refused("ended", f"run {row.run_id} has already ended as {row.status}")
        if row.epoch != command.seen_epoch:
            raise Refused("stale_epoch", f"run {row.run_id} was claimed by another owner (epoch {row.epoch})")
        if row.cancel:  # whoever cancelled it was told that it will be
            return self._write(row, closed(row, self._open(row.run_id)))
        return self._write(row, [command.event])

    # -- the owner ----------------------------------------------------------------------------------------

    def _append(self, command: Append, tail: Sequence[Stored]) -> Accepted:
        row = self._row(command.run_id)
        if row.epoch != command.epoch:
            raise Refused("stale_epoch", f"run {row.run_id} has a newer owner: epoch {row.epoch}, not {command.epoch}")
        if command.expected_seq > row.seq:
            raise Refused("conflict", f"run {row.run_id} ends at event {row.seq}, not {command.expected_seq}")
        newer = tuple(stored for stored in tail if stored.seq > command.expected_seq)
        known = 0
        for stored, event in zip(newer, command.events, strict=False):
            if stored.event.event_id != event.event_id:
                break
            known += 1
        fresh = command.events[known:]
        if known < len(newer) and (fresh or not known):
            raise Refused("conflict", f"run {row.run_id} has newer events", newer)
        if not fresh:
            return Accepted(row, newer[:known], already=known > 0, calls=self._open(row.run_id))
        if row.status in TERMINAL:
            raise Refused("ended", f"run {row.run_id} has ended as {row.status}", newer)
        for event in fresh:
            if event.type not in OWNERS_EVENTS:
                raise Refused("illegal", f"run {row.run_id}: {event.type} is not the owner's to append")
            if row.cancel and isinstance(event, ToolCallRequested | ApprovalRequested | BudgetReserved):
                raise Refused("cancelled", f"run {row.run_id} is being cancelled")
            if isinstance(event, ApprovalRequested) and self._has_attempt(row.run_id, event.tool_call_id):
                raise Refused("illegal", f"call {event.tool_call_id} of run {row.run_id} may have begun unasked")
        done = self._write(row, fresh)
        return replace(done, events=newer[:known] + done.events) if known else done

    def _retry(self, command: Retry) -> Accepted:
        event = command.event
        row, call = self._beginnable(command.run_id, event.tool_call_id, event.attempt - 1, first=0)
        if call.started_attempt != command.seen_started:
            raise Refused("superseded", f"call {call.tool_call_id} of run {row.run_id} has begun meanwhile")
        if row.epoch != command.epoch:
            raise Refused("stale_epoch", f"run {row.run_id} has a newer owner: epoch {row.epoch}")
        return self._write(row, [event])

    # -- facts about calls --------------------------------------------------------------------------------

    def _mark(self, command: Mark) -> Accepted:
        event = command.event
        row, call = self._beginnable(command.run_id, event.tool_call_id, event.attempt)
        self._not_withdrawn(call)
        if call.started_attempt < event.attempt:
            return self._write(row, [event])
        if call.nonce != event.nonce:
            raise Refused("taken", f"call {call.tool_call_id} of run {row.run_id}: another task holds this attempt")
        return Accepted(row, already=True, calls=self._open(row.run_id))

    def _leave(self, command: Leave) -> Accepted:
        row, call = self._beginnable(command.run_id, command.tool_call_id, command.attempt)
        if call.effect == "non_idempotent":
            raise Refused("illegal", f"call {call.tool_call_id} of run {row.run_id} begins with a start mark only")
        return Accepted(row)

    def _result(self, command: Result) -> Accepted:
        event = command.event
        row, call = self._call(command.run_id, event.tool_call_id)
        if event.event_id in (call.result_id, *call.evidence_ids.split()):
            return Accepted(row, already=True, calls=self._open(row.run_id))
        if not call.attempt and call.result_seq is None:
            raise Refused("gated", f"call {call.tool_call_id} of run {row.run_id} has no attempt yet")
        success_in_time = not event.is_error and not call.started
        if call.result_seq is not None:
            why = "the call already has its result"
        elif row.status in TERMINAL:
            why = f"the run has ended as {row.status}"
        elif event.attempt != call.attempt and not success_in_time:
            why = f"attempt {call.attempt} has superseded this one"
        else:
            return self._write(row, [event])
        evidence = ToolEvidence(
            event_id=event.event_id,
            tool_call_id=event.tool_call_id,
            attempt=event.attempt,
            content=event.content,
            is_error=event.is_error,
            why=why,
        )
        return self._write(row, [evidence])

    def _unsettle(self, command: Unsettle) -> Accepted:
        row, call = self._current(command.run_id, command.event.tool_call_id, command.event.attempt)
        if call.unsettled:
            return Accepted(row, already=True, calls=self._open(row.run_id))
        self._not_withdrawn(call)
        if call.question == command.event.event_id:
            raise Refused("superseded", f"call {call.tool_call_id} of run {row.run_id}: the question was open once")
        return self._write(row, [command.event])

    def _answer(self, command: Answer) -> Accepted:
        row, call = self._call(command.run_id, command.event.tool_call_id)
        if call.result_id == command.event.event_id:
            return Accepted(row, already=True, calls=self._open(row.run_id))
        row, call = self._current(command.run_id, call.tool_call_id, command.event.attempt)
        self._not_cancelled(row)
        return self._write(row, [command.event])

    # -- guards -------------------------------------------------------------------------------------------

    def _row(self, run_id: str) -> RunRow:
        row = self.runs.get(run_id)
        if row is None:
            raise Refused("not_found", f"no run {run_id} in this store")
        return row

    def _leased(self, nonce: str) -> None:
        if nonce != self.supervisor:
            raise Refused("stale_lease", "another supervisor has taken over this store")

    def _call(self, run_id: str, call_id: str) -> tuple[RunRow, CallRow]:
        row = self._row(run_id)
        call = self.calls.get(run_id, {}).get(call_id)
        if call is None:
            raise Refused("not_found", f"run {run_id} has no call {call_id}")
        return row, call

    def _current(self, run_id: str, call_id: str, attempt: int, first: int = 1) -> tuple[RunRow, CallRow]:
        """An open call of a run that has not ended, at this attempt; `first` is the lowest that will do."""
        row, call = self._call(run_id, call_id)
        reason: Reason | None = None
        if row.status in TERMINAL:
            reason = "ended"
        elif call.result_seq is not None:
            reason = "closed"
        elif call.attempt < first or call.gate in ("due", "asked", "expired"):
            reason = "gated"
        elif call.attempt != attempt:
            reason = "superseded"
        if reason:
            raise Refused(reason, f"call {call_id} of run {run_id}, attempt {attempt}: {reason}")
        return row, call

    def _beginnable(self, run_id: str, call_id: str, attempt: int, first: int = 1) -> tuple[RunRow, CallRow]:
        """A current attempt that may begin, or be followed by another: nobody has been asked what became of it."""
        row, call = self._current(run_id, call_id, attempt, first)
        self._not_cancelled(row)
        if call.barred:
            raise Refused("gated", f"call {call_id} of run {run_id} waits for a person")
        return row, call

    def _not_cancelled(self, row: RunRow) -> None:
        if row.cancel:
            raise Refused("cancelled", f"run {row.run_id} is being cancelled")

    def _not_withdrawn(self, call: CallRow) -> None:
        if call.withdrawn:
            raise Refused("superseded", f"call {call.tool_call_id} of run {call.run_id} was {call.decision_text}")

    def _has_attempt(self, run_id: str, call_id: str) -> bool:
        call = self.calls.get(run_id, {}).get(call_id)
        return call is not None and call.attempt > 0

    def _open(self, run_id: str) -> tuple[CallRow, ...]:
        return tuple(call for call in self.calls.get(run_id, {}).values() if call.result_seq is None)

    # -- writing ------------------------------------------------------------------------------------------

    def _write_if_new(self, row: RunRow, events: Sequence[Event]) -> Accepted:
        if not events:
            return Accepted(row, already=True, calls=self._open(row.run_id))
        return self._write(row, events)

    def _write(self, row: RunRow, events: Sequence[Event]) -> Accepted:
        """Fold events into copies of the rows; nothing is kept unless every event is legal."""
        fold = Fold(row, self.calls.get(row.run_id, {}), self.budgets.get(row.budget or ""))
        stored = [fold.add(event, self.now) for event in events]
        if fold.status is Status.AWAITING_APPROVAL:
            stored += [fold.add(event, self.now) for event in outcome_of_waiting(fold.row, fold.open_calls)]
        if wanted := next((event for event in events if isinstance(event, BudgetReserved)), None):
            check_room(row, fold.budget, wanted)
        if fold.budget:
            self.budgets[fold.budget.name] = fold.budget
        row = fold.row
        self.runs[row.run_id] = row
        self.calls[row.run_id] = fold.calls
        self.events.setdefault(row.run_id, []).extend(stored)
        self.changed_runs.add(row.run_id)
        self.changed_calls.update(((row.run_id, call_id), None) for call_id in fold.touched)
        return Accepted(row, tuple(stored), calls=fold.open_calls)
