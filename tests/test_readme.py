"""What the README shows is true: its agent loads, its commands and links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perdure import Settled, ToolContext
from perdure.actors.loading import load_agent
from perdure.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_agent_refunds_once_and_its_probe_knows(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(EXAMPLES[0])
    agent = load_agent(f"{tmp_path / 'shop.py'}:support").agent
    refund = agent.tool("refund")
    assert refund and refund.probe
    context = ToolContext("r" * 32, 0, "t0c0", 1, idempotency_key="k1", deadline=0.0)
    assert refund.probe(context, "17") == Settled.did_not_happen()
    assert refund(context, "17") == "paid"
    assert refund.probe(context, "17") == Settled.happened("paid")


def test_the_example_program_compiles() -> None:
    compile(EXAMPLES[1], "README.md", "exec")


def test_every_command_that_is_shown_exists() -> None:
    shown = set(re.findall(r"`perdure ([a-z-]+)|^perdure ([a-z-]+) \S+\.py:", README, re.MULTILINE))
    shown = {first or second for first, second in shown}
    assert {"run", "batch", "resume"} <= shown <= COMMANDS.keys()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_every_make_target_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE)) <= targets
