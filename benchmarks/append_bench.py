"""How many events a second become durable, and whether that depends on the length of a run.

Two measurements. (a) Many producers append turns through one GroupWriter, each waiting for its acknowledgement; beside
it, in the same run, the floor: the same rows, in groups of the same size, with nothing but sqlite3. (b) One run grows;
appends at its start and at its end are compared, and then it is read back and decoded.

    python benchmarks/append_bench.py --producers 64 --turns 60
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from perdure.store.events import (
    AgentRef,
    AssistantMessage,
    Event,
    RunCreated,
    ToolCallRequested,
    ToolResult,
    TurnStarted,
    Usage,
)
from perdure.store.log import Accepted, Append, Claim, Command, Create, Result, Verdict
from perdure.store.rows import Lease
from perdure.store.sql import SqlLog, open_log
from perdure.store.writer import GroupWriter

TEXT = "I will look the order up first and then decide whether a refund is due. " * 3
CONTENT = json.dumps({"order": "A-1009", "status": "delivered", "lines": [{"sku": "x" * 12, "qty": 1}] * 4})
LEASE = Lease("supervisor", "bench", "node", "boot", 1, 0.0, 4e9)


def turn(index: int, calls: int = 1) -> tuple[Event, ...]:
    """What a run actor sends for one turn."""
    usage = Usage(input_tokens=900 + index, output_tokens=120)
    message = AssistantMessage(turn_index=index, text=TEXT, stop_reason="tool_use", usage=usage)
    return TurnStarted(turn_index=index), message, *(_request(index, number) for number in range(calls))


def _request(index: int, number: int) -> ToolCallRequested:
    return ToolCallRequested(
        turn_index=index,
        tool_call_id=f"t{index}-{number}",
        provider_id=f"call_{number}",
        name="find_order",
        arguments='{"order_id":"A-1009"}',
        effect="read_only",
        idempotency_key=f"{index:064x}",
    )


def result(index: int, number: int = 0) -> ToolResult:
    """What a tool's task reports."""
    return ToolResult(tool_call_id=f"t{index}-{number}", attempt=1, content=CONTENT)


class Counting:
    """The log's commits, with the number of events that each made durable."""

    def __init__(self, log: SqlLog) -> None:
        self.log, self.sizes, self.commands = log, list[int](), list[int]()

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        verdicts = await self.log.commit(commands)
        self.sizes.append(sum(len(verdict.events) for verdict in verdicts if isinstance(verdict, Accepted)))
        self.commands.append(len(commands))
        return verdicts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


async def start(log: SqlLog, run_ids: Sequence[str]) -> None:
    """Runs that are claimed, with two events each."""
    await log.take_lease(LEASE, None)
    created = RunCreated(agent=AgentRef(ref="bench:agent", digest="0" * 64), input="Where is my order?")
    await log.commit([Create(run_id, created) for run_id in run_ids])
    await log.commit([Claim(run_id, f"claim-{run_id}", LEASE.nonce, 0) for run_id in run_ids])


Turn = tuple[tuple[Event, ...], ToolResult]


async def producer(writer: GroupWriter, run_id: str, turns: Sequence[Turn], waits_s: list[float]) -> None:
    """One run's life; every append is waited for."""
    seq = 2
    for events, reported in turns:
        for command in (Append(run_id, 1, seq, events), Result(run_id, reported)):
            began = time.perf_counter()
            accepted = await writer.submit(command)
            waits_s.append(time.perf_counter() - began)
            seq = accepted.row.seq


async def throughput(folder: Path, producers: int, turns: int) -> dict[str, float]:
    """Measurement (a)."""
    log = await open_log(folder / "bench.db")
    counting, waits_s = Counting(log), list[float]()
    run_ids = [f"{number:032x}" for number in range(producers)]
    await start(log, run_ids)
    writer = GroupWriter(counting)
    # made before the clock starts: in real life other processes make them
    lives = {run_id: [(turn(index), result(index)) for index in range(turns)] for run_id in run_ids}
    began, began_cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for run_id, life in lives.items():
            group.create_task(producer(writer, run_id, life, waits_s))
    took_s, took_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    await writer.close()
    await log.close()
    appended = sum(counting.sizes)
    floor = floor_events_s(folder, counting.sizes)
    cuts = quantiles(waits_s, n=100)
    return {
        "events": appended,
        "events_s": appended / took_s,
        "events_cpu_s": appended / took_cpu_s,  # per second of processor time: what other load does not change
        "appends_s": len(waits_s) / took_s,
        "p50_ms": cuts[49] * 1e3,
        "p99_ms": cuts[98] * 1e3,
        "group_commands": mean(counting.commands),
        "group_events": mean(counting.sizes),
        "floor_events_s": floor,
        "ratio": appended / took_s / floor,
    }


def floor_events_s(folder: Path, sizes: Sequence[int]) -> float:
    """Rows of the same bytes in groups of the same sizes, straight into a table of the same shape."""
    source = sqlite3.connect(folder / "bench.db")
    rows = iter(source.execute("SELECT * FROM events WHERE seq > 2 ORDER BY at, run_id, seq").fetchall())
    schema = source.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = 'events'").fetchone()[0]
    source.close()
    floor = sqlite3.connect(folder / "floor.db", isolation_level=None)
    for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", schema):
        floor.execute(statement)
    began = time.perf_counter()
    for size in sizes:
        floor.execute("BEGIN IMMEDIATE")
        floor.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", islice(rows, size))
        floor.execute("COMMIT")
    took_s = time.perf_counter() - began
    floor.close()
    return sum(sizes) / took_s


async def growth(folder: Path, length: int, calls: int = 8) -> dict[str, float]:
    """Measurement (b): one run of `length` events in turns of several parallel calls."""
    log = await open_log(folder / f"grow-{length}.db")
    await start(log, ["0" * 32])
    seq, index, waits_s = 2, 0, list[float]()
    while seq < length:
        for events in (turn(index, calls), tuple(result(index, number) for number in range(calls))):
            began = time.perf_counter()
            verdict = (await log.commit([Append("0" * 32, 1, seq, events)]))[0]
            waits_s.append(time.perf_counter() - began)
            assert isinstance(verdict, Accepted), verdict
            seq = verdict.row.seq
        index += 1
    began = time.perf_counter()
    stored = await log.read("0" * 32)
    read_s = time.perf_counter() - began
    assert len(stored) == seq
    await log.close()
    tenth = len(waits_s) // 10
    file_bytes = (folder / f"grow-{length}.db").stat().st_size
    return {
        "events": seq,
        "first_tenth_ms": sorted(waits_s[:tenth])[tenth // 2] * 1e3,
        "last_tenth_ms": sorted(waits_s[-tenth:])[tenth // 2] * 1e3,
        "read_s": read_s,
        "bytes_per_event": file_bytes / seq,
    }


def table(title: str, rows: Sequence[dict[str, float]]) -> str:
    """Columns of figures under their names."""
    lines = [title, "  ".join(f"{name:>15}" for name in rows[0])]
    lines += ["  ".join(f"{value:>15,.2f}" for value in row.values()) for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--producers", type=int, default=64)
    parser.add_argument("--turns", type=int, default=60, help="turns of each producer")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2_000, 5_000, 10_000], help="events of the one run")
    parser.add_argument("--folder", type=Path, help="where the databases are made (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        appends = asyncio.run(throughput(Path(name), options.producers, options.turns))
        grown = [asyncio.run(growth(Path(name), length)) for length in options.lengths]
    if options.json:
        sys.stdout.write(json.dumps({"appends": appends, "growth": grown}) + "\n")
        return
    sys.stdout.write(table(f"{options.producers} producers, synchronous=FULL", [appends]) + "\n")
    if grown:
        sys.stdout.write("\n" + table("one run", grown) + "\n")


if __name__ == "__main__":
    main()
