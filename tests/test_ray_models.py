"""The clerk on real Ray, with a provider on the loopback wire: its actor is killed in mid-stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.store.events import AssistantMessage

from .provider_kit import keys
from .ray_kit import Bench, kill, quick
from .wire import Call, Says, Text, Thinking, Wire

CLERK = f"{Path(__file__).parent.parent / 'examples' / 'clerk.py'}:clerk"
LOOKS = (Call("stock", '{"item": "lamp"}', "toolu_1"), Call("stock", '{"item": "mug"}', "toolu_2"))
RESERVES = Call("reserve", '{"order_id": "17", "item": "lamp", "count": 2}', "toolu_3")


def day(stuck: int | None = None) -> list[Says]:
    """What the model of a clerk says. Its second answer may get stuck after so many frames."""
    return [
        Says([Thinking("Look first.", "EqQB+first=="), *LOOKS], tokens=(3, 1_200, 0, 90)),
        *([Says([Thinking("There are 12.", "EqQB+second=="), RESERVES], wait_after=stuck)] if stuck else []),
        Says([Thinking("There are 12.", "EqQB+second=="), RESERVES], tokens=(90, 0, 1_200, 40)),
        Says([Text("Two lamps are reserved for order 17.")], tokens=(140, 0, 1_200, 20)),
    ]


@pytest.mark.ray
async def test_the_clerk_is_killed_in_mid_stream_and_asks_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys(monkeypatch)
    async with Wire(*day(), *day(stuck=6), *day()) as wire:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", wire.anthropic)
        monkeypatch.setenv("OPENAI_BASE_URL", wire.openai)
        async with quick(Runtime(tmp_path / "runs.db", actors=2)) as runtime:
            world = {"world": str(tmp_path / "world")}
            quiet = await runtime.launch(CLERK, "Two lamps for order 17", metadata=world)
            said = (await quiet.outcome()).output
            killed = await runtime.launch(CLERK, "Two lamps for order 17", metadata=world)
            await wire.reached.wait()
            pid, _ = await Bench(runtime, tmp_path).holder(killed.run_id)
            kill(pid)
            await wire.asked[4].gone.wait()
            assert (await killed.outcome()).output == said == "Two lamps are reserved for order 17."
            chats = await runtime.launch(CLERK, "Two lamps for order 17", metadata=world, model="openai-chat:gpt-4o")
            assert (await chats.outcome()).output == said
            row = await runtime.log.run(quiet.run_id)
            events = [stored.event for stored in await runtime.log.read(quiet.run_id)]
    first, second, third = (asked.raw for asked in wire.served[:3])
    assert [asked.raw for asked in wire.served[3:7]] == [first, second, second, third]
    assert len(wire.served) == 10 and not any(asked.refused for asked in wire.asked)
    assert sorted(path.read_text() for path in (tmp_path / "world").iterdir()) == ["17 lamp 2\n"] * 3
    assert row and (row.usage.input_tokens, row.usage.cache_read_input_tokens) == (233, 2_400)
    signatures = [json.dumps(event.native) for event in events if isinstance(event, AssistantMessage)]
    assert "EqQB+first==" in signatures[0] and "EqQB+second==" in signatures[1]
    assert not any(
        "sk-wire" in event.model_dump_json() or str(wire.port) in event.model_dump_json() for event in events
    )
