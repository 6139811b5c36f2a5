"""Decimals on their way through clients that would round them: as texts with a sign, which the very bytes that are sent
have as numbers again.

Clients make JSON text of floats. So a decimal that a float would not keep is given to them as text, and their HTTP
client, or transport, takes the quotes away.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

import httpx2

from .exact import Exact
from .values import valid_text

_SIGN: Final = secrets.token_hex(16)
"""What nobody can have written into a text: it is another one in each process."""
_CARRIED: Final = re.compile(f'"{_SIGN}([0-9.eE+-]+)"'.encode())


def carried(value: Any) -> Any:
    """A parsed value for a client, its texts such that they can be encoded. Raises RecursionError."""
    if isinstance(value, Exact):
        return float(value) if repr(float(value)) == value.written else _SIGN + value.written
    if isinstance(value, dict):
        return {valid_text(key): carried(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(carried, value))
    return valid_text(value) if isinstance(value, str) else value


def delivered(text: bytes) -> bytes:
    """JSON text that a client made, with the digits that were written."""
    return _CARRIED.sub(rb"\1", text)


async def deliver(request: httpx2.Request) -> None:
    """The hook of an HTTP client that sees each request before it is sent."""
    body = await request.aread()
    if _SIGN.encode() in body:
        body = delivered(body)
        request.stream = httpx2.ByteStream(body)
        request.headers["content-length"] = str(len(body))
