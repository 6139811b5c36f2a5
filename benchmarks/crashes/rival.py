"""A second Runtime on a store, in a process of its own: python rival.py FOLDER RUN_ID...; ends when these runs have."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from perdure.benchmarks.crashes.stage import runtime_for


async def see_through(folder: Path, run_ids: list[str]) -> None:
    async with runtime_for(folder) as runtime:
        await asyncio.gather(*(runtime.outcome(run_id) for run_id in run_ids))


if __name__ == "__main__":
    asyncio.run(see_through(Path(sys.argv[1]), sys.argv[2:]))
