"""Images over the wire: those of users, of tools and of models, and what becomes of too many."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from pydantic_ai.messages import BinaryContent, FilePart, ModelResponse, TextPart

from perdure.actors.providers import translate
from perdure.store.events import canonical

from .provider_kit import HELLO, asked, keys, opened, request, said
from .wire import Call, Says, Text, Wire

BOTH = pytest.mark.parametrize("kind", ["anthropic", "openai"])
ALL = pytest.mark.parametrize("kind", ["anthropic", "openai", "responses"])


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys(monkeypatch)


@BOTH
async def test_images_of_a_user_are_sent_as_images(kind: str) -> None:
    blocks = [
        {"type": "text", "text": "What is this?"},
        {"type": "image", "media_type": "image/png", "data": "iVBORw0="},
    ]
    async with Wire(Says([Text("A dot.")]), Says([Text("A list.")])) as wire:
        provider = opened(kind, wire)
        await asked(provider, request([{"role": "user", "content": blocks}]))
        await asked(provider, request([{"role": "user", "content": [1, {"type": "text"}]}]))
        image, plain = (each.body["messages"][-1]["content"] for each in wire.served)
    assert "iVBORw0=" in json.dumps(image) and image[0]["text"] == "What is this?"
    assert '[1,{\\"type\\":\\"text\\"}]' in json.dumps(plain)


PNG = {"type": "image", "media_type": "image/png", "data": "iVBORw0="}


@ALL
async def test_images_of_tools_are_sent_as_images(kind: str) -> None:
    two = Says([Call("look", id="a"), Call("look", id="b")])
    async with Wire(two, Says([Text("Dots.")])) as wire:
        provider = opened(kind, wire)
        results = canonical(PNG), canonical(["Two:", PNG, {"x": 1}, PNG])
        await asked(provider, request([HELLO, *said(await asked(provider), *results)]))
        sent = wire.served[1].raw.decode()
    assert (
        sent.count("iVBORw0=") == 3 and sent.count("image/png") == 3 and "Two:" in sent and "BinaryContent" not in sent
    )


def test_an_image_of_a_model_is_named_in_the_text_and_kept_as_it_is() -> None:
    picture = FilePart(BinaryContent(b"\x89PNG\xff", media_type="image/png"), id="i", provider_name="google")
    reply = translate.reply(ModelResponse(parts=[TextPart("Here: "), picture], finish_reason="stop"), None)
    assert reply.text == "Here: [image/png, 5 bytes]"
    kept = reply.model_copy(update={"native": json.loads(json.dumps(reply.native))})
    (_, back, _) = translate.conversation(request([HELLO, *said(kept), HELLO]))
    (_, shown) = back.parts
    assert isinstance(shown, FilePart) and (shown.content.data, shown.content.media_type) == (
        b"\x89PNG\xff",
        "image/png",
    )
    assert (shown.id, shown.provider_name) == ("i", "google")


@BOTH
async def test_of_many_images_the_newest_are_sent_and_the_oldest_are_left_out_together(kind: str) -> None:
    async with Wire(*[Says([Call("look")])] * 26) as wire:
        provider = opened(kind, wire)
        messages: list[Any] = [HELLO]
        for turn in range(26):
            messages += said(await asked(provider, request(messages)), canonical(PNG), turn=turn)
        shown = [each.raw.count(b"iVBORw0=") for each in wire.served]
    assert shown == [*range(21), 11, 12, 13, 14, 15]


@ALL
async def test_an_image_that_providers_refuse_goes_to_none(kind: str) -> None:
    jpeg = {"type": "image", "media_type": "image/png", "data": base64.b64encode(b"\xff\xd8\xff\xe0").decode()}
    drawing = {"type": "image", "media_type": "image/svg+xml", "data": base64.b64encode(b"<svg/>").decode()}
    async with Wire(Says([Call("look")]), Says([Text("Seen.")])) as wire:
        provider = opened(kind, wire)
        await asked(provider, request([HELLO, *said(await asked(provider), canonical([jpeg, drawing]))]))
        sent = wire.served[1].raw.decode()
    assert "image/jpeg" in sent and "image/png" not in sent, "it is what it is, not what it is said to be"
    assert "[image/svg+xml, 6 bytes: left out" in sent and drawing["data"] not in sent
