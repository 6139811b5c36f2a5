"""What a user says to a model: text, or text and images."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from pydantic_ai.messages import BinaryContent, ImageUrl, UserContent

from ...store.events import canonical
from ..results import valid_text


def user_content(content: Any) -> str | Sequence[UserContent]:
    """A text as it is; a list of content blocks as text and images; any other value as JSON text.

    A block is `{"type": "text", "text": ...}`, `{"type": "image", "media_type": "image/png", "data": BASE64}` or
    `{"type": "image", "url": ...}`.
    """
    if isinstance(content, str):
        return valid_text(content) or "(empty)"
    blocks = [_block(item) for item in content] if isinstance(content, list) and content else [None]
    if all(block is not None for block in blocks):
        return [block for block in blocks if block is not None]
    return valid_text(canonical(content))


def _block(item: Any) -> UserContent | None:
    match item:
        case {"type": "text", "text": str(text), **rest} if not rest and text:
            return valid_text(text)
        case {"type": "image", "media_type": str(kind), "data": str(data), **rest} if not rest:
            try:
                return BinaryContent(base64.b64decode(data, validate=True), media_type=kind)
            except binascii.Error:
                return None
        case {"type": "image", "url": str(url), **rest} if not rest:
            return ImageUrl(url)
    return None
