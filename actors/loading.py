"""From a reference to an Agent: `module:name` or `path/file.py:name`. A reference is resolved only inside an
application that the user launched; nothing in a database names code except this reference."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..store.errors import UsageError
from ..store.events import AgentRef
from .agent import Agent

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})
FILES_MAX = 5_000


@dataclass(frozen=True)
class LoadedAgent:
    """An agent and the folder that its relative paths start from."""

    agent: Agent
    ref: AgentRef
    folder: Path


def load_agent(text: str) -> LoadedAgent:
    """The agent of a reference, as the user wrote it. Raises UsageError with a one-line message."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise UsageError(f"agent {text!r}: write it as module:name or path/file.py:name")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise UsageError(f"agent {text!r}: there is no file {path}")
        place = str(path)
        module = _import(text, _load_file, path)
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        module = _import(text, importlib.import_module, place)
        path = Path(module.__file__ or "")
    agent = getattr(module, name, None)
    if not isinstance(agent, Agent):
        known = sorted(key for key, value in vars(module).items() if isinstance(value, Agent))
        has = f"it has {', '.join(known)}" if known else "it defines no Agent"
        raise UsageError(f"agent {text!r}: {place} has no Agent named {name!r}; {has}")
    root = path.parent if place.endswith(".py") else path.parents[place.count(".") + (path.name == "__init__.py")]
    ref = AgentRef(ref=f"{place}:{name}", digest=folder_digest(path.parent), root=str(root))
    return LoadedAgent(agent, ref, path.parent)


@functools.lru_cache(maxsize=8)
def loaded(ref: str, digest: str) -> LoadedAgent:
    """The agent of a run, once per process and digest of its code."""
    return load_agent(ref)


def folder_digest(folder: Path) -> str:
    """A digest of the Python files below a folder: of the code that an agent may import from beside it."""
    digest = hashlib.sha256()
    for path in _python_files(folder):
        digest.update(str(path.relative_to(folder)).encode("utf-8", "surrogateescape") + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _python_files(folder: Path) -> Iterator[Path]:
    count = 0
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(".py"):
                count += 1
                if count > FILES_MAX:
                    raise UsageError(
                        f"{folder} holds over {FILES_MAX} Python files: give the agent a folder of its own"
                    )
                yield Path(root, name)


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name that nothing else has; its neighbours are importable."""
    name = f"perdure_agent_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(text: str, load: Callable[[Any], ModuleType], what: object) -> ModuleType:
    """Run foreign code; whatever it raises is one line for its author."""
    try:
        return load(what)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(f"agent {text!r}: no module named {error.name!r}") from error
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"agent {text!r}: importing it raised {type(error).__name__}: {' '.join(str(error).split())} "
            f"({where.filename}:{where.lineno})"
        ) from error
