"""Two raylets on one machine: one is killed while it holds half of the run actors and of the tools."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil
import pytest
import pytest_asyncio

from perdure import Runtime
from perdure.client.cluster import prepare_environment

from .ray_kit import Bench, Case, kill, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

READ, PUT = [("read", "wait,act")], [("put", "wait,act")]
UNSENT, SENT = [("send", "wait,act")], [("send", "act,wait")]
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
"""Tools take 0.2 CPUs, and Ray fills the node of the journal by half before it uses another: five tools."""


class Nodes:
    """A cluster of this test's own, and what it does to a node."""

    def __init__(self) -> None:
        prepare_environment()
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
        from ray.cluster_utils import Cluster

        ensure_token_if_auth_enabled(create_token_if_missing=True)
        start: Any = Cluster  # in part untyped
        self.cluster = start(initialize_head=True, head_node_args=NODE)
        self.head: str = self.cluster.head_node.node_id
        self.second = self.add()

    def add(self) -> Any:
        return self.cluster.add_node(**NODE)

    @staticmethod
    def raylet(node: Any) -> Any:
        """The process object of a node's raylet."""
        return node.all_processes["raylet"][0].process

    async def kill(self, node: Any) -> None:
        """kill -9 of a raylet, and its burial: as long as it is a zombie its workers take it for alive."""
        raylet = self.raylet(node)
        kill(raylet.pid)

        async def buried() -> bool:
            return raylet.poll() is not None

        await until(buried, "the end of the raylet")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="n", dir="/tmp")  # short: sockets have short names
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        nodes = Nodes()
        yield nodes
        nodes.cluster.shutdown()
    rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("nodes")
    runtime = Runtime(folder / "runs.db", address=nodes.cluster.address, actors=6, concurrency=17)
    async with runtime:
        yield Bench(runtime, folder)


async def drivers(bench: Bench) -> dict[str, str]:
    """The node of the actor that drives each run, as the actors say it."""
    import ray

    found: dict[str, str] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == bench.runtime.settings.namespace and entry["name"].startswith("run-"):
            try:
                actor = ray.get_actor(entry["name"], entry["namespace"])
                async with asyncio.timeout(2):
                    *_, node = await actor.ping.remote()
                found |= {run_id: node for run_id, _ in await actor.held.remote()}
            except (ValueError, TimeoutError, ray.exceptions.RayError):
                continue  # it is gone, or its node is
    return found


async def driven(bench: Bench, cases: list[Case]) -> dict[str, str]:
    """The same, once all these runs are driven."""

    async def all_of_them() -> dict[str, str] | None:
        found = await drivers(bench)
        return found if {case.run.run_id for case in cases} <= found.keys() else None

    found: dict[str, str] = await until(all_of_them, "an actor for each run")
    return found


async def settled_down(bench: Bench) -> None:
    """A first run is over, and so are the tasks that start workers ahead of need: they would take up the nodes' CPUs,
    and with them the places of the tools that come next."""
    import ray

    assert (await (await bench.start([("put", "act")])).outcome()).status == "completed"

    async def idle() -> bool:
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return free.get("CPU") == 2.0 * int(NODE["num_cpus"])

    await until(idle, "all CPUs free")


async def test_the_runs_of_a_lost_node_go_on_elsewhere_and_nothing_is_done_twice(nodes: Nodes, bench: Bench) -> None:
    await settled_down(bench)
    tools: list[tuple[list[tuple[str, str]], Case]] = []
    for _ in range(2):
        five = [(turn, await bench.start(turn)) for turn in (READ, PUT, UNSENT, SENT, UNSENT)]
        for _, case in five:
            await case.begun()
        tools += five
    thinking = [await bench.start("hold") for _ in range(4)]
    between = [await bench.start([("put", "act")], "hold") for _ in range(3)]
    for case in between:
        await case.acted()
    live = [case for _, case in tools] + thinking + between
    queued = [await bench.start([("put", "act")]) for _ in range(3)]
    before = await driven(bench, live)
    lost = {run_id for run_id, node in before.items() if node == nodes.second.node_id}
    assert 5 <= len(lost) <= 12, "the runs were not spread over the nodes"
    raylet = nodes.raylet(nodes.second).pid
    away = [(turn, case) for turn, case in tools if psutil.Process((await case.begun()).pid).ppid() == raylet]
    here = [(turn, case) for turn, case in tools if (turn, case) not in away]
    for kind in (READ, PUT, UNSENT, SENT):
        assert kind in [turn for turn, _ in away] and kind in [turn for turn, _ in here], "the tools were not spread"
    old = [(await case.begun()).pid for _, case in away]

    await nodes.kill(nodes.second)
    for turn, case in away:
        if turn != SENT:
            await case.begun(2)
    settled = [case for turn, case in away if turn == SENT]  # the probe's answer was all that these waited for
    after = await driven(bench, [case for case in live if case.run.run_id in lost and case not in settled])
    assert set(after.values()) == {nodes.head}

    async def gone() -> bool:
        return not any(psutil.pid_exists(pid) for pid in old)

    await until(gone, "the end of the lost node's tools")
    for case in live:
        case.go()
    for case in live + queued:
        assert (await case.outcome()).status == "completed"
        await case.check_log()
    await check_effects(here, away)
    for case in thinking + between + queued:
        assert len(case.ledger("begin")) == len(case.ledger())
    await check_claims(live + queued, lost, settled + queued)


async def check_effects(here: list[tuple[Any, Case]], away: list[tuple[Any, Case]]) -> None:
    """Tools on the living node were adopted; those on the lost one were done again, or found to be done."""
    for _, case in here:
        assert len(case.ledger("begin")) == len(case.ledger()) == 1
        assert "tool_call_retried" not in await case.kinds()
    for turn, case in away:
        attempts = [line.attempt for line in case.ledger("begin")]
        if turn == SENT:
            assert (attempts, [result.source for result in await case.results()]) == ([1], ["probe"])
        else:
            assert attempts == [1, 2]
        assert len({line.key for line in case.ledger("begin")}) == 1
        assert [line.attempt for line in case.ledger()] == attempts[-1:]


async def check_claims(cases: list[Case], lost: set[str], either: list[Case]) -> None:
    """Each run was claimed once, and once more if its node was lost, which is not charged to it.

    An actor outlives its raylet for up to a second. A run that waited only for a probe may end within it, and a
    queued one that takes its place may be given to an actor there.
    """
    for case in cases:
        claims = [stored.event for stored in await case.events() if stored.event.type == "run_claimed"]
        once, twice = ["start"], ["start", "node_lost"]
        allowed = [once, twice] if case in either else [twice if case.run.run_id in lost else once]
        assert [claim.reason for claim in claims] in allowed
        assert not any(claim.charged for claim in claims)


async def test_a_node_that_joins_later_gets_actors(nodes: Nodes, bench: Bench) -> None:
    third = nodes.add()
    cases = [await bench.start("hold") for _ in range(2)]
    await driven(bench, cases)
    for case in cases:
        pid, _ = await bench.holder(case.run.run_id)
        kill(pid)

    async def there() -> bool:
        more = await bench.start("hold")
        cases.append(more)
        found = await driven(bench, cases)
        return third.node_id in found.values()

    await until(there, "a run on the node that joined")
    for case in cases:
        case.go()
    for case in cases:
        assert (await case.outcome()).status == "completed"
        await case.check_log()
