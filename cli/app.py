"""The `perdure` command: its group, its global option and what becomes of errors."""

from __future__ import annotations

from typing import Any

import click

from ..store.errors import PerdureError
from .batch import batch
from .exits import Exit, hush, report
from .read import events, list_runs, show
from .resume import cancel, resume
from .run import run
from .standing import go_down, go_up, status


class Root(click.Group):
    """The group of all commands. What a user did wrong is one line and an exit code, never a traceback."""

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


for command in (run, batch, resume, list_runs, show, events, cancel, go_up, go_down, status):
    root.add_command(command)


def main() -> None:
    """The entry point."""
    root(prog_name="perdure")
