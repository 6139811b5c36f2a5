"""A stored run's answers as a script."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..actors.model import ModelReply, ToolUse
from ..store.events import AssistantMessage, Stored, ToolCallRequested


def replies(stored: Iterable[Stored]) -> list[ModelReply]:
    """What the model answered, turn by turn. Pure."""
    found: list[ModelReply] = []
    for one in stored:
        match event := one.event:
            case AssistantMessage():
                about = {"stop_reason": event.stop_reason, "usage": event.usage, "native": event.native}
                found.append(ModelReply(text=event.text).model_copy(update=about))
            case ToolCallRequested():
                use = ToolUse(name=event.name, arguments=json.loads(event.arguments), id=event.provider_id)
                if isinstance(use.arguments, dict):
                    use = use.model_copy(update={"raw": event.arguments})  # to the digit
                found[-1] = found[-1].model_copy(update={"tool_calls": (*found[-1].tool_calls, use)})
    return found


def write_script(path: Path, turns: Iterable[ModelReply]) -> None:
    """Write turns as a file that the scripted model plays."""
    path.write_text("".join(turn.model_dump_json() + "\n" for turn in turns))
