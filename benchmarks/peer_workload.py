"""The peers' workload on perdure: same options, same measures, same one JSON line as the peers' own scripts.

    PEERS_BENCH=.../peers python benchmarks/peer_workload.py --measure throughput --concurrency 16

PEERS_BENCH names the folder of the peers' harness (its common.py); the tool is non_idempotent with a probe, so
every effect has a durable start mark.

--opt actors=N        run actors (default: one for each live run)
--opt kill=KIND       recovery: what gets SIGKILL at once: actor (default), tool, journal, supervisor, or all
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

if "PEERS_BENCH" not in os.environ:
    sys.exit("peer_workload: set PEERS_BENCH to the folder of the peers' harness (the one with common.py)")
sys.path.insert(0, os.environ["PEERS_BENCH"])
import common  # type: ignore[import-not-found]

from perdure import Runtime
from perdure.benchmarks.processes import TITLES, processes
from perdure.client.launching import Request, check_agent

AGENT = f"{Path(__file__).resolve().with_name('peer_agent.py')}:agent"


class Victims:
    """What the recovery measure kills, in the form of a Popen."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds
        self.pid = 0

    def poll(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        victims = processes(*self._kinds)
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        print(f"killed {len(victims)} processes: {self._kinds}", file=sys.stderr)

    def wait(self, timeout: float | None = None) -> int:
        return 0

    terminate = kill = poll


class Perdure(common.Peer):  # type: ignore[misc]
    """perdure on a local Ray cluster and one SQLite file."""

    name = "perdure"
    stores = ("sqlite",)
    automatic_recovery = "the supervisor claims the runs of dead actors; Ray restarts journal and supervisor"

    def __init__(self, a: Any) -> None:
        super().__init__(a)
        self.runtime: Runtime
        self._waiting: set[asyncio.Task[None]] = set()
        self._portal: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        actors = int(common.opt(self.a, "actors") or min(self.a.concurrency, 16))
        self.runtime = Runtime(f"{self.a.workdir}/runs.db", actors=actors, concurrency=max(self.a.concurrency, actors))
        await self.runtime.__aenter__()
        self.loaded = check_agent(AGENT)
        await self.runtime.warm(self.loaded, actors + 1)  # with the spare one
        while (await self.runtime.status())["warm"] < actors + 1:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.1)

    def request(self, run_id: str) -> Request:
        a = self.a
        about = {"turns": a.turns, "tools": a.tools, "model_ms": a.model_ms, "workdir": a.workdir}
        return Request(run_id, run_id=run_id, metadata=about)

    async def run_one(self, run_id: str) -> Any:
        run = (await self.runtime.launch_many(self.loaded, [self.request(run_id)]))[0]
        outcome = await run.outcome()
        common.mark_done(self.a.workdir, run_id)
        return outcome.output

    async def stop(self) -> None:
        await self.runtime.__aexit__(None, None, None)

    def durability(self) -> str:
        return "SQLite WAL, synchronous=FULL, group commit; every effect has a durable start mark"

    def versions(self) -> dict[str, str]:
        return {"perdure": version("perdure"), "ray": version("ray")}

    # -- recovery: the cluster stands, one kind of process is killed and comes back by itself ---------------

    def servers_up(self) -> None:
        self._portal = asyncio.new_event_loop()
        threading.Thread(target=self._portal.run_forever, daemon=True).start()
        self._call(self.start())

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._portal
        return asyncio.run_coroutine_threadsafe(work, self._portal).result(90)

    def spawn_worker(self, phase: str) -> Victims:
        kind = common.opt(self.a, "kill") or "actor"
        return Victims(list(TITLES) if kind == "all" else [kind]) if phase == "first" else Victims([])

    async def submit(self, ids: Sequence[str]) -> None:
        async def launch() -> None:
            for run in await self.runtime.launch_many(self.loaded, [self.request(run_id) for run_id in ids]):
                self._waiting.add(asyncio.create_task(self._done(run)))

        await asyncio.to_thread(self._call, launch())

    async def _done(self, run: Any) -> None:
        outcome = await run.outcome()
        if outcome.output == common.final_text(run.run_id):
            common.mark_done(self.a.workdir, run.run_id)

    async def verify(self, ids: Sequence[str]) -> dict[str, Any]:
        async def counts() -> dict[str, int]:
            return {str(status): count for status, count in (await self.runtime.log.counts()).items()}

        return {"own_status": await asyncio.to_thread(self._call, counts())}

    def servers_down(self) -> None:
        self._call(self.stop())


if __name__ == "__main__":
    common.kill9 = lambda p: p.send_signal(signal.SIGKILL)
    common.stop = lambda p: None  # the processes that it would stop belong to the cluster
    common.main(Perdure)
