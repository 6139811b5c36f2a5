"""Secrets, and how they are kept out of the log: every command is masked before it is judged.

Secret are the values of environment variables whose names say so, or that PERDURE_SECRETS names with commas; and what
has the shape of a well-known kind of key. What the log holds, live state holds too, so nothing is masked later.
"""

from __future__ import annotations

import functools
import json
import os
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from pydantic import JsonValue

from .events import AssistantDelta, AssistantMessage, Event
from .log import Append, Command, Settle

CONFIGURED: Final = "PERDURE_SECRETS"
"""The variable that names others whose values are secret, separated by commas."""
LENGTH_MIN: Final = 12
"""A shorter value of a variable that is named like a secret is taken for none."""
CONFIGURED_MIN: Final = 4
"""A shorter value of a variable that is configured cannot be told from other text."""
WORD_MAX: Final = 4096
"""Characters of the longest word that may be waited for, in case that it becomes a key."""
BEARER: Final = "Bearer "
"""Says that a token follows, and is none of it."""
SHAPE_MIN: Final = 16
"""Characters of the shortest text that may hold a key by its shape."""

_NAMED = re.compile(
    r"(^|_)(API_?KEY|ACCESS_KEY|PRIVATE_KEY|SECRET|SECRET_KEY|TOKEN|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE
)


def _shapes() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """The shapes of keys: each by the word that it begins with, and that by a sign that is quicker to be found.

    A pattern begins with plain letters, as `re` skips text up to these fast. The time that it takes grows with the
    length of a text and no faster, whoever wrote that: no run of characters is looked at from each of its places.
    """
    plain, base64 = r"\w", "[A-Za-z0-9+/]"
    kinds = [
        ("-", ("sk-",), plain, r"(?=[\w-]{0,64}\d)[A-Za-z0-9_-]{20,}"),
        ("_", ("sk_live_", "sk_test_", "rk_live_", "rk_test_"), plain, "[A-Za-z0-9]{16,}"),
        ("_", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "hf_", "gsk_"), plain, "[A-Za-z0-9]{30,}"),
        ("_", ("github_pat_",), plain, r"\w{22,}"),
        ("_", ("npm_",), plain, "[A-Za-z0-9]{36}"),
        ("-", ("glpat-",), plain, r"[\w-]{20,}"),
        ("-", ("xox",), plain, "[abeoprs]-[A-Za-z0-9-]{10,}"),
        ("A", ("AKIA", "ASIA"), base64, "[0-9A-Z]{16}(?![A-Za-z0-9+/=])"),
        ("A", ("AIza",), base64, r"[\w-]{35}"),
        ("J", ("eyJ",), r"[\w-]", r"[\w-]{10,}+\.eyJ[\w-]{10,}+\.[\w-]{10,}"),
        ("B", (BEARER,), "", "[A-Za-z0-9._~+/=-]{20,}"),
        ("-", ("-----BEGIN ",), "", _PEM),
    ]
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for sign, words, before, rest in kinds:
        for word in words:
            where = f"(?<!{before}{word})" if before else ""
            found.setdefault(sign, []).append((word, re.compile(word + where + rest, re.ASCII)))
    return found


_PEM: Final = r"[A-Z ]{0,40}PRIVATE KEY-----[^\"]*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|(?=\\?\")|\Z)"
_SHAPES: Final = _shapes()
_WORD: Final = string.ascii_letters + string.digits + "_+/.~=-"
"""What keys are made of."""

_FOREIGN: Final[dict[str, tuple[str, ...]]] = {
    "run_created": ("input", "metadata", "correlation_id", "sample", "config"),
    "notice_injected": ("text",),
    "assistant_delta": ("text",),
    "assistant_message": ("text", "native"),
    "tool_call_requested": ("name", "provider_id", "arguments"),
    "tool_call_retried": ("reason",),
    "tool_call_probed": ("end", "why"),
    "tool_call_unsettled": ("why",),
    "tool_call_settled": ("reason",),
    "approval_requested": ("arguments", "reason"),
    "approval_decided": ("arguments", "reason"),
    "tool_result": ("content",),
    "tool_evidence": ("content", "why"),
    "cancel_requested": ("reason",),
    "run_completed": ("output",),
    "run_failed": ("message",),
    "run_cancelled": ("reason",),
    "run_timed_out": ("reason",),
}
"""What of an event people, models, tools and their errors have said."""
_JSON_TEXT: Final = frozenset({"arguments", "content"})
"""Of these, what is JSON text."""


def secret_values(environment: Mapping[str, str]) -> dict[str, str]:
    """The secrets of an environment, by the names of their variables."""
    configured = {name.strip() for name in environment.get(CONFIGURED, "").split(",")} - {""}
    return {
        name: value
        for name, value in environment.items()
        if (name in configured and len(value) >= CONFIGURED_MIN)
        or (_NAMED.search(name) and len(value) >= LENGTH_MIN and name != CONFIGURED)
    }


@functools.cache
def _own() -> dict[bool, tuple[tuple[str, str], ...]]:
    """The secrets of this process, each with what stands for it, the longest first; as text, and as JSON text."""
    found = sorted(secret_values(os.environ).items(), key=lambda each: -len(each[1]))
    plain = tuple((value, f"[masked: {name}]") for name, value in found)
    return {False: plain, True: tuple((json.dumps(v, ensure_ascii=False)[1:-1], mark) for v, mark in plain)}


def masked(text: str, as_json: bool = False) -> str:
    """A text without secrets; `as_json`: it is JSON text, and stays that."""
    for value, mark in _own()[as_json]:
        if value in text:
            text = text.replace(value, mark)
    return _without_shapes(text, lambda key: "[masked: a key]")


def _without_shapes(text: str, put: Callable[[str], str]) -> str:
    """With `put` of each key of a known shape in its place."""
    if len(text) < SHAPE_MIN:
        return text
    for sign, kinds in _SHAPES.items():  # loops, since this is on the path of every event
        if sign in text:
            for word, pattern in kinds:
                if word in text:
                    kept = word if word == BEARER else ""
                    text = pattern.sub(lambda found, kept=kept: kept + put(found[0][len(kept) :]), text)  # type: ignore[misc]
    return text


def starred(text: str, cut: bool = False) -> str:
    """A text whose secrets are stars, as many as they are long: for a piece of a text whose place is counted. `cut`: at
    its end there may be a part of a secret."""
    for value, _ in _own()[False]:
        text = text.replace(value, "*" * len(value))
        begun = _begun(text, value) if cut else len(text)
        if len(text) - begun >= CONFIGURED_MIN:
            text = text[:begun] + "*" * (len(text) - begun)
    return _without_shapes(text, lambda key: "*" * len(key))


def settled(text: str) -> int:
    """How much of a text that goes on is sure: no secret begins in it that is not whole. Its last word may be one."""
    word = len(text) - len(text.rstrip(_WORD))
    sure = len(text) - (word if word <= WORD_MAX else 0)
    return min([sure, *(_begun(text, value) for value, _ in _own()[False])])


def _begun(text: str, value: str) -> int:
    """Where the end of a text is the beginning of a value; the text's length where it is not."""
    at = max(0, len(text) - len(value) + 1)
    while (at := text.find(value[0], at)) >= 0:
        if value.startswith(text[at:]):
            return at
        at += 1
    return len(text)


def masked_value(value: JsonValue) -> JsonValue:
    """A JSON value without secrets, in its keys too; the very same one if it has none."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list):
        items = [masked_value(item) for item in value]
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        fields = {masked(key): masked_value(item) for key, item in value.items()}
        return value if all(fields.get(key) is item for key, item in value.items()) else fields
    return value


def masked_event(event: Event) -> Event:
    """An event without secrets; the very same one if it has none. A model's own form of its answer is left out if it
    holds one: what is changed in it, its provider would refuse."""
    changes: dict[str, Any] = {}
    for name in _FOREIGN.get(event.type, ()):
        value = getattr(event, name)
        if isinstance(value, str):
            text = starred(value) if isinstance(event, AssistantDelta) else masked(value, name in _JSON_TEXT)
            if text != value:
                changes[name] = text
        elif value is not None and (other := masked_value(value)) is not value:
            changes[name] = other
    if isinstance(event, AssistantMessage) and "native" in changes:
        changes["native"] = None
    return event.model_copy(update=changes) if changes else event


def masked_command(command: Command) -> Command:
    """A command whose events and content are without secrets; the very same one if they are."""
    if isinstance(command, Append):
        events = tuple(masked_event(event) for event in command.events)
        same = all(a is b for a, b in zip(events, command.events, strict=True))
        return command if same else replace(command, events=events)
    event = getattr(command, "event", None)
    changes: dict[str, Any] = {}
    if event is not None and (other := masked_event(event)) is not event:
        changes["event"] = other
    if isinstance(command, Settle) and (content := masked(command.content, True)) != command.content:
        changes["content"] = content
    return replace(command, **changes) if changes else command
