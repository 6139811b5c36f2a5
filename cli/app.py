"""The `perdure` command: its group, its global option and what becomes of errors."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import click
from click.exceptions import Exit as ClickExit

from ..store.errors import PerdureError
from .exits import Exit, hush, report

COMMANDS: Final = {
    "run": "run:run",
    "batch": "batch:batch",
    "drill": "drill:drill",
    "resume": "resume:resume",
    "list": "read:list_runs",
    "show": "read:show",
    "events": "read:events",
    "blob": "blob:blob",
    "guard-test": "guard_test:guard_test",
    "questions": "decide:list_questions",
    "approve": "decide:approve",
    "reject": "decide:reject",
    "settle": "decide:settle",
    "cancel": "cancel:cancel_runs",
    "up": "standing:go_up",
    "down": "standing:go_down",
    "budget": "budget:show_budget",
    "status": "standing:status",
}
"""Where each command is. Only the module of the one that is called is imported."""


class Root(click.Group):
    """The group of all commands. What a user did wrong is one line and an exit code, never a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f".{module}", __package__), name)
        return command

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except KeyboardInterrupt:
            raise ClickExit(Exit.INTERRUPTED) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PerdureError as error:
            ctx.exit(report(error))
        except KeyboardInterrupt:
            ctx.exit(Exit.INTERRUPTED)
        except BrokenPipeError:
            hush()
            ctx.exit(Exit.FAILED)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="perdure")
@click.option("--db", metavar="PATH|URL", envvar="PERDURE_DB", help="The store; every command takes it too.")
def root(db: str | None) -> None:
    """Durable runs of LLM agents.

    Runs live in a store, a SQLite file or a PostgreSQL database. Commands that work on them start Ray on this
    machine, or use the supervisor that `perdure up` left standing; commands that read need neither.
    """


def main() -> None:
    """The entry point."""
    root(prog_name="perdure")
