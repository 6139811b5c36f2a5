"""The in-memory log: the same rules over dicts. For tests, dry runs and users' own tests; nothing is durable."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

from .budgets import Budget
from .events import Stored
from .log import Command, Verdict
from .rows import CallRow, Clock, Lease, RunRow
from .rules import Book, Key
from .secrets import masked_command
from .states import Status

SUPERVISOR = "supervisor"


class MemoryLog:
    """An EventLog that lives as long as the object."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._events: dict[str, list[Stored]] = {}
        self._runs: dict[str, RunRow] = {}
        self._calls: dict[Key, CallRow] = {}
        self._leases: dict[str, Lease] = {}
        self._budgets: dict[str, Budget] = {}
        self._blobs: dict[tuple[str, int], bytes] = {}

    async def commit(self, commands: Sequence[Command]) -> list[Verdict]:
        holder = self._leases.get(SUPERVISOR)
        book = Book(self._runs, self._calls, holder.nonce if holder else None, self._clock(), self._budgets)
        verdicts = []
        for command in map(masked_command, commands):
            wanted = book.tail_wanted(command)
            tail = self._after(*wanted) if wanted else []
            verdicts.append(book.judge(command, tail))
        for run_id, events in book.events.items():
            self._events.setdefault(run_id, []).extend(events)
        for run_id in book.changed_runs:
            self._runs[run_id] = book.runs[run_id]
        for run_id, call_id in book.changed_calls:
            self._calls[run_id, call_id] = book.calls[run_id][call_id]
        self._budgets.update(book.budgets)
        return verdicts

    def _after(self, run_id: str, after: int) -> list[Stored]:
        return self._events.get(run_id, [])[after:]

    async def read(self, run_id: str, after: int = 0, limit: int | None = None) -> list[Stored]:
        return self._after(run_id, after)[:limit]

    async def read_after(self, places: Mapping[str, int]) -> dict[str, list[Stored]]:
        found = {run_id: self._after(run_id, after) for run_id, after in places.items()}
        return {run_id: events for run_id, events in found.items() if events}

    async def run(self, run_id: str) -> RunRow | None:
        return self._runs.get(run_id)

    async def runs(
        self,
        *,
        statuses: Sequence[Status] | None = None,
        batch: str | None = None,
        ids: Sequence[str] | None = None,
        prefix: str | None = None,
        due_before: float | None = None,
        oldest_first: bool = False,
        limit: int | None = None,
    ) -> list[RunRow]:
        rows = [
            row
            for row in self._runs.values()
            if (statuses is None or row.status in statuses)
            and (batch is None or row.batch == batch)
            and (ids is None or row.run_id in ids)
            and (prefix is None or row.run_id.startswith(prefix))
            and (due_before is None or any(at is not None and at <= due_before for at in (row.due_at, row.deadline_at)))
        ]
        if oldest_first:
            rows.sort(key=lambda row: (-row.priority, row.created_at, row.run_id))
        else:
            rows.sort(key=lambda row: (-row.created_at, row.run_id))
        return rows[:limit]

    async def counts(self, batch: str | None = None) -> dict[Status, int]:
        return dict(Counter(row.status for row in self._runs.values() if batch is None or row.batch == batch))

    async def calls(self, run_id: str) -> list[CallRow]:
        return [call for (run, _), call in self._calls.items() if run == run_id]

    async def open_calls(self, ids: Sequence[str]) -> dict[str, list[CallRow]]:
        found: dict[str, list[CallRow]] = {}
        for (run, _), call in self._calls.items():
            if run in ids and call.result_seq is None:
                found.setdefault(run, []).append(call)
        return found

    async def lease(self, name: str) -> Lease | None:
        return self._leases.get(name)

    async def take_lease(self, lease: Lease, instead_of: str | None) -> bool:
        holder = self._leases.get(lease.name)
        if (holder.nonce if holder else None) != instead_of:
            return False
        self._leases[lease.name] = lease
        return True

    async def drop_lease(self, name: str, nonce: str) -> None:
        if (holder := self._leases.get(name)) and holder.nonce == nonce:
            del self._leases[name]

    async def budgets(self, name: str | None = None) -> list[Budget]:
        return [budget for key, budget in sorted(self._budgets.items()) if name in (None, key)]

    async def cap_budget(self, name: str, caps: Mapping[str, int | Decimal | None]) -> Budget:
        budget = self._budgets.get(name, Budget(name))
        self._budgets[name] = replace(budget, cap=budget.cap.changed(caps))
        return self._budgets[name]

    async def keep(self, digest: str, part: int, data: bytes) -> None:
        self._blobs.setdefault((digest, part), data)

    async def kept(self, digest: str, part: int) -> bytes | None:
        return self._blobs.get((digest, part))

    async def close(self) -> None:
        return None
