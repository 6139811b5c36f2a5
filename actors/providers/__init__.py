"""Models of real providers, through pydantic-ai: `anthropic:NAME`, `openai-chat:NAME` and whatever else it knows.

pydantic-ai and the provider's SDK are imported with the first request. Both are told to try nothing again: when to ask
again is decided here, for all runs of the process together.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...store.errors import UsageError
from ..model import Model, ModelReply, ModelRequest, Stream

if TYPE_CHECKING:
    from .provider import Provider

_Key = tuple[str, str | None]
_open: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, Provider]] = WeakKeyDictionary()
"""The models in use, by name and base URL; connections belong to an event loop. Those at one provider share a pace."""


def installs(extra: str) -> str:
    """The command that installs the client of a provider."""
    extra = "openai" if extra.startswith("openai") else extra
    return f"pip install '{'perdure' if extra in ('anthropic', 'openai') else 'pydantic-ai-slim'}[{extra}]'"


def check(name: str, base_url: str | None, from_here: bool) -> None:
    """Raises UsageError where a model string cannot be one of a provider's, its client is not installed, or it is told
    an address that it does not take; and, if it is to be asked with this process's environment, where that has no key
    or else not what it takes to ask it."""
    if importlib.util.find_spec("pydantic_ai") is None:
        raise UsageError(f"model {name!r} needs its provider's client: {installs(name.partition(':')[0])}")
    from . import provider

    (provider.service if from_here else provider.check)(name, base_url)


def provided(name: str, settings: Mapping[str, Any], base_url: str | None = None) -> Model:
    """The model of this name. A call of it raises ModelError, with a code that says why there is no answer, and
    UsageError for a model that cannot be asked from here."""

    async def ask(request: ModelRequest, stream: Stream) -> ModelReply:
        opened = _open.setdefault(asyncio.get_running_loop(), {})
        if (name, base_url) not in opened:
            # seconds of imports, and certificates to read: neither holds up the other runs of the process
            provider = await asyncio.to_thread(_opened, name, base_url)
            provider.pace = next((each.pace for each in opened.values() if each.at == provider.at), provider.pace)
            opened.setdefault((name, base_url), provider)
        return await opened[name, base_url].answer(request, settings, stream)

    return ask


def _opened(name: str, base_url: str | None) -> Provider:
    check(name, base_url, from_here=False)
    from .provider import Provider

    return Provider.open(name, base_url)
