"""The yardstick: a task's ground-truth calls made in one plain process, without perdure and without a store."""

from dataclasses import dataclass
from typing import Any

from perdure.benchmarks.bfcl.canonical import canonical
from perdure.benchmarks.bfcl.data import Task
from perdure.benchmarks.bfcl.effects import effect_of
from perdure.benchmarks.bfcl.invoke import invoke


@dataclass(frozen=True)
class Expected:
    """What a run must come to: the answers of its calls in order, and the canonical text of its final world."""

    results: tuple[Any, ...]
    snapshot: str
    effects: int


def expected(task: Task) -> Expected:
    """Make the calls of a task on live objects, one after the other."""
    instances = task.instances()
    results = tuple(invoke(instances[call.api], call.method, call.arguments) for call in task.calls)
    effects = sum(effect_of(call.api, call.method) == "non_idempotent" for call in task.calls)
    return Expected(results, canonical(instances), effects)
