"""The page about the states says what the table says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from perdure.store.states import TERMINAL, TRANSITIONS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_committed_diagram_is_drawn_from_the_table() -> None:
    drawn = runpy.run_path(str(DOCS / "draw_states.py"))["page"]()
    assert (DOCS / "states.md").read_text(encoding="utf-8") == drawn, "run python docs/draw_states.py"


def test_the_diagram_has_every_move_and_no_other() -> None:
    moves = re.findall(r"^    (\S+) --> (\S+)$", (DOCS / "states.md").read_text(encoding="utf-8"), re.MULTILINE)
    expected = {(str(status), str(to)) for status, onward in TRANSITIONS.items() for to in onward}
    assert set(moves) == expected | {("[*]", "queued")} | {(str(status), "[*]") for status in TERMINAL}
    assert len(moves) == len(set(moves))
