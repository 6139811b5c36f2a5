"""The tasks of the Berkeley Function Calling Leaderboard, read out of the installed `bfcl-eval` package.

Owns where the data lies and what a ground-truth call such as "cd('x')" means: a class, a method and its arguments by
name. Nothing of the data set is copied into this repository; everything is read where pip put it.

The package is installed without its dependencies (they are a leaderboard's worth of provider clients). Its stateful
classes import only the standard library and mpmath, and this module touches nothing else of it.
"""

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "2026.3.23"
INSTALL = f"pip install --no-deps bfcl-eval=={VERSION} mpmath"
CATEGORY = "BFCL_v4_multi_turn_base.json"
TASKS = 200
CALLS = 1142


class DatasetUnavailable(RuntimeError):
    """The data set cannot be used; the message says why and how to install the version that is expected."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; install it with: {INSTALL}")


@dataclass(frozen=True)
class Call:
    """One ground-truth call: `arguments` are JSON values by parameter name, only those that the call names."""

    api: str
    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One task: the classes it involves, the state they start from, and the right calls in order."""

    id: str
    apis: tuple[str, ...]
    initial_config: dict[str, Any]
    calls: tuple[Call, ...]
    user_turns: int

    def instances(self) -> dict[str, Any]:
        """Fresh instances of the involved classes in their initial state, made as the package's own checker does."""
        made: dict[str, Any] = {}
        for api in self.apis:
            made[api] = api_class(api)()
            if hasattr(made[api], "_load_scenario"):  # MathAPI has no state and no loader
                made[api]._load_scenario(copy.deepcopy(self.initial_config.get(api, {})))
        return made


@functools.cache
def tasks() -> dict[str, Task]:
    """All tasks by id, in the order of the file; refuses a package whose tasks or calls are not the expected ones."""
    truth = {row["id"]: row["ground_truth"] for row in _rows(_folder() / "possible_answer" / CATEGORY)}
    found = {row["id"]: _task(row, truth[row["id"]]) for row in _rows(_folder() / CATEGORY)}
    calls = sum(len(task.calls) for task in found.values())
    if (len(found), calls) != (TASKS, CALLS):
        raise DatasetUnavailable(f"expected {TASKS} tasks with {CALLS} calls, found {len(found)} with {calls}")
    return found


@functools.cache
def api_class(api: str) -> Any:
    """The package's class of that name, such as TravelAPI."""
    _folder()
    try:
        backends = importlib.import_module("bfcl_eval.constants.executable_backend_config")
        return getattr(importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[api]), api)
    except ImportError as error:
        raise DatasetUnavailable(f"{api} of bfcl-eval cannot be imported ({error})") from error


def methods(api: str) -> dict[str, Callable[..., Any]]:
    """The public methods of a class by name: what a model may call."""
    return {name: f for name, f in inspect.getmembers(api_class(api), inspect.isfunction) if not name.startswith("_")}


def _folder() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise DatasetUnavailable("bfcl-eval is not installed")
    return Path(spec.origin).parent / "data"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise DatasetUnavailable(f"bfcl-eval has no {path.name}")
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _task(row: dict[str, Any], truth: list[list[str]]) -> Task:
    apis = tuple(row["involved_classes"])
    calls = tuple(_call(text, apis) for turn in truth for text in turn)
    return Task(row["id"], apis, row["initial_config"], calls, len(truth))


def _call(text: str, apis: tuple[str, ...]) -> Call:
    """Parse a call; method names are unique over the classes of a task, so the method says which class is meant."""
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"not a call: {text}")
    name = node.func.id
    api = next((api for api in apis if name in methods(api)), None)
    if api is None:
        raise ValueError(f"{name} is a method of none of {', '.join(apis)}")
    positional = [ast.literal_eval(value) for value in node.args]
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    bound = inspect.signature(methods(api)[name]).bind(None, *positional, **named)
    arguments = {key: value for key, value in bound.arguments.items() if key != "self"}
    return Call(api, name, json.loads(json.dumps(arguments)))


if __name__ == "__main__":
    print(f"{len(tasks())} tasks, {sum(len(task.calls) for task in tasks().values())} calls")
