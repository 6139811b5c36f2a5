"""The person of a drill: decides about what is gated, and answers "did this happen?" by what the ledger knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from ..store.events import ApprovalDecided, Decision, Settlement, ToolCallSettled
from ..store.log import Accepted, Command, Decide, Settle
from ..store.rows import CallRow
from .ledger import Ledger, Note

NAME: Final = "perdure drill"


async def answer(
    calls: Sequence[CallRow], commit: Callable[[Command], Awaitable[Accepted]], ledger: Ledger, decision: Decision
) -> None:
    """Answer every open question of a run that waits; `decision` is the answer to whether a call may run."""
    for call in calls:
        if call.result_seq is not None or not call.waits:
            continue
        if call.unsettled:
            outcome, content = truth(ledger.read(), call.tool_call_id, call.attempt)
            settled = ToolCallSettled(
                tool_call_id=call.tool_call_id,
                attempt=call.attempt,
                question=call.question,
                outcome=outcome,
                by=NAME,
            )
            # noted before it is committed: a kill in between has it asked and answered once more
            ledger.write(Note("answered", text=outcome, tool=call.name, call=call.tool_call_id, attempt=call.attempt))
            await commit(Settle(call.run_id, settled, content))
        else:
            decided = ApprovalDecided(
                tool_call_id=call.tool_call_id, question=call.question, digest=call.digest, decision=decision, by=NAME
            )
            await commit(Decide(call.run_id, decided))


def truth(notes: Iterable[Note], call_id: str, attempt: int) -> tuple[Settlement, str]:
    """Whether an attempt took effect, and its result. One that was killed inside of its handler is abandoned: what it
    had done by then nobody knows, and the drill must not double an effect by a guess. Pure."""
    seen = {note.what: note.text for note in notes if (note.call, note.attempt) == (call_id, attempt)}
    if "returned" in seen:
        return "happened", seen["returned"]
    return ("abandon" if "entered" in seen else "not_happened"), ""
