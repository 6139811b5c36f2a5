"""`drill`: kill an agent's run at every point, and report what became of its effects."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
from pydantic import JsonValue

from ..actors.loading import LoadedAgent, load_agent
from ..actors.model import scripted
from ..batch.values import plain
from ..drill.advice import advice
from ..drill.drill import Drill
from ..drill.life import Part
from ..drill.script import replies, write_script
from ..drill.verdict import Verdict
from ..store.errors import UsageError
from ..store.events import RunCreated
from ..store.states import Status
from .drill_report import DrillReport
from .exits import Exit
from .find import find_run
from .interrupts import SIGNALS
from .options import db_option, json_option, key_values
from .progress import shown
from .read import open_reader
from .run import read_input
from .terminal import Terminal
from .text import json_line


@click.command()
@click.argument("agent")
@click.argument("input", required=False)
@click.option("--input-json", "is_json", is_flag=True, help="INPUT is JSON, not text.")
@click.option(
    "--metadata", multiple=True, metavar="KEY=VALUE", callback=key_values, help="Kept with each run; repeatable."
)
@click.option(
    "--script", type=click.Path(path_type=Path), metavar="FILE", help="The model's answers: JSON lines, one a turn."
)
@click.option("--from", "source", metavar="RUN", help="The model's answers, and the input, of this stored run.")
@click.option(
    "--ledger", type=click.Path(path_type=Path), metavar="FILE", help="A file that gets a line with each effect."
)
@click.option(
    "--decide",
    type=click.Choice(["approve", "reject"]),
    default="approve",
    show_default=True,
    help="The answer to calls that need an approval.",
)
@click.option("--wait", is_flag=True, help="Wait settling times out instead of skipping them.")
@click.option("--yes", is_flag=True, help="Do not ask before non_idempotent tools are run.")
@json_option
@db_option
def drill(db: str, agent: str, as_json: bool, **options: Any) -> None:
    """Kill a run of AGENT at every point, and report what became of its effects.

    AGENT is module:name or path/file.py:name. It is run on INPUT with a scripted model: --script, the answers of a
    stored run (--from, of the store --db), or the agent's own model if that is a script. First it is run twice
    undisturbed; what differs between those two varies by itself and is not compared later. Then it is run once for
    each crash point: before and after every append to its log, before and after the handler of every call, and before
    each line of a handler's file that it comes to. There the whole run is killed with SIGKILL, or around handlers
    also the tool's process alone; a new process goes on from the store until the run ends. No Ray is started.

    THE HANDLERS OF YOUR TOOLS RUN FOR REAL, some tens of times: point them at a test account or a folder of scraps.
    With a non_idempotent tool you are asked first. Calls that need an approval are approved, or rejected with --decide
    reject. Where a call ends in the question whether it happened, the drill answers from its own record of what the
    handlers did, and gives up on one that was killed inside. Settling times are skipped and told: against a service
    where a killed tool's request may still land, give --wait.

    An effect counts as doubled when a non_idempotent handler returned twice, or ran again without word that the attempt
    before did not happen; when an idempotent_write got two keys; and when --ledger FILE got more lines than
    undisturbed, which also shows tools of a wrong effect class.

    Exit codes: 0 all is well, 1 an effect was doubled or a run ended differently without a question, 2 usage.
    """
    with Drill() as work:  # before the agent is loaded here
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)
        loaded = load_agent(agent)
        if loaded.agent.servers:
            raise UsageError("a drill kills tools in their handlers, and an MCP server has none here: leave it out")
        part = _part(agent, loaded, db, work.folder / "script", options)
        _ask_leave(loaded, options["yes"])
        sys.exit(_run(work, part, loaded, as_json))


def _part(agent: str, loaded: LoadedAgent, db: str, script: Path, options: dict[str, Any]) -> Part:
    """What is to be run. A stored run's answers are written to `script`. Raises UsageError."""
    given, source, model = options["script"], options["source"], loaded.agent.model
    value: JsonValue = None
    metadata: dict[str, JsonValue] = {}
    if source and given:
        raise UsageError("--script and --from both say what the model answers: give one of them")
    if source:
        value, metadata = asyncio.run(_recorded(db, source, script))
    elif given:
        script = given.resolve()
    elif isinstance(model, str) and model.startswith("script:"):
        script = loaded.folder / model.removeprefix("script:")
    else:
        raise UsageError("the agent's model is no script: give its answers with --script FILE or --from RUN")
    scripted(script)
    if options["input"] is not None:
        value = read_input(options["input"], options["is_json"])
    elif not source:
        raise UsageError("no INPUT: give one, or --from RUN")
    metadata |= {key: plain(text) for key, text in options["metadata"].items()}
    return Part(agent, script, value, metadata, options["ledger"], options["decide"], options["wait"])


async def _recorded(db: str, run: str, script: Path) -> tuple[JsonValue, dict[str, JsonValue]]:
    """Write a stored run's answers as a script; its input and metadata."""
    async with open_reader(db) as event_log:
        row = await find_run(event_log, run)
        stored = await event_log.read(row.run_id)
    turns, created = replies(stored), stored[0].event
    if not turns or not isinstance(created, RunCreated):
        raise UsageError(f"run {row.run_id} has no answer of a model yet")
    write_script(script, turns)
    return created.input, dict(created.metadata)


def _ask_leave(loaded: LoadedAgent, yes: bool) -> None:
    """Raises UsageError when leave is needed and nobody can be asked."""
    names = ", ".join(tool.name for tool in loaded.agent.offered if tool.options.effect == "non_idempotent")
    if not names or yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{names} would run for real, once or more per crash point: give --yes if that may be")
    if not click.confirm(f"{names} will run for real, once or more per crash point. Go on?", err=True):
        sys.exit(Exit.INTERRUPTED)


def _run(work: Drill, part: Part, loaded: LoadedAgent, as_json: bool) -> int:
    """The drill and its report. Returns the exit code."""
    terminal, tools = Terminal(), loaded.agent.offered
    points = work.rehearse(part, max((tool.options.timeout_s for tool in tools), default=0.0))
    terminal.say(f"{len(points)} crash points")
    verdicts: list[Verdict] = []
    statuses: Counter[Status] = Counter()
    with shown(terminal, len(points)) as progress:
        for point in points:
            verdicts.append(work.strike(point))
            statuses[Status.FAILED if verdicts[-1].bad else Status.COMPLETED] += 1
            progress(statuses)
    called = {request.name for request in work.clean.calls.values()}
    advised = list(advice(tools, called, verdicts, part.effects is not None))
    report = DrillReport(verdicts, work.varying, advised)
    for text in map(json_line, report.objects()) if as_json else report.lines():
        terminal.put(text)
    return Exit.FAILED if any(verdict.bad for verdict in verdicts) else Exit.COMPLETED
