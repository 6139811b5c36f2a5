"""Actors that cannot be reached by a socket, as from another machine, are called through Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure.actors.wire import SUFFIX
from perdure.client.cluster import namespace_digest, store_url

from .cli_kit import Place, place

__all__ = ["place"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def test_without_the_sockets_of_journal_and_supervisor_a_run_goes_the_same_way(place: Place) -> None:
    folder = Path(place.temporary, f"perdure-{os.getuid()}", namespace_digest(store_url(str(place.db))))
    instead = [folder / f"{actor}{SUFFIX}" for actor in ("journal", "supervisor")]
    for path in instead:
        path.mkdir(parents=True)  # where a socket would be
    code, out, err = place.run("run", "agent.py:agent", "pay")
    assert (code, out) == (0, "done with pay\n"), err
    assert all(path.is_dir() for path in instead), "a socket was made after all"
    assert len(place.entries()) == 1
    assert not place.left()
