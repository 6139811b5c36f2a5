"""Options that several commands share, and the bridge from a click command to asyncio."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import shlex
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import click

from ..client.budgets import Caps, caps_of
from ..store.engine import DEFAULT_STORE

_PASSWORD: Final = re.compile(r"(://[^:/@\s]*:)[^/@\s]+(?=@)")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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
model_option = click.option(
    "--model", metavar="MODEL", help="Use this model instead of the agent's: PROVIDER:NAME or script:FILE."
)
address_option = click.option(
    "--address", metavar="HOST:PORT", help="Join this Ray cluster; without it a local one is started."
)
actors_option = click.option("--actors", type=click.IntRange(1), metavar="N", help="Processes that drive runs.")
concurrency_option = click.option(
    "--concurrency", type=click.IntRange(1), metavar="N", help="Runs that are live at once. Default: as many as actors."
)


LIMITS: Final = {
    "max_turns": "Model calls whose answers a run may use.",
    "max_tokens": "Tokens of a run, input, output and cached together.",
    "max_cost": "US dollars of a run.",
    "max_tool_calls": "Tool calls of a run.",
    "max_tool_calls_per_turn": "Tool calls of one turn.",
    "max_repeats": "The N-th like call in a row with the same result is refused.",
    "max_empty": "The N-th empty answer in a row ends the run.",
    "timeout_s": "Seconds that a run may take.",
}
"""Limits that a command can set, and what they bound."""


def bound(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str | None] | None:
    """A limit as it was given, for `Limits` to read: None where it is lifted, which is not the same as not given."""
    return None if value is None else (None if value == "none" else value,)


def limit_options(command: F) -> F:
    """Options that set limits of runs."""
    for name, text in reversed(LIMITS.items()):
        option, unit = f"--{name.replace('_', '-')}", "USD" if name == "max_cost" else "N"
        command = click.option(option, name, callback=bound, metavar=f"{unit}|none", help=text)(command)
    return command


def chosen_limits(options: Mapping[str, Any]) -> dict[str, str | None]:
    """The limits that were given on the command line, by name; None: lifted."""
    return {name: options[name][0] for name in LIMITS if options.get(name) is not None}


def budget_options(command: F) -> F:
    """Options about the budget that runs share."""
    for option, unit, text in (
        ("--budget-tokens", "N|none", "Tokens that all runs of the budget may use together."),
        ("--budget-cost", "USD|none", "US dollars that all runs of the budget may spend together."),
    ):
        command = click.option(option, callback=bound, metavar=unit, help=text)(command)
    return click.option("--budget", metavar="NAME", help="Share this budget with all runs that name it.")(command)


def chosen_caps(options: Mapping[str, Any]) -> Caps:
    """The caps of a shared budget that were given on the command line. Raises UsageError."""
    given = {kind: options[f"budget_{kind}"] for kind in ("tokens", "cost")}
    return caps_of({kind: cap[0] for kind, cap in given.items() if cap is not None})


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
    """The option that a suggested command needs to find this store again; a password is for the user to fill in."""
    if db in (DEFAULT_STORE, os.environ.get("PERDURE_DB")):
        return ""
    return f"--db {shlex.quote(without_password(db))} "


def without_password(text: str) -> str:
    """A URL, or a command with one, as it is shown."""
    return _PASSWORD.sub(r"\1***", text)
