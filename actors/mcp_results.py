"""What a tool of an MCP server answered, as a value to be recorded."""

from __future__ import annotations

from typing import Any

from mcp_types import CallToolResult, TextContent


class ToolFailed(Exception):
    """The server says that the call failed; the text is the server's."""


def value_of(answer: CallToolResult) -> Any:
    """Texts as one text; content of other kinds in a list, as it is; structured content where there is no other.

    Raises ToolFailed for an answer that is an error.
    """
    texts = [part.text for part in answer.content if isinstance(part, TextContent)]
    if answer.is_error:
        raise ToolFailed("\n".join(texts) or "the server gives no reason")
    if answer.content and len(texts) == len(answer.content):
        return "\n".join(texts)
    if not answer.content:
        return answer.structured_content if answer.structured_content is not None else ""
    return [
        part.text if isinstance(part, TextContent) else part.model_dump(by_alias=True, mode="json", exclude_none=True)
        for part in answer.content
    ]
