"""Options that several commands share, and the bridge from a click command to asyncio."""

from __future__ import annotations

import asyncio
import functools
import shlex
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import click

from ..store.engine import DEFAULT_STORE

P = ParamSpec("P")
T = TypeVar("T")


def asynchronous(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """A command that runs in an event loop of its own."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return asyncio.run(function(*args, **kwargs))

    return run


def _chosen_db(context: click.Context, _: click.Parameter, value: str | None) -> str:
    return value or context.find_root().params.get("db") or DEFAULT_STORE


db_option = click.option(
    "--db",
    metavar="PATH|URL",
    callback=_chosen_db,
    help=f"The store: a SQLite file or a postgresql:// URL. Default: PERDURE_DB, else {DEFAULT_STORE}.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON lines, for programs.")
reason_option = click.option("-m", "--reason", default="", metavar="TEXT", help="Why; kept with the run.")
by_option = click.option("--by", metavar="NAME", help="Who decides. Default: USER@HOST.")
model_option = click.option("--model", metavar="MODEL", help="Use this model instead of the agent's: script:FILE.")
address_option = click.option(
    "--address", metavar="HOST:PORT", help="Join this Ray cluster; without it a local one is started."
)
actors_option = click.option("--actors", type=click.IntRange(1), metavar="N", help="Processes that drive runs.")
concurrency_option = click.option(
    "--concurrency", type=click.IntRange(1), metavar="N", help="Runs that are live at once. Default: as many as actors."
)


def key_values(_: click.Context, __: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE options as a mapping."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE")
        found[key] = value
    return found


def at_store(db: str) -> str:
    """The option that a suggested command needs to find this store again."""
    return "" if db == DEFAULT_STORE else f"--db {shlex.quote(db)} "
