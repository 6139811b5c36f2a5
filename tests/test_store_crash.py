"""kill -9 of a process that appends: whatever it had acknowledged is there, and the log is whole."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.store.sql import open_log

from .store_kit import queued

APPENDER = """
import asyncio, sys
from perdure.store.events import AgentRef, RunCreated, TurnStarted
from perdure.store.log import (Append, Claim, Create)
from perdure.store.rows import (Lease)
from perdure.store.sql import open_log
from perdure.store.writer import GroupWriter

async def owner(writer, name):
    seq = 2
    while True:
        seq = (await writer.submit(Append(name, 1, seq, (TurnStarted(turn_index=seq),)))).row.seq
        print(name, seq, flush=True)

async def main():
    log = await open_log(sys.argv[1])
    writer = GroupWriter(log)
    await log.take_lease(Lease("supervisor", "n", "node", "boot", 1, 0.0, 4e9), None)
    for name in ("a", "b", "c"):
        await writer.submit(Create(name, RunCreated(agent=AgentRef(ref="m:a", digest="d"), input=None)))
        await writer.submit(Claim(name, "claim-" + name, "n", 0))
    await asyncio.gather(*(owner(writer, name) for name in ("a", "b", "c")))

asyncio.run(main())
"""


def acknowledged_before_the_kill(path: Path, lines: int) -> dict[str, int]:
    """The newest acknowledged seq of each run, as told by a process that was killed after so many lines."""
    told: dict[str, int] = {}
    with subprocess.Popen([sys.executable, "-c", APPENDER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(lines):
            name, seq = process.stdout.readline().split()
            told[name] = int(seq)
        process.kill()
        for line in process.stdout:  # what it had said before it died
            if line.endswith("\n"):
                name, seq = line.split()
                told[name] = int(seq)
    return told


@pytest.mark.parametrize("lines", [1, 40, 150])
async def test_what_was_acknowledged_survives_a_kill_of_the_process(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "runs.db"
    told = await asyncio.to_thread(acknowledged_before_the_kill, path, lines)
    log = await open_log(path)
    for name, seq in told.items():
        row = await log.run(name)
        assert row is not None
        assert row.seq >= seq
        assert [stored.seq for stored in await log.read(name)] == list(range(1, row.seq + 1))
    await queued(log, "afterwards")
    await log.close()


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise RuntimeError('bug')"])
def test_a_process_that_forgets_to_close_its_log_still_ends(tmp_path: Path, ending: str) -> None:
    code = f"""
import asyncio, sys
from perdure.store.sql import open_log

async def main():
    log = await open_log(sys.argv[1])
    await log.runs()
    {ending}

asyncio.run(main())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "x.db")]
    done = subprocess.run(command, timeout=30, capture_output=True, check=False)
    assert done.returncode == {"pass": 0, "raise SystemExit(3)": 3}.get(ending, 1)
    assert b"loop is closed" not in done.stderr
