"""From a reference to an agent: every mistake is one line for its author, and edited code is other code."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.actors import loading
from perdure.actors.loading import FRESH_S, CurrentCode, current, folder_digest, load_agent, loaded
from perdure.store.errors import UsageError
from perdure.store.events import AgentRef

GOOD = """
from perdure.actors.agent import Agent
agent = Agent(name="a", model="script:turns.jsonl")
other = Agent(name="b", model="script:turns.jsonl")
text = "not an agent"
"""


@pytest.fixture(autouse=True)
def clean_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    path, modules = sys.path[:], set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message(reference: str) -> str:
    with pytest.raises(UsageError) as error:
        load_agent(reference)
    assert "\n" not in str(error.value), "an error is one line"
    assert repr(reference) in str(error.value)
    return str(error.value)


def test_an_agent_is_found_by_file_and_by_module(tmp_path: Path) -> None:
    write("shop/agents.py", GOOD)
    write("shop/__init__.py", "")
    by_file, by_module = load_agent("shop/agents.py:agent"), load_agent("shop.agents:agent")
    assert by_file.agent.name == by_module.agent.name == "a"
    assert by_file.folder == by_module.folder == tmp_path / "shop"
    assert by_file.ref.ref == f"{tmp_path}/shop/agents.py:agent", "a reference that holds in every folder"
    assert by_file.ref.digest == by_module.ref.digest
    assert (by_file.ref.root, by_module.ref.root) == (str(tmp_path / "shop"), str(tmp_path))


def test_a_reference_that_was_resolved_resolves_again_to_the_same() -> None:
    write("agents.py", GOOD)
    first = load_agent("agents.py:agent")
    again = load_agent(first.ref.ref)
    assert again.ref == first.ref
    assert loaded(first.ref.ref, first.ref.digest) is loaded(first.ref.ref, first.ref.digest)


@pytest.mark.parametrize("reference", ["agents.py", "agents", ":agent", "agents.py:"])
def test_a_reference_without_place_or_name_is_explained(reference: str) -> None:
    assert "module:name or path/file.py:name" in message(reference)


def test_a_missing_file_or_module_is_named() -> None:
    assert "no file" in message("nothing.py:agent")
    assert "no module named 'nothing_here'" in message("nothing_here:agent")


def test_a_missing_name_tells_the_names_that_there_are() -> None:
    write("agents.py", GOOD)
    assert "it has agent, other" in message("agents.py:agnet")
    assert "no Agent named 'text'" in message("agents.py:text")
    write("empty.py", "")
    assert "defines no Agent" in message("empty.py:agent")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise ValueError('no key\\nset one')", "ValueError: no key set one"),
        ("def f(:", "SyntaxError"),
        ("import no_such_library", "no module named 'no_such_library'"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("from agents_that_are_not import x", "agents_that_are_not"),
        ("1 / 0", "agents.py:1)"),
    ],
)
def test_code_that_does_not_import_is_one_line_for_its_author(code: str, text: str) -> None:
    write("agents.py", code)
    assert text in message("agents.py:agent")
    write("agents.py", GOOD)
    assert load_agent("agents.py:agent").agent.name == "a", "a failed import leaves nothing behind"


def test_the_digest_changes_with_every_python_file_beside_the_agent_and_with_nothing_else(tmp_path: Path) -> None:
    write("agents.py", GOOD)
    digests = [folder_digest(tmp_path)]
    for name, text in (("helper.py", "x = 1"), ("helper.py", "x = 2"), ("deep/er/code.py", ""), ("agents.py", "")):
        write(name, text)
        digests.append(folder_digest(tmp_path))
    Path("helper.py").rename("helpers.py")
    digests.append(folder_digest(tmp_path))
    assert len(set(digests)) == len(digests)
    for name in ("notes.txt", ".venv/lib.py", "__pycache__/x.py", "node_modules/x.py"):
        write(name, "anything")
        assert folder_digest(tmp_path) == digests[-1], name


def test_an_agent_imports_from_beside_itself() -> None:
    write("shop/agents.py", "from beside_the_agent import NAME\n" + GOOD.replace('"a"', "NAME"))
    write("shop/beside_the_agent.py", "NAME = 'by a neighbour'")
    assert load_agent("shop/agents.py:agent").agent.name == "by a neighbour"


def test_two_files_of_one_name_are_two_modules() -> None:
    write("one/agents.py", GOOD)
    write("two/agents.py", GOOD.replace('"a"', '"second"'))
    assert load_agent("one/agents.py:agent").agent.name == "a"
    assert load_agent("two/agents.py:agent").agent.name == "second"


# -- code as it is now ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["shop/agents.py:agent", "shop.agents:agent", "shop:agent", "alone:agent"])
def test_the_current_code_of_an_agent_is_what_loading_it_would_find_and_imports_nothing(reference: str) -> None:
    write("shop/__init__.py", GOOD)
    write("shop/agents.py", GOOD)
    write("alone.py", GOOD)
    ref = load_agent(reference).ref
    assert current(ref) == ref
    write("shop/beside.py" if reference.startswith("shop") else "beside.py", "raise SystemExit('imported')")
    known = set(sys.modules)
    now = current(ref)
    assert now.digest != ref.digest and now == ref.model_copy(update={"digest": now.digest})
    assert load_agent(reference).ref == now
    assert set(sys.modules) == known


def test_an_agent_whose_folder_is_elsewhere_is_taken_as_it_was(tmp_path: Path) -> None:
    ref = AgentRef(ref="/on/another/machine.py:agent", digest="d", root="/on/another")
    assert current(ref) is ref
    module = AgentRef(ref="not.here:agent", digest="d", root=str(tmp_path))
    assert current(module) is module
    write("shop/agents.py", GOOD)
    for vague in (AgentRef(ref="shop/agents.py:agent", digest="d"), AgentRef(ref="shop.agents:agent", digest="d")):
        assert current(vague) is vague, "it may mean another file elsewhere"


def test_an_agent_whose_file_is_gone_is_other_code() -> None:
    write("shop/agents.py", GOOD)
    write("shop/beside.py", "")
    ref = load_agent("shop/agents.py:agent").ref
    Path("shop/agents.py").unlink()
    assert current(ref).digest != ref.digest


class Looks:
    """Counts how often a folder is looked at, on a clock that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.now = 0, 0.0
        self.code = CurrentCode(lambda: self.now)
        monkeypatch.setattr(loading, "current", self._look)

    def _look(self, agent: AgentRef) -> AgentRef:
        self.count += 1
        return current(agent)


async def test_many_runs_that_are_claimed_together_look_at_their_agents_folder_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("shop/agents.py", GOOD)
    ref, other = load_agent("shop/agents.py:agent").ref, load_agent("shop/agents.py:other").ref
    looks = Looks(monkeypatch)
    assert set(await asyncio.gather(*(looks.code.of(ref) for _ in range(100)))) == {ref}
    write("shop/agents.py", GOOD + "x = 1")
    looks.now += FRESH_S / 2
    assert await looks.code.of(ref) == ref
    assert looks.count == 1
    looks.now += FRESH_S
    now = await looks.code.of(ref)
    assert now == load_agent("shop/agents.py:agent").ref != ref
    assert (await looks.code.of(other)).ref == other.ref, "each agent for itself"
    assert looks.count == 3


async def test_code_that_cannot_be_read_is_taken_for_unchanged_and_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write("shop/agents.py", GOOD)
    ref = load_agent("shop/agents.py:agent").ref
    os.symlink("nowhere.py", "shop/broken.py")
    looks = Looks(monkeypatch)
    assert await looks.code.of(ref) == ref
    assert "is taken for unchanged" in caplog.text
    os.unlink("shop/broken.py")
    shutil.copy("shop/agents.py", "shop/more.py")
    looks.now += FRESH_S
    assert (await looks.code.of(ref)).digest != ref.digest
