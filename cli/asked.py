"""Open questions for readers: what is asked, and the commands that answer it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ..client.questions import Question
from ..store.rows import CallRow
from .options import at_store
from .text import clock, line


def question_json(question: Question) -> dict[str, Any]:
    """A question for a program."""
    return asdict(question)


def question_lines(question: Question, db: str, whose: bool = False) -> list[str]:
    """A question for people, with the commands that answer it; `whose` names its run too."""
    tool, approval = line(question.tool), question.kind == "approval"
    asks = f"may {tool} run?" if approval else f"did {tool} happen?"
    sample = f", batch {line(question.batch)}, sample {line(question.sample or '')}" if question.batch else ""
    texts = [
        ("run", f"{line(question.run_id)}{sample}" if whose else ""),
        ("question", f"{line(question.tool_call_id)}: {asks} ({question.effect}, turn {question.turn_index})"),
        ("arguments", line(question.arguments, None)),
        ("reason", line(question.reason, None)),
        ("attempt", "" if approval else _attempt(question)),
        ("asked", clock(question.asked_at)),
        ("deadline", _deadline(question)),
        *(("answer", command) for command in answers(question, db)),
    ]
    return [f"{name:<12}{text}" for name, text in texts if text]


def answers(question: Question, db: str) -> list[str]:
    """The commands that answer a question."""
    which = shlex.join([line(question.run_id, None), line(question.tool_call_id, None)])
    perdure = f"perdure {at_store(db)}"
    if question.kind == "approval":
        return [f"{perdure}approve {which}", f"{perdure}reject {which} -m WHY"]
    return [f"{perdure}settle {which} {how}" for how in ("--happened RESULT", "--not-happened", "--abandon")]


def _attempt(question: Question) -> str:
    began = f", started {clock(question.started_at)}" if question.started_at else ""
    where = f" by process {question.pid} on node {line(question.node[:12])}" if question.pid else ""
    return f"{question.attempt}{began}{where}"


def _deadline(question: Question) -> str:
    if question.due_at is None:
        return ""
    then = {"approve": "then it is approved", "reject": "then it is rejected", None: "then the run times out"}
    return f"{clock(question.due_at)}, {then[question.default]}"


def waits_for(calls: Iterable[CallRow]) -> str:
    """What a run waits for, in few words."""
    return ", ".join(
        f"did {call.name} happen?" if call.unsettled else f"may {call.name} run?" for call in calls if call.waits
    )


def waiting_lines(run_id: str, questions: Sequence[Question], db: str) -> list[str]:
    """That a run waits, for what, and how it is answered."""
    count = "a question is" if len(questions) == 1 else f"{len(questions)} questions are"
    texts = [f"run {line(run_id)} waits for a person; {count} open:"]
    for question in questions:
        texts += ["", *question_lines(question, db)]
    return texts
