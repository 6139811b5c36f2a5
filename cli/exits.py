"""Exit codes, and the one place where an error becomes a line and a code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from enum import IntEnum
from typing import Final

import click

from ..store.errors import NotFound, PerdureError, UsageError
from ..store.log import Refused
from ..store.secrets import masked
from ..store.states import Status
from .text import line


class Exit(IntEnum):
    """What a command tells the shell."""

    COMPLETED = 0
    FAILED = 1
    USAGE = 2
    WAITS = 3
    CANCELLED = 4
    TIMED_OUT = 5
    INTERRUPTED = 130


_OF_STATUS: Final = {
    Status.COMPLETED: Exit.COMPLETED,
    Status.FAILED: Exit.FAILED,
    Status.AWAITING_APPROVAL: Exit.WAITS,
    Status.CANCELLED: Exit.CANCELLED,
    Status.TIMED_OUT: Exit.TIMED_OUT,
}
_WORST_FIRST: Final = (Exit.FAILED, Exit.TIMED_OUT, Exit.CANCELLED, Exit.WAITS)


def exit_of(statuses: Iterable[Status]) -> Exit:
    """The exit code of one run or of many: that of the worst."""
    codes = {_OF_STATUS.get(status, Exit.FAILED) for status in statuses}
    return next((code for code in _WORST_FIRST if code in codes), Exit.COMPLETED)


def say_error(error: PerdureError) -> None:
    """Say an error on one line."""
    click.echo(f"perdure: {masked(line(error.message, cut=None))}", err=True)


def report(error: PerdureError) -> int:
    """Say an error on one line, and which code it means."""
    say_error(error)
    return Exit.USAGE if isinstance(error, (UsageError, NotFound, Refused)) else Exit.FAILED


def hush() -> None:
    """Nobody reads standard output any more: let the interpreter close it without a complaint."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(null, stream.fileno())
