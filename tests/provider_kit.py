"""A provider that is asked over the loopback wire, with time that passes by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure.actors.model import Interrupted, ModelReply, ModelRequest, Stream
from perdure.actors.providers.pace import Pace
from perdure.actors.providers.provider import Provider

from .wire import KEY, Wire

MODELS = {"anthropic": "anthropic:claude-sonnet-5-5", "openai": "openai-chat:gpt-4o", "responses": "openai:gpt-5-mini"}
TOOL = {"name": "look", "description": "Looks.", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
HELLO = {"role": "user", "content": "hello"}


class Clock:
    """Time that passes only where somebody waits for it; others go on meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        until = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, until)


def keys(monkeypatch: pytest.MonkeyPatch, key: str = KEY) -> None:
    """The keys that the SDKs take from the environment."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(Path(__file__).parent))  # no certificates: each client would read hundreds


def opened(kind: str, wire: Wire, clock: Clock | None = None) -> Provider:
    """A provider that asks this server."""
    provider = Provider.open(MODELS[kind], wire.anthropic if kind == "anthropic" else wire.openai)
    time = clock or Clock()
    provider.pace = Pace(time, time.sleep, random.Random(1))
    return provider


def request(messages: Sequence[Any] = (HELLO,), tools: Sequence[Any] = (TOOL,), **fields: Any) -> ModelRequest:
    values: dict[str, Any] = {"run_id": "r", "turn_index": 0, "input": "", "metadata": {}, "instructions": "Be brief."}
    return ModelRequest(**values | {"messages": list(messages), "tools": list(tools)} | fields)


async def asked(provider: Provider, given: ModelRequest | None = None, **settings: Any) -> ModelReply:
    """The answer to a request, asked anew where it breaks off, as a run does."""
    while True:
        try:
            return await provider.answer(given or request(), settings, Stream())
        except Interrupted:
            pass


def said(reply: ModelReply, *contents: str, turn: int = 0) -> list[dict[str, Any]]:
    """A reply, and results of its calls, as messages of the next request."""
    calls = [
        {"id": f"t{turn}c{n}", "name": use.name, "arguments": "{}" if use.raw is None else use.raw}
        for n, use in enumerate(reply.tool_calls)
    ]
    message = {"role": "assistant", "text": reply.text, "tool_calls": calls, "native": reply.native}
    results = [
        {"tool_call_id": call["id"], "name": call["name"], "content": content, "is_error": False}
        for call, content in zip(calls, contents, strict=True)
    ]
    return [message, *([{"role": "tool", "results": results}] if results else [])]
