"""`blob`: the whole of a value of which a result shows a part."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from ..client.blobs import blob_parts
from ..store.errors import UsageError
from .options import asynchronous, db_option
from .read import open_reader


@click.command()
@click.argument("digest")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file.")
@db_option
@asynchronous
async def blob(db: str, digest: str, out: Path | None) -> None:
    """Write the whole of a value that was too large for its result, byte by byte.

    DIGEST is what the result names. The value is a text as it was, an image, or JSON. It is not written to a terminal,
    which it could do anything to.
    """
    if out is None and sys.stdout.isatty():
        raise UsageError("this may hold anything, escape codes too: give --out FILE, or a pipe")
    async with open_reader(db) as event_log:
        parts = blob_parts(event_log, digest)
        first = await anext(parts)  # before a file is made
        with _target(out) as target:
            target.write(first)
            async for part in parts:
                target.write(part)


@contextlib.contextmanager
def _target(out: Path | None) -> Iterator[BinaryIO]:
    if out is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with out.open("wb") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error}") from error
