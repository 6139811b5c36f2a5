"""`up`, `down` and `status`: a supervisor that stays on this machine."""

from __future__ import annotations

from typing import Any, Final

import click

from ..client.lease import SUPERVISOR, lease_is_over
from ..client.standing import Standing, down, find_standing, state_file, up
from ..store.errors import UsageError
from ..store.rows import Lease
from .interrupts import Interrupts
from .options import (
    actors_option,
    address_option,
    asynchronous,
    concurrency_option,
    db_option,
    json_option,
)
from .progress import Counts, words
from .read import open_reader
from .terminal import Terminal
from .text import clock, json_line

UP_GRACE_S: Final = 15.0
"""How long an interrupted `up` may take to end what it has started."""


@click.command("up")
@concurrency_option
@actors_option
@click.option("--num-cpus", type=click.IntRange(1), metavar="N", help="CPUs that tools may use. Default: all.")
@address_option
@db_option
@asynchronous
async def go_up(db: str, **options: Any) -> None:
    """Start a supervisor that stays.

    It works on this store until `perdure down`: it goes on with what was interrupted, and run, batch and resume hand
    their work to it. Its processes have the environment of this command. With --address it lives on that Ray cluster.
    """
    terminal, interrupts = Terminal(), Interrupts(UP_GRACE_S)
    interrupts.say = lambda: terminal.say("\ninterrupted; ending what was started")
    with terminal.alone():
        standing = await interrupts.run(up(db, **options))
        terminal.put(f"up at {standing.address}; `perdure down` ends it")


@click.command("down")
@db_option
@asynchronous
async def go_down(db: str) -> None:
    """End the supervisor that `perdure up` started.

    Ends exactly the processes that it started; on a cluster that it joined, only perdure's actors. Unfinished runs
    stay as they are and go on with the next `perdure up`, `resume` or `batch`.
    """
    terminal = Terminal()
    with terminal.alone():
        ended = await down(db)
        terminal.put(f"down; it was up at {ended.address}" if ended else "nothing was up")


@click.command()
@json_option
@db_option
@asynchronous
async def status(db: str, as_json: bool) -> None:
    """Say what works on this store, and how many runs are in which state."""
    terminal, standing = Terminal(), find_standing(db)
    lease: Lease | None = None
    counts: Counts = {}
    works, problem = False, ""
    try:
        async with open_reader(db) as event_log:
            lease, counts = await event_log.lease(SUPERVISOR), await event_log.counts()
            works = standing is not None and await standing.works(event_log)
    except UsageError as error:
        problem = error.message
    held = lease if lease and not lease_is_over(lease) else None
    if as_json:
        told = {"state": _state(standing, works), "address": standing.address if standing else None}
        pids = [one.pid for one in standing.processes if one.lives] if standing else []
        runs = {state.value: count for state, count in counts.items()}
        terminal.put(json_line(told | {"supervisor_pid": held.pid if held else None, "pids": pids, "runs": runs}))
        return
    terminal.put(f"supervisor  {_standing_words(db, standing, works, held)}")
    terminal.put(f"runs        {words(counts) if counts else problem or 'none'}")


def _state(standing: Standing | None, works: bool) -> str:
    if standing is None:
        return "down"
    return "up" if works else "dead"


def _standing_words(db: str, standing: Standing | None, works: bool, held: Lease | None) -> str:
    if standing and works:
        return f"up at {standing.address} since {clock(standing.started_at)}" + _holder(held)
    if standing:
        return f"dead: what {state_file(db)} names does not run; `perdure down` clears it, `perdure up` starts anew"
    return f"a command's own{_holder(held)}" if held else "none"


def _holder(held: Lease | None) -> str:
    return f", process {held.pid}" if held else ""
