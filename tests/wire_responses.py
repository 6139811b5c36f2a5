"""How the loopback server answers as OpenAI's Responses API does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from .wire_play import Block, Call, Says, Text, pieces

Event = dict[str, Any]


def responses_frames(says: Says) -> Iterator[str]:
    numbers = itertools.count()
    for event in says.frames if says.frames is not None else _events(says):
        yield f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': next(numbers)})}\n\n"


def _events(says: Says) -> Iterator[Event]:
    yield {"type": "response.created", "response": _response("in_progress")}
    items = []
    for index, block in enumerate(says.blocks):
        begun, deltas, item = _item(index, block)
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        for delta in deltas:
            yield delta | {"item_id": item["id"], "output_index": index}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        items.append(item)
    fresh, written, read, output = says.tokens
    usage = {
        "input_tokens": fresh + written + read,
        "input_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": fresh + written + read + output,
    }
    full = says.reason == "max_tokens"
    why = {"incomplete_details": {"reason": "max_output_tokens"}} if full else {}
    end = "incomplete" if full else "completed"
    yield {"type": f"response.{end}", "response": _response(end) | {"output": items, "usage": usage} | why}


def _item(index: int, block: Block) -> tuple[Event, list[Event], Event]:
    """An item as it begins, its pieces, and the whole."""
    if isinstance(block, Text):
        item: Event = {"type": "message", "id": f"msg_{index}", "role": "assistant", "status": "completed"}
        part = {"type": "output_text", "text": block.text, "annotations": []}
        kind = {"type": "response.output_text.delta", "content_index": 0, "logprobs": []}
        return (
            item | {"content": []},
            [kind | {"delta": each} for each in pieces(block.text)],
            item | {"content": [part]},
        )
    if isinstance(block, Call):
        item = {"type": "function_call", "id": f"fc_{index}", "call_id": block.id, "name": block.name}
        kind = {"type": "response.function_call_arguments.delta"}
        deltas = [kind | {"delta": each} for each in pieces(block.arguments)]
        return item | {"arguments": ""}, deltas, item | {"arguments": block.arguments, "status": "completed"}
    item = {"type": "reasoning", "id": f"rs_{index}", "encrypted_content": block.signature}
    kind = {"type": "response.reasoning_summary_text.delta", "summary_index": 0}
    deltas = [kind | {"delta": each} for each in pieces(block.text)]
    return item | {"summary": []}, deltas, item | {"summary": [{"type": "summary_text", "text": block.text}]}


def _response(status: str) -> Event:
    fields = {"id": "resp_1", "object": "response", "created_at": 1, "model": "gpt-5-mini", "output": [], "tools": []}
    return fields | {"status": status, "parallel_tool_calls": True, "tool_choice": "auto"}
