"""Agents whose files are rewritten under their runs, on real Ray: parked and interrupted ones, one whose tool runs on.

All runs begin with the code BEFORE and go on with the code AFTER. What each tool did is counted in a ledger outside.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from perdure import Runtime
from perdure.actors.attempt import GRACE_S
from perdure.store.events import CodeChanged, ToolCallUnsettled
from perdure.store.rows import CallRow

from .ray_kit import PATIENCE_S, Bench, Case, kill, quick, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]

COMMON = """
import os, time
from pathlib import Path

from pydantic import BaseModel
from perdure import Agent, Settled, ToolContext, tool


def ledger(ctx):
    return Path(ctx.metadata["dir"], "ledger")


def work(ctx, name, do):
    file = os.open(ledger(ctx), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{name} {ctx.idempotency_key}\\n".encode())
    os.close(file)
    while do == "wait" and not Path(ctx.metadata["dir"], "go").exists():
        time.sleep(0.01)
    return f"{name} in attempt {ctx.attempt}"


def model(request):
    if request.turn_index < len(request.input):
        return {"tool_calls": request.input[request.turn_index]}
    return {"text": request.messages[2]["results"][0]["content"]}


@tool(effect="idempotent_write", num_cpus=0.2, approval="always")
def steady(ctx: ToolContext, do: str) -> str:
    return work(ctx, "steady", do)


@tool(effect="idempotent_write", num_cpus=0.2)
def runs_on(ctx: ToolContext, do: str) -> str:
    return work(ctx, "runs_on", do)
"""
BEFORE = """

class Receipt(BaseModel):
    number: str


@tool(effect="read_only", num_cpus=0.2)
def typed(ctx: ToolContext, do: str) -> Receipt:
    return Receipt(number="r-1")


def tools_of(approval, suffix):
    @tool(effect="idempotent_write", num_cpus=0.2, approval=approval, name="gone" + suffix)
    def gone(ctx: ToolContext, do: str) -> str:
        return work(ctx, "gone", do)

    @tool(effect="non_idempotent", num_cpus=0.2, approval=approval, name="renamed" + suffix)
    def renamed(ctx: ToolContext, do: str) -> str:
        return work(ctx, "renamed", do)

    @tool(effect="idempotent_write", num_cpus=0.2, approval=approval, name="grown" + suffix)
    def grown(ctx: ToolContext, do: str) -> str:
        return work(ctx, "grown", do)

    @tool(effect="idempotent_write", num_cpus=0.2, approval=approval, name="raised" + suffix, timeout_s=6)
    def raised(ctx: ToolContext, do: str) -> str:
        return work(ctx, "raised", do)

    return gone, renamed, grown, raised


tools = (steady, runs_on, typed, *tools_of("always", "_gated"), *tools_of("never", ""))
agent = Agent(name="before", model=model, tools=tools)
"""
AFTER = """

def tools_of(approval, suffix):
    @tool(effect="non_idempotent", num_cpus=0.2, approval=approval, name="renamed_to" + suffix)
    def renamed(ctx: ToolContext, do: str) -> str:
        return work(ctx, "renamed", do)

    @tool(effect="idempotent_write", num_cpus=0.2, approval=approval, name="grown" + suffix)
    def grown(ctx: ToolContext, do: str, currency: str) -> str:
        return work(ctx, "grown", do)

    @tool(effect="non_idempotent", num_cpus=0.2, approval=approval, name="raised" + suffix, settles_after_s=0)
    def raised(ctx: ToolContext, do: str) -> str:
        return work(ctx, "raised", do)

    @raised.reconcile
    def was_raised(ctx: ToolContext, do: str) -> Settled:
        lines = ledger(ctx).read_text()
        return Settled.happened("found in the ledger") if ctx.idempotency_key in lines else Settled.did_not_happen()

    return renamed, grown, raised


agent = Agent(name="after", model=model, tools=(steady, *tools_of("always", "_gated"), *tools_of("never", "")))
"""


class Changing(Case):
    """One run of an agent whose file is rewritten."""

    @classmethod
    async def start(cls, bench: Bench, name: str, *turns: list[str], file: str = "changing", do: str = "") -> Changing:
        folder = bench.folder / name
        folder.mkdir()
        asked: Any = [[{"name": one, "arguments": {"do": do}} for one in turn] for turn in turns]
        run = await bench.runtime.launch(f"{agent_file(bench, file)}:agent", asked, metadata={"dir": str(folder)})
        return cls(bench, folder, run)

    def done(self) -> list[str]:
        """The tools that took effect."""
        path = self.folder / "ledger"
        return sorted(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else []

    async def acting(self, *names: str) -> None:
        async def all_there() -> bool:
            return self.done() == sorted(names)

        await until(all_there, f"{names} at work")

    async def waits(self) -> None:
        assert (await self.outcome()).status == "awaiting_approval"

    async def approve_all(self) -> None:
        for call in await self.calls():
            if call.waits:
                self.run = await self.bench.runtime.approve(self.run.run_id, call.tool_call_id)

    async def calls(self) -> list[CallRow]:
        return await self.bench.runtime.log.calls(self.run.run_id)

    async def told(self) -> dict[str, str]:
        """What the model was told of each call, by tool."""
        names = {call.tool_call_id: call.name for call in await self.calls()}
        return {names[event.tool_call_id]: event.content for event in await self.results()}

    async def changes(self) -> list[CodeChanged]:
        return [stored.event for stored in await self.events() if isinstance(stored.event, CodeChanged)]


def agent_file(bench: Bench, name: str) -> Path:
    return bench.folder / name / "agents.py"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Changing]]:
    """Runs that began before their agent's file was rewritten, and have lost their actors and the journal since."""
    folder: Path = tmp_path_factory.mktemp("changed")
    async with quick(Runtime(folder / "runs.db", actors=4), respawns_max=99) as runtime:
        bench = Bench(runtime, folder)
        for name in ("changing", "unchanged", "running"):
            agent_file(bench, name).parent.mkdir()
            agent_file(bench, name).write_text(COMMON + BEFORE)
        gated = ["gone_gated", "renamed_gated", "grown_gated", "raised_gated", "steady"]
        begun = {
            "parked": await Changing.start(bench, "parked", ["typed"], gated),
            "open": await Changing.start(bench, "open", ["gone", "renamed", "grown"], do="wait"),
            "unchanged": await Changing.start(bench, "unchanged run", ["steady"], file="unchanged"),
        }
        await begun["open"].acting("gone", "renamed", "grown")
        await begun["parked"].waits()
        await begun["unchanged"].waits()
        begun["raised"] = await Changing.start(bench, "raised", ["raised"], do="wait")
        await begun["raised"].acting("raised")
        actors = {(await bench.holder(begun[name].run.run_id))[0] for name in ("open", "raised")}
        agent_file(bench, "changing").write_text(COMMON + AFTER)
        for pid in (*actors, (await bench.lease("journal")).pid):
            kill(pid)
        yield begun


async def test_a_parked_run_goes_on_with_what_it_was_approved_for_or_an_error_result(runs: dict[str, Changing]) -> None:
    run = runs["parked"]
    await run.approve_all()
    outcome = await run.outcome()
    assert (outcome.status, outcome.output) == ("completed", '{"number":"r-1"}'), "a result needs no class to be read"
    assert run.done() == ["raised", "steady"]
    told = await run.told()
    for name in ("gone_gated", "renamed_gated"):
        assert f"'{name}' was removed from the agent" in told[name] and "it has not run" in told[name]
    assert "currency: Field required" in told["grown_gated"] and "it has not run" in told["grown_gated"]
    assert told["raised_gated"] == '"raised in attempt 1"' and told["steady"] == '"steady in attempt 1"'
    assert [mark.tool_call_id for mark in await run.marks()] == ["t1c3"], "the stricter class is marked"
    (change,) = await run.changes()
    assert {one.effect for one in change.raised.values()} == {"non_idempotent"}
    assert "typed" not in change.tools
    await run.check_log()


async def test_interrupted_calls_say_what_is_known_of_them_or_a_person_is_asked(runs: dict[str, Changing]) -> None:
    run = runs["open"]

    async def asked() -> Any:
        return [one.event for one in await run.events() if isinstance(one.event, ToolCallUnsettled)]

    (question,) = await until(asked, "a question")
    assert "'renamed' was removed from the agent" in question.why
    told = await run.told()
    keys = dict(line.split() for line in (run.folder / "ledger").read_text().splitlines())
    assert "was removed" in told["gone"] and keys["gone"] in told["gone"], "it may have run, and with which key"
    assert "currency: Field required" in told["grown"] and keys["grown"] in told["grown"]
    settled = await run.bench.runtime.settle(run.run.run_id, "happened", result="looked up")
    async with asyncio.timeout(PATIENCE_S):
        assert (await settled.outcome()).status == "completed"
    assert json.loads((await run.told())["renamed"]) == "looked up"
    assert run.done() == ["gone", "grown", "renamed"]
    assert len(await run.changes()) == 1
    await run.check_log()


async def test_an_agent_that_is_as_it_was_has_nothing_noted(runs: dict[str, Changing]) -> None:
    run = runs["unchanged"]
    await run.approve_all()
    assert (await run.outcome()).status == "completed"
    assert run.done() == ["steady"]
    assert await run.changes() == []


async def test_a_tool_that_runs_goes_on_when_its_run_does_so_with_other_code(runs: dict[str, Changing]) -> None:
    bench = runs["parked"].bench
    run = await Changing.start(bench, "running run", ["runs_on"], file="running", do="wait")
    await run.acting("runs_on")
    agent_file(bench, "running").write_text(COMMON + AFTER)
    kill((await bench.holder(run.run.run_id))[0])
    await until(run.changes, "the new owner's note")
    run.go()
    assert (await run.outcome()).status == "completed"
    assert (run.done(), await run.told()) == (["runs_on"], {"runs_on": '"runs_on in attempt 1"'})
    await run.check_log()


async def test_a_call_of_a_raised_class_that_may_have_run_is_asked_about_once_it_is_over(
    runs: dict[str, Changing],
) -> None:
    run = runs["raised"]
    assert (await run.outcome()).status == "completed"
    assert (run.done(), await run.told()) == (["raised"], {"raised": '"found in the ledger"'})
    stored = await run.events()
    noted = next(one for one in stored if isinstance(one.event, CodeChanged))
    answered = next(one for one in stored if one.event.type == "tool_result")
    assert answered.at - noted.at >= 6 + GRACE_S, "as long as its first version was given"
    await run.check_log()
