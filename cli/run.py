"""`run`: launch one run and see it through to its end. `resume` shares how a run is watched and told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any, Final

import click
from pydantic import JsonValue

from ..actors.loading import LoadedAgent
from ..batch.values import parse, plain
from ..client.budgets import cap_after, cap_budget
from ..client.door import Door, is_own, open_door
from ..client.launching import Request, check_agent, check_keys, create
from ..client.outcomes import Outcome, follow, outcome_of
from ..client.questions import Question, questions
from ..store.errors import UsageError
from ..store.log import Create
from ..store.sql import SqlLog, open_log
from ..store.states import Status
from .asked import question_json, waiting_lines
from .events import event_json, event_line
from .exits import exit_of
from .interrupts import Interrupts
from .options import (
    address_option,
    at_store,
    budget_options,
    chosen_caps,
    chosen_limits,
    db_option,
    json_option,
    key_values,
    limit_options,
    model_option,
)
from .terminal import Terminal
from .text import json_line, line, safe

CHECK_S: Final = 2.0


@click.command()
@click.argument("agent")
@click.argument("input", required=False, default="")
@click.option("--input-json", "is_json", is_flag=True, help="INPUT is JSON, not text.")
@click.option(
    "--metadata", multiple=True, metavar="KEY=VALUE", callback=key_values, help="Kept with the run; repeatable."
)
@click.option("--correlation-id", metavar="ID", help="An id of yours, kept with the run.")
@model_option
@limit_options
@budget_options
@address_option
@json_option
@db_option
def run(db: str, agent: str, input: str, is_json: bool, metadata: dict[str, str], as_json: bool, **rest: Any) -> None:
    """Launch one run of AGENT on INPUT, print what happens, and exit with its outcome.

    AGENT is module:name or path/file.py:name. INPUT is text; - reads it from standard input. The run's id and its
    events go to standard error, the final answer to standard output; with --json everything goes to standard output,
    one JSON object a line.

    A run that waits for a person says what is asked and how to answer. It holds no process until then.

    Exit codes: 0 completed, 1 failed, 2 usage, 3 waits for a person, 4 cancelled, 5 timed out, 130 interrupted (the
    run stays resumable).
    """
    value = read_input(input, is_json)
    loaded = check_agent(agent, rest["model"])
    if is_own(db, rest["address"]):
        check_keys(loaded, rest["model"])
    fields = {key: plain(text) for key, text in metadata.items()}
    request = Request(value, budget=rest["budget"], correlation_id=plain_text(rest["correlation_id"]), metadata=fields)
    config = asyncio.run(_config(db, loaded, rest))
    command = create(loaded, request, config)
    sys.exit(asyncio.run(_run(db, command, rest["address"], as_json)))


async def _config(db: str, loaded: LoadedAgent, options: dict[str, Any]) -> dict[str, JsonValue]:
    """The settings that the run keeps; the budget that it is to share has its caps once this returns."""
    name, caps, limits = options["budget"], chosen_caps(options), chosen_limits(options)
    if name is None:
        if caps:
            raise UsageError("--budget-cost and --budget-tokens are about a budget: name it with --budget NAME")
        return loaded.agent.snapshot(options["model"], limits)
    event_log = await open_log(db)
    try:
        cap = await cap_after(event_log, name, caps)
        config = loaded.agent.snapshot(options["model"], limits, priced=cap.cost is not None)
        await cap_budget(event_log, name, caps)
    finally:
        await event_log.close()
    return config


def read_input(text: str, is_json: bool) -> JsonValue:
    """The input that an argument stands for. Raises UsageError."""
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"the input on standard input is not UTF-8: {error}") from error
    if not is_json:
        return plain_text(text)
    return read_json(text, "the input")


def read_json(text: str, what: str) -> JsonValue:
    """The value of a JSON text that a user gave. Raises UsageError."""
    try:
        value: JsonValue = parse(text)
    except ValueError as error:
        raise UsageError(f"{what} is not JSON: {error}") from error
    return value


def read_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object that a user gave, or named the file of as @FILE. Raises UsageError."""
    if text.startswith("@"):
        try:
            with open(text[1:], encoding="utf-8-sig") as file:
                text = file.read()
        except (OSError, ValueError) as error:
            raise UsageError(f"{what} {text}: the file cannot be read: {error}") from error
    value = read_json(text, what)
    if not isinstance(value, dict):
        raise UsageError(f"{what} is not a JSON object: write {{...}} with the names and values")
    return value


def plain_text(text: str | None) -> str | None:
    """An argument as valid Unicode."""
    return None if text is None else str(plain(text))


async def _run(db: str, command: Create, address: str | None, as_json: bool) -> int:
    terminal, interrupts = Terminal(), Interrupts()
    resume = f"perdure {at_store(db)}resume {command.run_id[:12]}"

    async def work() -> tuple[Outcome, list[Question]]:
        async with open_door(db, address, at_hand=interrupts.hold) as door:
            interrupts.say = lambda: terminal.say(f"\ninterrupted; if the run was launched, it is resumable: {resume}")
            await door.create([command])
            interrupts.say = lambda: terminal.say(f"\ninterrupted; the run stays resumable: {resume}")
            terminal.say(f"run {command.run_id}")
            await watched(door, stream(door.log, command.run_id, terminal, as_json))
            return await outcome_and_questions(door.log, command.run_id)

    interrupts.say = lambda: terminal.say("\ninterrupted; nothing was launched")
    with terminal.alone():
        outcome, asked = await interrupts.run(work())
        tell(outcome, asked, terminal, as_json, db)
    return exit_of([outcome.status])


async def stream(event_log: SqlLog, run_id: str, terminal: Terminal, as_json: bool, after: int = 0) -> None:
    """Show the events of a run until it ends or waits for a person."""
    async for stored in follow(event_log, run_id, after):
        if as_json:
            terminal.put(json_line(event_json(run_id, stored)))
        else:
            terminal.say(event_line(stored))


async def outcome_and_questions(event_log: SqlLog, run_id: str) -> tuple[Outcome, list[Question]]:
    """What has become of a run, and what it asks people if it waits for them."""
    outcome = await outcome_of(event_log, run_id)
    return outcome, await questions(event_log, run_id) if outcome.status is Status.AWAITING_APPROVAL else []


def tell(
    outcome: Outcome, asked: Sequence[Question], terminal: Terminal, as_json: bool, db: str, alone: bool = True
) -> None:
    """The outcome of a run: its answer on `out`, anything else on `err`; of one among many a line each."""
    if as_json:
        questions = [question_json(question) for question in asked]
        terminal.put(json_line({"type": "outcome", **asdict(outcome), "questions": questions}))
    elif outcome.status is Status.COMPLETED and not alone:
        terminal.put(f"run {line(outcome.run_id)} completed: {line(outcome.output)}")
    elif outcome.status is Status.COMPLETED:
        terminal.put(safe(outcome.output) if isinstance(outcome.output, str) else json_line(outcome.output))
    elif outcome.status is Status.AWAITING_APPROVAL and alone:
        for text in waiting_lines(outcome.run_id, asked, db):
            terminal.say(text)
    elif outcome.status is Status.AWAITING_APPROVAL:
        terminal.say(f"run {outcome.run_id} waits for a person: perdure {at_store(db)}questions {outcome.run_id}")
    else:
        why = ": ".join(part for part in (outcome.error, outcome.message) if part)
        terminal.say(f"run {outcome.run_id} {outcome.status}{f' ({line(why, None)})' if why else ''}")


async def watched(door: Door, work: Coroutine[Any, Any, None]) -> None:
    """Do work that waits for a supervisor, as long as there is one."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=CHECK_S))[0]:
            await door.check()
        await task
    finally:
        task.cancel()
