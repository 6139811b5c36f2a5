"""`approve`, `reject`, `settle` and `questions`: what people are asked and what they decide. No Ray is needed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import click

from ..client import decisions
from ..client.decisions import Decided
from ..client.lease import nobody_works
from ..client.nudge import nudge
from ..client.questions import open_questions, questions
from ..store.errors import UsageError
from ..store.events import Settlement
from ..store.rows import RunRow
from ..store.sql import SqlLog, open_log
from ..store.states import Status
from .asked import question_json, question_lines
from .find import find_run
from .options import asynchronous, at_store, by_option, db_option, json_option, reason_option
from .read import open_reader
from .run import plain_text, read_json, read_object
from .terminal import Terminal
from .text import json_line, line

WORDS: Final = {
    "approve": "approved",
    "reject": "rejected",
    "happened": "settled as happened",
    "not_happened": "settled as not happened",
    "abandon": "abandoned",
}
"""What was decided, for people."""


@click.command()
@click.argument("run")
@click.argument("call", required=False)
@click.option("--arguments", metavar="JSON|@FILE", help="Run it with these arguments instead: a JSON object.")
@by_option
@reason_option
@json_option
@db_option
@asynchronous
async def approve(db: str, run: str, call: str | None, arguments: str | None, as_json: bool, **who: Any) -> None:
    """Let a call run.

    RUN is its id, or the first characters of it. CALL may be left out where one approval is open. Edited arguments are
    held to the tool's schema and recorded as such.
    """
    edited = None if arguments is None else read_object(arguments, "--arguments")

    async def decide(event_log: SqlLog, run_id: str) -> Decided:
        return await decisions.approve(event_log, run_id, call, arguments=edited, **_texts(who))

    await _decide(db, run, as_json, decide)


@click.command()
@click.argument("run")
@click.argument("call", required=False)
@by_option
@reason_option
@json_option
@db_option
@asynchronous
async def reject(db: str, run: str, call: str | None, as_json: bool, **who: Any) -> None:
    """Have a call not run; the model is told the reason.

    RUN is its id, or the first characters of it. CALL may be left out where one approval is open.
    """

    async def decide(event_log: SqlLog, run_id: str) -> Decided:
        return await decisions.reject(event_log, run_id, call, **_texts(who))

    await _decide(db, run, as_json, decide)


@click.command()
@click.argument("run")
@click.argument("call", required=False)
@click.option("--happened", "result", metavar="RESULT", help="It did; this text is its result.")
@click.option("--result-json", "is_json", is_flag=True, help="RESULT is JSON, not text.")
@click.option("--not-happened", is_flag=True, help="It did not: execute the call again.")
@click.option("--abandon", is_flag=True, help="Nobody knows: the call gets an error result that says so.")
@by_option
@reason_option
@json_option
@db_option
@asynchronous
async def settle(
    db: str,
    run: str,
    call: str | None,
    result: str | None,
    is_json: bool,
    not_happened: bool,
    abandon: bool,
    as_json: bool,
    **who: Any,
) -> None:
    """Say whether an interrupted call took effect.

    RUN is its id, or the first characters of it. CALL may be left out where one such question is open.
    """
    outcomes: dict[Settlement, bool] = {
        "happened": result is not None,
        "not_happened": not_happened,
        "abandon": abandon,
    }
    said = [outcome for outcome, given in outcomes.items() if given]
    if len(said) != 1:
        raise UsageError("say one of --happened RESULT, --not-happened and --abandon")
    if is_json and result is None:
        raise UsageError("--result-json goes with --happened RESULT")
    value = read_json(result, "the result") if is_json and result is not None else plain_text(result)

    async def decide(event_log: SqlLog, run_id: str) -> Decided:
        return await decisions.settle(event_log, run_id, said[0], call, result=value, **_texts(who))

    await _decide(db, run, as_json, decide)


@click.command("questions")
@click.argument("run", required=False)
@click.option("--batch", metavar="NAME", help="Only those of this batch.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most this many.")
@json_option
@db_option
@asynchronous
async def list_questions(db: str, run: str | None, batch: str | None, limit: int, as_json: bool) -> None:
    """List what people are asked, the oldest question first, with the commands that answer it.

    RUN is an id, or the first characters of it.
    """
    if run is not None and batch is not None:
        raise UsageError("give a run or --batch, not both")
    terminal = Terminal()
    async with open_reader(db) as event_log:
        if run is None:
            found = await open_questions(event_log, batch, limit + 1)
        else:
            found = await questions(event_log, (await find_run(event_log, run)).run_id)
    for number, question in enumerate(found[:limit]):
        if as_json:
            terminal.put(json_line(question_json(question)))
            continue
        for text in ([""] if number else []) + question_lines(question, db, whose=True):
            terminal.put(text)
    if not found:
        terminal.say("no questions are open")
    elif len(found) > limit:
        terminal.say(f"(the first {limit}; --limit shows more)")


def _texts(options: dict[str, Any]) -> dict[str, Any]:
    """Options that are kept, as valid Unicode."""
    return {name: plain_text(text) for name, text in options.items()}


async def _decide(db: str, run: str, as_json: bool, decide: Callable[[SqlLog, str], Awaitable[Decided]]) -> None:
    """Record a decision, tell the supervisor, and say what was done."""
    event_log = await open_log(db, create=False)
    try:
        row = await find_run(event_log, run)
        done = await decide(event_log, row.run_id)
        nudge(db)
        idle = await nobody_works(event_log)
    finally:
        await event_log.close()
    question = done.question
    if as_json:
        told = {
            "run_id": question.run_id,
            "tool_call_id": question.tool_call_id,
            "question": question.question,
            "decision": done.decision,
            "by": done.by,
            "arguments": done.arguments,
            "status": done.row.status.value,
            "supervised": not idle,
        }
        Terminal().put(json_line(told))
        return
    said = WORDS[done.decision] + (" with edited arguments" if done.arguments is not None else "")
    which = f"run {line(question.run_id)}, call {line(question.tool_call_id)}"
    Terminal().put(f"{which}: {said} by {line(done.by)}{_then(done.row, db, idle)}")


def _then(row: RunRow, db: str, idle: bool) -> str:
    """What follows from a decision."""
    if row.status is Status.AWAITING_APPROVAL:
        return f"; more is asked: perdure {at_store(db)}questions {row.run_id}"
    if idle:
        return f"; nobody works on this store now: perdure {at_store(db)}resume {row.run_id}"
    return ""
