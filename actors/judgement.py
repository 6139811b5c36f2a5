"""What follows the end of an attempt. Pure.

| effect           | begun? | next                                                                          |
|------------------|--------|-------------------------------------------------------------------------------|
| any              | no     | dispatch again as a new attempt                                               |
| read_only        | yes    | dispatch again, up to the tool's attempts_max, then an error result           |
| idempotent_write | yes    | the same, with the same key                                                   |
| non_idempotent   | yes    | prove that the attempt is over; take the result it left; or ask the probe      |

An attempt that did not end in its time has timed out, whether it was interrupted or had to be killed: it is not
repeated. Of a non_idempotent one it is found out all the same what it did.

Of a run that is cancelled nothing is dispatched any more: what may be repeated is recorded as stopped, and what may not
as the result that it left, as what its probe says, or as unknown; in either case once it is over.
"""

from __future__ import annotations

import json
from typing import Literal

from ..store.events import ToolCallRequested
from .attempt import Outcome
from .results import plain_error

UNBEGUN_MAX = 20
"""Attempts that may die before they begin; beyond, the worker cannot be started at all."""


class TaskDied(Exception):
    """A task's process ended without an outcome. `charged` is false where the tool is not to blame.

    `node`, `pid` and `ran_s` say where it had begun and how long before, as far as it was heard of. `timed_out`: its
    time was over, so that it was its own deadline which ended it.
    """

    def __init__(self, why: str, charged: bool = True) -> None:
        super().__init__(why)
        self.why, self.charged = why, charged
        self.node, self.pid = "", 0
        self.ran_s: float | None = None
        self.timed_out = False

    def outcome(self, timeout_s: float) -> Outcome:
        """How the attempt ended, or the probe."""
        kind: Literal["timeout", "died"] = "timeout" if self.timed_out else "died"
        text = f"the tool did not end within {timeout_s:g} s, could not be interrupted, and was killed"
        content = plain_error("Timeout", text) if self.timed_out else self.why
        return Outcome(kind=kind, content=content, is_error=True, node=self.node, pid=self.pid, took_s=self.ran_s)


def judge(
    effect: str, outcome: Outcome, began: bool, deaths: int, unbegun: int, attempts_max: int, stops: bool = False
) -> Literal["record", "stopped", "retry", "settle", "drop"]:
    """What follows an attempt; `stops` means that it was to. Pure: the table above.

    drop: it was refused leave to begin, or is to be stopped and did not begin: what stands in the log is somebody
    else's business.
    """
    if outcome.kind == "refused":
        return "drop"
    if outcome.kind in ("result", "spared"):
        return "record"
    if not began:
        if stops:
            return "drop"
        return "record" if unbegun >= UNBEGUN_MAX else "retry"
    if effect == "non_idempotent":
        return "settle"
    if outcome.kind == "timeout":
        return "record"
    if stops or outcome.kind == "stopped":
        return "stopped"
    return "record" if deaths >= attempts_max else "retry"


def recorded(outcome: Outcome, attempt: int) -> Outcome:
    """What is recorded of a call whose newest attempt ended like this."""
    if outcome.kind != "died":
        return outcome
    text = f"the tool's process died, {attempt} attempts were made: {outcome.content}"
    return outcome.model_copy(update={"content": plain_error("ProcessDied", text)})


def stopped(request: ToolCallRequested, effect: str, outcome: Outcome) -> Outcome:
    """What is recorded of a call that may be repeated, whose attempt was stopped and is over."""
    text = f"stopped before it finished: {outcome.content if outcome.kind == 'died' else 'it was interrupted'}"
    if effect == "idempotent_write":
        text += f"; it may have taken effect, with the idempotency key {request.idempotency_key}"
    return outcome.model_copy(update={"kind": "stopped", "content": plain_error("Cancelled", text), "is_error": True})


def without_effect(outcome: Outcome, timeout_s: float, deaths: int, attempts_max: int) -> Outcome | None:
    """What is recorded of a non_idempotent call whose newest attempt had no effect; None if another may follow."""
    if outcome.kind == "timeout":
        text = f"the tool did not end within {timeout_s:g} s; its effect did not happen"
        return outcome.model_copy(update={"content": plain_error("Timeout", text)})
    if deaths >= attempts_max:
        text = f"the tool's process died {deaths} times; its effect did not happen"
        return outcome.model_copy(update={"kind": "exited", "content": plain_error("ProcessDied", text)})
    return None


def ending(outcome: Outcome) -> str:
    """How an attempt ended, for people."""
    told = outcome.content if outcome.kind == "died" else json.loads(outcome.content)
    return str(told["message"] if isinstance(told, dict) and "message" in told else told or outcome.kind)
