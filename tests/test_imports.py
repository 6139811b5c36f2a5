"""Imports run one way, and `import perdure` stays light."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["store", "actors", "supervisor", "client", "batch", "drill", "", "cli", "__main__"]
"""Lowest first; a room imports itself and what stands below it. "" is the package's own `__init__`."""


def modules() -> Iterator[tuple[str, Path]]:
    """The product's modules by their name below `perdure`."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in ROOMS or parts == ("__init__",):
            yield ".".join(part for part in parts if part != "__init__"), path


def imported(name: str, path: Path, at_load: bool) -> Iterator[str]:
    """What a module imports of perdure, by name below `perdure`; with `at_load` only what its import runs."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    for node in _reached(ast.parse(path.read_text()), at_load):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("perdure").lstrip(".") for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            if node.level == 0 and not _ours(module):
                continue
            module = module if node.level else module.removeprefix("perdure").lstrip(".")
            yield from (module or alias.name for alias in node.names)


def _ours(name: str) -> bool:
    return name.split(".")[0] == "perdure"


def _reached(tree: ast.AST, at_load: bool) -> Iterator[ast.AST]:
    """The nodes of a module; `at_load` leaves out function bodies and what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (at_load and (lazy or typing)):
            yield node
            yield from _reached(node, at_load)


def room(name: str) -> str:
    first = name.split(".")[0]
    return first if first in ROOMS else ""


def test_no_module_imports_what_stands_above_it() -> None:
    upward = []
    for name, path in modules():
        for target in imported(name, path, at_load=False):
            if ROOMS.index(room(target)) > ROOMS.index(room(name)):
                upward.append(f"{name or 'perdure'} imports {target or 'perdure'}")
    assert not upward


def test_the_import_graph_was_really_read() -> None:
    graph = {name: set(imported(name, path, at_load=False)) for name, path in modules()}
    assert "store.log" in graph["supervisor"]
    assert "actors.pool" in graph["supervisor"]
    assert "supervisor" in graph["client.runtime"]
    assert {"actors.agent", "client.runtime"} <= graph[""]


def test_the_package_itself_loads_only_what_needs_no_ray() -> None:
    loaded = set(imported("", ROOT / "__init__.py", at_load=True))
    assert {room(name) for name in loaded} <= {"store", "actors", ""}


@pytest.mark.parametrize("statement", ["import perdure", "from perdure import Agent, tool, Settled"])
def test_importing_perdure_loads_neither_ray_nor_sqlalchemy(statement: str) -> None:
    code = f"{statement}; import json, sys; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout
    assert {"ray", "sqlalchemy", "aiosqlite", "pydantic_ai", "anthropic", "openai"}.isdisjoint(json.loads(shown))


def test_there_is_one_copy_of_every_module() -> None:
    for name in ("perdure", "perdure.store.log", "perdure.client.runtime"):
        importlib.import_module(name)
    files: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        agent = name.startswith("perdure_agent_")  # an agent's file, loaded under a name of its own
        if file and not agent and Path(file).resolve().is_relative_to(ROOT) and ".venv" not in file:
            files.setdefault(str(Path(file).resolve()), []).append(name)
    assert files[str(ROOT / "__init__.py")] == ["perdure"]
    assert {file: names for file, names in files.items() if len(names) > 1} == {}
