"""Check the groundwork without perdure: every task through stored worlds comes to the same end as in one process.

Each call opens its world's file anew and closes it, as a task in a fresh process would. Run it after a change of the
package's version: it also finds a method that is declared read_only and changes its world.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from perdure.benchmarks.bfcl.data import Task, methods, tasks
from perdure.benchmarks.bfcl.effects import READ_ONLY, effect_of
from perdure.benchmarks.bfcl.plain import expected
from perdure.benchmarks.bfcl.world import LEDGER, World


def through_world(folder: Path, task: Task) -> tuple[tuple[Any, ...], str]:
    """The results and the final world of a task whose every call finds its world in a file."""
    results = []
    for number, call in enumerate(task.calls):
        with World.open(folder, task.id, task.instances) as world:
            if effect_of(call.api, call.method) == "read_only":
                results.append(world.read(call.api, call.method, call.arguments))
            else:
                results.append(world.apply(f"{task.id}:{number}", call.api, call.method, call.arguments))
    with World.open(folder, task.id, task.instances) as world:
        return tuple(results), world.snapshot()


def main() -> int:
    declared = {(api, name) for api, names in READ_ONLY.items() for name in names}
    unknown = sorted(pair for pair in declared if pair[1] not in methods(pair[0]))
    called = Counter(effect_of(call.api, call.method) for task in tasks().values() for call in task.calls)
    print(f"{len(tasks())} tasks, {sum(called.values())} calls: {dict(called)}")
    total = sum(len(methods(api)) for api in READ_ONLY)
    print(f"{total} methods of {len(READ_ONLY)} classes: {len(declared)} read_only, {total - len(declared)} change")
    with tempfile.TemporaryDirectory() as name:
        started = time.monotonic()
        ends = {task.id: through_world(Path(name), task) for task in tasks().values()}
        took_s = time.monotonic() - started
        lines = len((Path(name) / LEDGER).read_text().splitlines())
    plain = {task.id: expected(task) for task in tasks().values()}
    worlds = [key for key, want in plain.items() if ends[key][1] != want.snapshot]
    answers = [key for key, want in plain.items() if ends[key][0] != want.results]
    print(f"through stored worlds in {took_s:.1f} s, {lines} effects in the ledger")
    print(f"different worlds: {worlds or 'none'}; different answers: {answers or 'none'}; unknown: {unknown or 'none'}")
    return 1 if worlds or answers or unknown or lines != called["non_idempotent"] else 0


if __name__ == "__main__":
    sys.exit(main())
