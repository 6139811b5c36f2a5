"""What users and tools say to a model: text, or text and images.

An image block is `{"type": "image", "media_type": "image/png", "data": BASE64}` or `{"type": "image", "url": ...}`, a
text block `{"type": "text", "text": ...}`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic_ai.messages import BinaryContent, ImageUrl, UserContent

from ...store.events import canonical
from ..values import valid_text

IMAGES_MAX: Final = 20
"""Images in one request. Providers refuse a request with too many, and with it every later one."""
IMAGES_STEP: Final = 10
"""How many of the oldest images are left out together: each time, what the provider has cached is lost."""
LEFT_OUT: Final = "[an image was here; it is left out, since newer ones followed]"


KINDS: Final = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
"""The images that every provider takes, by their first bytes. One of another kind, or of another than it says, would be
refused in every later request."""


class Album:
    """The images of one conversation, oldest first. Some of the oldest are left out where there are too many; a longer
    conversation leaves out those too."""

    def __init__(self, messages: Iterable[Mapping[str, Any]]) -> None:
        over = sum(map(_images, messages)) - IMAGES_MAX
        self._left_out = -(-over // IMAGES_STEP) * IMAGES_STEP if over > 0 else 0

    def user_content(self, content: Any) -> str | Sequence[UserContent]:
        """A text as it is; a list of blocks as texts and images; any other value as JSON text."""
        if isinstance(content, str):
            return valid_text(_shown_text(content))
        blocks = [_block(item) for item in content] if isinstance(content, list) and content else [None]
        if any(block is None for block in blocks):
            return valid_text(canonical(content))
        return [self._shown(block) for block in blocks if block is not None]

    def result_content(self, text: str) -> str | list[str | UserContent]:
        """A result, which is JSON text: text as it is, images as images, all else as JSON text."""
        value = json.loads(text) if text[:1] == '"' or IMAGE in text else None
        if isinstance(value, str):
            return _shown_text(value)
        items = value if isinstance(value, list) else [value]
        if not any(_is_image(_block(item)) for item in items):
            return text
        return [self._shown(_block(item) or _as_text(item)) for item in items]

    def _shown(self, block: UserContent) -> UserContent:
        if self._left_out and _is_image(block):
            self._left_out -= 1
            return LEFT_OUT
        if not isinstance(block, BinaryContent):
            return block
        kind = next((kind for begin, kind in KINDS.items() if block.data.startswith(begin)), None)
        if kind is None:
            said = valid_text(block.media_type)
            return f"[{said}, {len(block.data)} bytes: left out, as it is no PNG, JPEG, GIF or WebP image]"
        return BinaryContent(block.data, media_type=kind)


IMAGE: Final = '"type":"image"'
"""What the canonical JSON text of a result has in it that is, or has, an image."""


def _images(message: Mapping[str, Any]) -> int:
    if message["role"] == "user":
        content = message["content"]
        return sum(_is_image(_block(item)) for item in content) if isinstance(content, list) else 0
    return sum(str(result["content"]).count(IMAGE) for result in message.get("results", ()))


def _block(item: Any) -> UserContent | None:
    match item:
        case {"type": "text", "text": str(text), **rest} if not rest and text.strip():
            return valid_text(text)
        case {"type": "image", "media_type": str(kind), "data": str(data), **rest} if not rest:
            try:
                return BinaryContent(base64.b64decode(data, validate=True), media_type=kind)
            except binascii.Error:
                return None
        case {"type": "image", "url": str(url), **rest} if not rest:
            return ImageUrl(url)
    return None


def _is_image(block: UserContent | None) -> bool:
    return isinstance(block, (BinaryContent, ImageUrl))


def _as_text(item: Any) -> str:
    return item if isinstance(item, str) and item.strip() else canonical(item)


def _shown_text(text: str) -> str:
    """A text such that providers take it: they refuse an empty one, and one of nothing but blanks."""
    return text if text.strip() else canonical(text) if text else "(empty)"
