"""What the real services refuse with 400, as far as it concerns conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")


def refused_by(path: str, body: dict[str, Any], size: int, bytes_max: int, signed: Mapping[str, str]) -> str | None:
    """Why a request is refused, None where it is taken. `signed` are the thoughts of this server by signature."""
    if size > bytes_max:
        return f"prompt is too long: {size} > {bytes_max} maximum. Please reduce the length of the messages."
    if "/messages" in path:
        rules = _anthropic(body, signed)
    else:
        rules = _responses(body, signed) if "/responses" in path else _openai(body)
    return next(iter(rules), None)


def _responses(body: dict[str, Any], signed: Mapping[str, str]) -> Iterator[str]:
    yield from _tools([tool["name"] for tool in body.get("tools", [])])
    called: set[str] = set()
    for number, item in enumerate(body["input"]):
        match item:
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                if call_id in called:
                    yield f"input[{number}]: duplicate call_id"
                if not NAME.match(name):
                    yield f"input[{number}].name: should match {NAME.pattern}"
                called.add(call_id)
                yield from _arguments(number, arguments)
            case {"type": "function_call_output", "call_id": call_id} if call_id not in called:
                yield f"No tool call found for function call output with call_id {call_id}."
            case {"type": "reasoning", "encrypted_content": content} if content not in signed:
                yield f"input[{number}]: the encrypted content could not be verified"


def _anthropic(body: dict[str, Any], signed: Mapping[str, str]) -> Iterator[str]:
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        yield "max_tokens: Field required"
    yield from _tools([tool["name"] for tool in body.get("tools", [])])
    messages = body.get("messages") or []
    if not messages or messages[0]["role"] != "user":
        yield "messages: first message must use the user role"
    open_ids: list[str] = []
    seen: set[str] = set()
    for number, message in enumerate(messages):
        blocks = message["content"]
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        if not blocks:
            yield f"messages.{number}: all messages must have non-empty content"
        yield from _blocks(number, blocks, signed)
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if results != open_ids[: len(results)] or len(results) != len(open_ids):
            yield f"messages.{number}: `tool_use` ids {open_ids} need `tool_result` blocks next, got {results}"
        if results and any(block["type"] != "tool_result" for block in blocks[: len(results)]):
            yield f"messages.{number}: `tool_result` blocks come first"
        open_ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if len({*open_ids} | seen) != len(open_ids) + len(seen):
            yield f"messages.{number}: `tool_use` ids must be unique"
        seen |= {*open_ids}
    if seen and not body.get("tools"):
        yield "requests which include `tool_use` blocks must define tools"
    if open_ids:
        yield f"`tool_use` ids were found without `tool_result` blocks: {open_ids}"
    if messages and messages[-1]["role"] == "assistant":
        yield "this model does not support assistant message prefill"


def _blocks(number: int, blocks: Sequence[dict[str, Any]], signed: Mapping[str, str]) -> Iterator[str]:
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)} if not text.strip():
                yield f"messages.{number}: text content blocks must be non-empty"
            case {"type": "image", "source": {"media_type": kind}} if kind not in IMAGES:
                yield f"messages.{number}.image.source.media_type: Input should be one of {IMAGES}"
            case {"type": "tool_result", "content": list(inner)}:
                yield from _blocks(number, inner, signed)
            case {"type": "tool_use", "name": name, "input": given}:
                if not NAME.match(name):
                    yield f"messages.{number}.tool_use.name: should match pattern {NAME.pattern}"
                if not isinstance(given, dict):
                    yield f"messages.{number}.tool_use.input: should be a valid dictionary"
            case {"type": "thinking", "thinking": text, "signature": signature}:
                if signed.get(signature) != text:
                    yield f"messages.{number}: invalid `signature` in `thinking` block"


def _openai(body: dict[str, Any]) -> Iterator[str]:
    if body.get("tools") == []:
        yield "[] is too short - 'tools'"
    yield from _tools([tool["function"]["name"] for tool in body.get("tools", [])])
    open_ids: list[str] = []
    for number, message in enumerate(body.get("messages") or []):
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_ids:
                yield f"messages.{number}: a 'tool' message must follow the 'tool_calls' that it answers"
            open_ids = [each for each in open_ids if each != message["tool_call_id"]]
            continue
        if open_ids:
            yield f"messages.{number}: 'tool_calls' must be followed by tool messages, missing: {open_ids}"
        calls = message.get("tool_calls") or []
        if message["role"] == "assistant" and not calls and not message.get("content"):
            yield f"messages.{number}: expected a string or tool_calls, got null"
        open_ids = [call["id"] for call in calls]
        if len({*open_ids}) != len(open_ids):
            yield f"messages.{number}: duplicate tool call ids"
        for call in calls:
            if not NAME.match(call["function"]["name"]):
                yield f"messages.{number}.tool_calls: function.name should match {NAME.pattern}"
            yield from _arguments(number, call["function"]["arguments"])
    if open_ids:
        yield f"'tool_calls' must be followed by tool messages, missing: {open_ids}"


def _arguments(number: int, arguments: str) -> Iterator[str]:
    try:
        if isinstance(json.loads(arguments), dict):
            return
    except ValueError:
        pass
    yield f"messages.{number}.tool_calls: function.arguments is not a JSON object"


def _tools(names: Sequence[str]) -> Iterator[str]:
    if len({*names}) != len(names):
        yield "tools: tool names must be unique"
    for name in names:
        if not NAME.match(name):
            yield f"tools: {name!r} does not match {NAME.pattern}"
