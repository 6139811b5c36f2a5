"""Fixtures that the tests of every log share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.store.log import EventLog

from .store_kit import KINDS, Clock, open_kind


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=KINDS)
async def log(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[EventLog]:
    """An empty log of each kind."""
    made = await open_kind(request.param, tmp_path, clock)
    yield made
    await made.close()
