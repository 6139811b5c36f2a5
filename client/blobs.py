"""What results leave out: values that are kept whole, outside of the log, by the digest of what they are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator

from ..store.errors import CorruptLog, NotFound, UsageError
from ..store.log import EventLog


async def blob_parts(event_log: EventLog, digest: str) -> AsyncIterator[bytes]:
    """A blob, piece by piece. Raises UsageError, NotFound, and CorruptLog at its end if it is not what was kept."""
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UsageError(f"{digest[:80]!a} names no blob: give the 64 digits that the result names")
    found, number = hashlib.sha256(), 0
    while (data := await event_log.kept(digest, number)) is not None:
        found.update(data)
        yield data
        number += 1
    if not number:
        raise NotFound(f"no blob {digest} in this store")
    if found.hexdigest() != digest:
        raise CorruptLog(f"blob {digest} is damaged: its parts make {found.hexdigest()}")
