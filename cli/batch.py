"""`batch`: launch an agent on every sample of a data set, or go on with what the same command began."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..batch.dataset import Dataset
from ..batch.drive import Counts, drive, window
from ..batch.plan import Batch, Plan, batch_name, make_plan
from ..batch.results import Report, check_output, replacing, results
from ..client.budgets import cap_after, cap_budget, find_budget
from ..client.door import Size, is_own, open_door
from ..client.launching import check_agent, check_keys
from ..store.sql import SqlLog, open_log
from ..store.states import Status
from .budget import budget_line
from .exits import exit_of
from .interrupts import Interrupts
from .options import (
    actors_option,
    address_option,
    at_store,
    budget_options,
    chosen_caps,
    chosen_limits,
    concurrency_option,
    db_option,
    json_option,
    limit_options,
    model_option,
    without_password,
)
from .progress import ended, shown, words
from .terminal import Terminal
from .text import duration, json_line, line


@click.command()
@click.argument("agent")
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="The batch's name. Default: from the data set's and the agent's.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N samples.")
@click.option("--retry-failed", is_flag=True, help="Try again what failed, was cancelled or timed out.")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the results there, as JSON lines."
)
@concurrency_option
@actors_option
@model_option
@limit_options
@budget_options
@address_option
@json_option
@db_option
def batch(db: str, agent: str, dataset: Path, **options: Any) -> None:
    """Launch AGENT on every sample of DATASET, and report.

    AGENT is module:name or path/file.py:name. DATASET is a file of JSON lines: objects with an `input`, perhaps an
    `id` (a string or a whole number), and anything else as metadata; or plain strings. It is checked to its last
    line before anything is launched.

    The same command again resumes: no sample is launched twice, interrupted runs go on, and so do those whose questions
    were answered; what failed or was cancelled stays as it is without --retry-failed. Limits are those of new runs:
    others keep theirs, which `perdure resume RUN` can raise.

    With --budget-cost or --budget-tokens all runs of the batch share one budget, which has the batch's name if --budget
    gives no other; `perdure budget` shows it. The same command with another cap changes it.

    Results (--output, or --json for standard output) are JSON lines in the order of the data set: id, run_id, status,
    output, error, message, usage.

    Exit codes: 0 all completed, else that of the worst sample: 1 failed, 5 timed out, 4 cancelled, 3 waits for
    a person; 2 usage; 130 interrupted (everything stays resumable).
    """
    loaded = check_agent(agent, options["model"])
    name = batch_name(options["name"] or f"{dataset.stem}-{loaded.agent.name}")
    work = Batch(name, loaded, Dataset(dataset, options["limit"]), options["model"], chosen_limits(options))
    chosen_caps(options)
    if options["output"]:
        check_output(options["output"], dataset)
    sys.exit(asyncio.run(_Command(db, work, options).run()))


class _Command:
    """One `perdure batch`, from the check of its data set to its report."""

    def __init__(self, db: str, batch: Batch, options: dict[str, Any]) -> None:
        self._db, self._batch, self._options = db, batch, options
        self._terminal, self._interrupts = Terminal(), Interrupts()
        self._counts: Counts = {}
        self._plan = Plan()

    async def run(self) -> int:
        """The whole command; its exit code."""
        self._interrupts.say = lambda: self._terminal.say("\ninterrupted; nothing was launched")
        with self._terminal.alone():
            return await self._interrupts.run(self._work())

    async def _work(self) -> int:
        event_log = await open_log(self._db)
        began = time.monotonic()
        try:
            self._batch = await self._with_budget(event_log)
            plan = self._plan = await make_plan(event_log, self._batch, self._options["retry_failed"])
            self._counts = plan.counts
            done = ended(plan.counts) - plan.again
            if done < plan.total and is_own(self._db, self._options["address"]):
                check_keys(self._batch.loaded, self._batch.model)
            self._introduce(plan, done)
            if done < plan.total:
                await event_log.close()
                event_log = await self._drive(plan)
            return await self._report(event_log, ended(self._counts) - done, time.monotonic() - began)
        finally:
            await event_log.close()

    async def _with_budget(self, event_log: SqlLog) -> Batch:
        """The batch with the budget that its runs share, if they share one; that has its caps then."""
        batch, caps = self._batch, chosen_caps(self._options)
        name = self._options["budget"] or (batch.name if caps or await event_log.budgets(batch.name) else None)
        if name is None:
            return batch
        cap = await cap_after(event_log, name, caps)
        batch = replace(batch, budget=name, priced=cap.cost is not None)
        assert batch.config, "the prices are looked up before anything is changed"
        await cap_budget(event_log, name, caps)
        return batch

    def _introduce(self, plan: Plan, done: int) -> None:
        name = f"batch {self._batch.name!r}: {plan.total} samples"
        waiting = plan.counts.get(Status.AWAITING_APPROVAL, 0)
        parts = [
            f"{done - waiting} done" if done > waiting else "",
            f"{waiting} waiting for a person" if waiting else "",
        ]
        parts += [f"{plan.new} new" if done or plan.new < plan.total else ""]
        parts += [f"{plan.again} tried again" if plan.again else ""]
        live = plan.total - done - plan.new - plan.again
        parts += [f"{live} interrupted" if live else ""]
        self._terminal.say(", ".join([name, *filter(None, parts)]))
        if plan.other_code:
            self._terminal.say(f"note: the agent's code has changed since {plan.other_code} of these were launched")

    async def _drive(self, plan: Plan) -> SqlLog:
        """Have the batch done; a fresh connection to read the results from."""
        self._interrupts.say = self._farewell
        size = Size(self._options["actors"], self._options["concurrency"])
        async with open_door(self._db, self._options["address"], size, self._interrupts.hold) as door:
            with shown(self._terminal, plan.total) as progress:

                def note(counts: Counts) -> None:
                    self._counts = counts
                    progress(counts)

                await drive(door, self._batch, plan, window(size.concurrency), note)
        return await open_log(self._db, read_only=True)

    def _farewell(self) -> None:
        done, total = ended(self._counts), self._plan.total
        again = without_password(shlex.join(["perdure", *sys.argv[1:]]))
        self._terminal.say(f"\ninterrupted with {done} of {total} done; the rest stays resumable: {line(again, None)}")

    async def _report(self, event_log: SqlLog, ended_now: int, wall_s: float) -> int:
        report, output = Report(), self._options["output"]
        with replacing(output) if output else contextlib.nullcontext() as file:
            async for result in results(event_log, self._batch, report):
                if file or self._options["as_json"]:
                    text = json_line(result)
                    if file:
                        file.write(text + "\n")
                    if self._options["as_json"]:
                        self._terminal.put(text)
        self._say_failures(report)
        if missing := self._plan.total - report.statuses.total():
            options = sys.argv[1:] if self._options["retry_failed"] else [*sys.argv[1:], "--retry-failed"]
            again = line(without_password(shlex.join(["perdure", *options])), None)
            self._terminal.say(f"{missing} were not launched, as they would have failed likewise; to go on: {again}")
        if waiting := report.statuses[Status.AWAITING_APPROVAL]:
            questions = f"perdure {at_store(self._db)}questions --batch {shlex.quote(self._batch.name)}"
            wait = "waits" if waiting == 1 else "wait"
            self._terminal.say(f"{waiting} {wait} for a person; what is asked, and how to answer: {questions}")
        usage = ", ".join(f"{count} {kind.removesuffix('_tokens')}" for kind, count in report.usage if count)
        speed = f"{ended_now} runs in {duration(wall_s)}, {ended_now / wall_s:.1f} runs/s"
        say = self._terminal.say if self._options["as_json"] else self._terminal.put
        codes = ", ".join(f"{count} {code}" for code, count in report.errors.most_common())
        why = f" (failed: {codes})" if codes else ""
        say(f"{words(dict(report.statuses))}{why}; {speed}; tokens: {usage or '0'}")
        if self._batch.budget is not None:
            say(budget_line(await find_budget(event_log, self._batch.budget)))
        return exit_of(report.statuses)

    def _say_failures(self, report: Report) -> None:
        for sample_id, outcome in report.failures:
            self._terminal.say(f"failed  {line(sample_id, 60)}: {outcome.error}: {line(outcome.message or '')}")
        if report.errors.total() > len(report.failures):
            more = f"perdure {at_store(self._db)}list --status failed --batch {shlex.quote(self._batch.name)}"
            self._terminal.say(f"{report.errors.total()} failed in all: {more}")
