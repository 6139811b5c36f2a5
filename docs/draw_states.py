"""Draws docs/states.md from the state table: `python docs/draw_states.py` writes the page, `--check` compares it."""

from __future__ import annotations

import sys
from pathlib import Path

from perdure.store.states import LIVE, TERMINAL, TRANSITIONS, Status

PAGE = Path(__file__).with_name("states.md")
INTRODUCTION = """\
# The states of a run

Drawn from `TRANSITIONS` in `store/states.py` by `docs/draw_states.py`; a test keeps the two equal. The log refuses an
append that would break this table, and the machine refuses to fold one.
"""
NOTES = {
    Status.QUEUED: "created, or resumed by hand; waits for a slot",
    Status.RUNNING: "its owner has the next step to take",
    Status.AWAITING_TOOL: "at least one tool call has no result",
    Status.AWAITING_APPROVAL: "every open call waits for a person: may it run, or did it happen? Parked, for any time",
    Status.COMPLETED: "the model has given its answer; for good",
    Status.FAILED: "an error code says why; can be resumed",
    Status.CANCELLED: "stopped on request or by its deadline; can be resumed",
    Status.TIMED_OUT: "nobody approved in time; can be resumed, and asks anew",
}


def diagram() -> str:
    """The table as a mermaid state diagram."""
    moves = [f"    {status} --> {to}" for status in Status for to in Status if to in TRANSITIONS[status]]
    ends = [f"    {status} --> [*]" for status in Status if status in TERMINAL]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> queued", *moves, *ends, "```"])


def page() -> str:
    """The whole page."""
    rows = [
        f"| `{status}` | {NOTES[status]} | {'yes' if status in LIVE else 'no'} | "
        f"{', '.join(f'`{to}`' for to in Status if to in TRANSITIONS[status]) or 'none'} |"
        for status in Status
    ]
    head = ["| state | meaning | needs an actor | next states |", "|---|---|---|---|"]
    return "\n".join([INTRODUCTION, diagram(), "", *head, *rows, ""])


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
