"""The proof that no process of a cancelled run is left: who looks, what is ended, and what is recorded of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from perdure.actors.children import Named
from perdure.actors.proof import LOOKS_MAX, Looked, Proofs, found_of
from perdure.cli.certified import certificate_json, process_lines
from perdure.client.cancel import certificate, certified
from perdure.store.errors import PerdureError
from perdure.store.events import (
    CancelRequested,
    Event,
    Machine,
    ProcessesChecked,
    RunCancelled,
    Stored,
    ToolCallRetried,
    TurnStarted,
)
from perdure.store.log import Cancel, Command
from perdure.store.states import Status

from .fakes import RUN, NoProcesses, accepted, created, held, until
from .gate_kit import LOOK, Office, paying
from .machine_kit import CLAIMED, answer, marked, requested, result
from .shapes import asks, says

MINE, OTHER = f"store.{RUN}.t0c0.1", "store.another.t0c0.1"
GONE = "store could not be read"


class Hosts(NoProcesses):
    """Two machines with processes, some of which resist."""

    def __init__(self, *found: tuple[str, Named], resist: bool = False) -> None:
        self.found, self.resist = [*found], resist
        self.looks = 0
        self.ended: list[tuple[str, Sequence[Named]]] = []
        self.may_look = asyncio.Event()
        self.may_look.set()

    async def look(self, store: str, everywhere: bool = True) -> list[Looked]:
        assert (store, everywhere) == ("store", True)
        self.looks += 1
        await self.may_look.wait()
        return [Looked("a", ("n1", "n2"), ()), Looked("b", ("n3",), tuple(self.found))]

    async def end(self, node: str, processes: Sequence[Named]) -> None:
        self.ended.append((node, processes))
        if not self.resist:
            self.found = [(mark, each) for mark, each in self.found if each not in processes]


class Parked(Office):
    """A run that is cancelled while it waits for a person: it is over at once, and nobody has looked."""

    def __init__(self) -> None:
        super().__init__([asks("pay"), says("done")], paying())

    async def cancelled(self) -> Parked:
        assert await self.drive() == "awaiting_approval"
        await accepted(self.log, Cancel(RUN, CancelRequested(by="ann")))
        return self

    def proofs(self, hosts: Hosts) -> Proofs:
        async def submit(command: Command) -> Any:
            return await accepted(self.log, command)

        return Proofs(self.log, submit, hosts, "store")


async def test_what_is_found_is_ended_by_name_and_the_record_says_that_nothing_is_left() -> None:
    case = await Parked().cancelled()
    hosts = Hosts((MINE, (7, 1.0)), (OTHER, (8, 1.0)))
    proofs = case.proofs(hosts)
    assert await proofs.owed(case.clock.now) == [RUN]
    await proofs.prove(RUN)
    assert hosts.ended == [("n3", [(7, 1.0)])], "not the other run's"
    (event,) = await case.events(ProcessesChecked)
    assert (event.asked, event.machines, event.gone) == (2, (), ())
    assert await proofs.owed(case.clock.now) == []
    await proofs.prove(RUN)
    assert len(await case.events(ProcessesChecked)) == 1
    await case.check()


async def test_what_resists_is_recorded_and_told() -> None:
    case = await Parked().cancelled()
    hosts = Hosts((MINE, (7, 1.0)), resist=True)
    await case.proofs(hosts).prove(RUN)
    assert hosts.looks == LOOKS_MAX
    (event,) = await case.events(ProcessesChecked)
    assert event.machines == (Machine(host="b", nodes=(), left=(7,)),)
    told = await certificate(case.log, RUN)
    processes = certificate_json(told)["processes"]
    assert processes["machines"] == [{"host": "b", "nodes": [], "left": [7]}]
    assert process_lines(replace(told, may_have_begun=True))[1] == "  left on b: 7"


async def test_a_run_that_was_resumed_meanwhile_is_left_alone() -> None:
    case = await Parked().cancelled()
    hosts = Hosts((MINE, (7, 1.0)))
    hosts.may_look.clear()
    proving = asyncio.create_task(case.proofs(hosts).prove(RUN))
    await until(lambda: hosts.looks == 1)
    await case.resume()
    hosts.may_look.set()
    await held(proving)
    assert (hosts.ended, await case.events(ProcessesChecked)) == ([], [])


async def test_a_look_that_failed_is_owed_still() -> None:
    class Unreachable(Hosts):
        async def look(self, store: str, everywhere: bool = True) -> list[Looked]:
            raise PerdureError(GONE)

    case = await Parked().cancelled()
    proofs = case.proofs(Unreachable())
    await proofs.prove(RUN)
    assert await proofs.owed(case.clock.now) == [RUN]
    assert (await certificate(case.log, RUN)).checked is None


async def test_those_who_ask_before_a_look_has_begun_share_it_and_those_who_ask_later_do_not() -> None:
    case = await Parked().cancelled()
    hosts = Hosts()
    hosts.may_look.clear()
    proofs = case.proofs(hosts)
    looks = [asyncio.create_task(proofs.look(RUN)) for _ in range(3)]
    await until(lambda: hosts.looks == 1)
    looks += [asyncio.create_task(proofs.look(RUN)) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    hosts.may_look.set()
    await held(asyncio.gather(*looks))
    assert hosts.looks == 2


async def test_the_sweep_of_a_journal_pays_what_is_owed() -> None:
    case = await Parked().cancelled()
    case.new_journal()
    await case.journal.sweep()
    await until(lambda: not case.journal._endings)
    assert len(await case.events(ProcessesChecked)) == 1
    row = await case.row()
    assert (row.status, row.due_at) == (Status.CANCELLED, None)
    await case.check()


async def test_a_driven_run_has_its_record_in_the_append_that_ends_it() -> None:
    case = Office([asks("look"), says("done")], LOOK)
    case.tools.holding["look"] = asyncio.Event()
    driving = await case.start()
    await until(lambda: bool(case.tools.works))
    await accepted(case.log, Cancel(RUN, CancelRequested(by="ann")))
    case.tools.holding["look"].set()
    assert (await held(driving)).status == "cancelled"
    kinds = [stored.event.type for stored in await case.log.read(RUN)]
    assert kinds[-2:] == ["run_cancelled", "processes_checked"]
    assert (await case.row()).due_at is None
    await case.check()


# -- what is recorded ---------------------------------------------------------------------------------------


def test_machines_of_attempts_are_named_and_so_are_nodes_that_are_gone() -> None:
    events: list[Event] = [
        created(),
        CLAIMED,
        TurnStarted(turn_index=0),
        answer(),
        requested(),
        marked().model_copy(update={"node": "n2"}),
        ToolCallRetried(tool_call_id="t0c0", attempt=2, reason="its node was lost", node="n9"),
        result().model_copy(update={"node": "n2"}),
    ]
    stored = [Stored(number, 0.0, 1, event) for number, event in enumerate(events, 1)]
    event = found_of(stored, [Looked("a", ("n1", "n2"), ()), Looked("b", ("n3",), ())], f"store.{RUN}")
    assert event.machines == (Machine(host="a", nodes=("n2",)),)
    assert (event.asked, event.gone) == (2, ("n9",))
    ends: list[Event] = [CancelRequested(by="ann"), RunCancelled(reason="r"), event]
    after = [Stored(number, 0.0, 1, end) for number, end in enumerate(ends, len(stored) + 1)]
    first, gone = process_lines(certified([*stored, *after]))
    assert first.startswith("processes: 0 left, looked for on 2 machines, a among them at ")
    assert gone == "  not asked, since it is gone: node n9, where an attempt ran"


async def test_a_run_of_which_no_call_had_begun_can_have_no_process() -> None:
    case = await Parked().cancelled()
    assert process_lines(await certificate(case.log, RUN)) == ["processes: none, no tool call of it has begun"]
