"""From a reference to an Agent: `module:name` or `path/file.py:name`. A reference is resolved only inside an
application that the user launched; nothing in a database names code except this reference."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..store.errors import UsageError
from ..store.events import AgentRef
from .agent import Agent

log = logging.getLogger(__name__)
FRESH_S = 1.0
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


def current(agent: AgentRef) -> AgentRef:
    """The same agent with the digest of its code as it is on this machine now; nothing is imported. Unchanged where
    its folder is not here, or the reference names none. Raises UsageError or OSError for one that cannot be read."""
    folder = _folder(agent) if _names_folder(agent) else None
    if folder is None or not folder.is_dir():
        return agent
    return agent.model_copy(update={"digest": folder_digest(folder)})


def _names_folder(agent: AgentRef) -> bool:
    """Whether a reference says where its code is in the same way for every process: what `load_agent` makes does."""
    place = agent.ref.rpartition(":")[0]
    return os.path.isabs(place if place.endswith(".py") else agent.root)


def _folder(agent: AgentRef) -> Path:
    """The folder whose code an agent's digest is of."""
    place = agent.ref.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).parent
    module = Path(agent.root, *place.split("."))
    return module if (module / "__init__.py").is_file() else module.parent


class CurrentCode:
    """`current` for many runs: looks at each agent's folder about once per `FRESH_S`, in a thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: dict[AgentRef, tuple[float, asyncio.Task[AgentRef]]] = {}

    async def of(self, agent: AgentRef) -> AgentRef:
        """The agent's code as it is now; as it was where its folder cannot be read."""
        if not _names_folder(agent):
            return agent
        at, look = self._looks.get(agent, (-FRESH_S, None))
        if look is None or self._clock() - at >= FRESH_S:
            look = asyncio.create_task(asyncio.to_thread(current, agent))
            self._looks[agent] = (self._clock(), look)
        try:
            return await asyncio.shield(look)
        except (UsageError, OSError) as error:
            log.warning("the code of %s is taken for unchanged: %s", agent.ref, error)
            return agent


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
