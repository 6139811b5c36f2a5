"""What a tool of an MCP server answered, as a value to be recorded."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent

from .values import Image


class ToolFailed(Exception):
    """The server says that the call failed; the text is the server's."""


def value_of(answer: CallToolResult) -> Any:
    """Texts as one text; where there is other content, a list with all of it; structured
    content where there is no other.

    Raises ToolFailed for an answer that is an error.
    """
    texts = [part.text for part in answer.content if isinstance(part, TextContent)]
    if answer.is_error:
        raise ToolFailed("\n".join(texts) or "the server gives no reason")
    if answer.content and len(texts) == len(answer.content):
        return "\n".join(texts)
    if not answer.content:
        return answer.structured_content if answer.structured_content is not None else ""
    return [_part(part) for part in answer.content]


def _part(part: ContentBlock) -> Any:
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, ImageContent):
        try:
            return Image(base64.b64decode(part.data, validate=True), part.mime_type)
        except binascii.Error:
            pass  # then it is no image, and is recorded as it came
    return part.model_dump(by_alias=True, mode="json", exclude_none=True)
