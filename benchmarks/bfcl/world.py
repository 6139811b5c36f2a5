"""The world of one run, kept outside every process in one small SQLite file: what a real service would be.

It knows nothing of perdure and nothing of bfcl-eval: it holds ordinary Python objects, made once by a function that
the caller passes, and each call loads them, calls a method, and puts them back.

- `apply` commits the changed objects and the line in `applied` in ONE transaction. A process that is killed anywhere
  in between leaves both or neither, so the record answers truthfully whether a call happened.
- It does not refuse a key that it has seen. A second call with the same key really happens a second time and leaves
  a second line: the tools are declared non-idempotent, and a service that deduplicated would hide a runtime that
  sends things twice.
- Rollback journal and `synchronous=FULL`: a call that was answered survives a power cut, and a crash leaves no file
  beside the database that the next opener would not roll back by itself. Each run has its own file, so runs never
  wait for each other.
- The objects are stored as one pickle. This is the benchmark's private world and not perdure's store, which never
  pickles. JSON would lose what the classes rely on: parent links, files shared by a directory and its copy, numeric
  dictionary keys, and the position of random generators, whose next draw is part of the state.
- The ledger beside the worlds gets one line per call that was applied, after its commit. A kill between the two can
  lose a line and never invents one; `applied` is the truth, the ledger a second witness.
"""

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from perdure.benchmarks.bfcl.canonical import canonical
from perdure.benchmarks.bfcl.invoke import invoke

LEDGER = "ledger.csv"
BUSY_TIMEOUT_S = 30.0

SCHEMA = """
CREATE TABLE world (id INTEGER PRIMARY KEY CHECK (id = 1), instances BLOB NOT NULL);
CREATE TABLE applied (
    seq INTEGER PRIMARY KEY, key TEXT NOT NULL, api TEXT NOT NULL, method TEXT NOT NULL, result TEXT NOT NULL
);
CREATE INDEX applied_key ON applied (key);
"""

Instances = dict[str, Any]


class ReadChangedWorld(AssertionError):
    """A call that was declared a read left the world different; the change was not kept."""

    def __init__(self, api: str, method: str) -> None:
        super().__init__(api, method)

    def __str__(self) -> str:
        return "{}.{} is declared read_only and changed its world".format(*self.args)


@dataclass(frozen=True)
class Applied:
    """One line of the record: a call that happened, and what it answered."""

    seq: int
    key: str
    api: str
    method: str
    result: Any


class World:
    """A run's world; open it for a call, close it after. Many processes may hold it open, one at a time changes it."""

    def __init__(self, folder: Path, run_id: str, db: sqlite3.Connection) -> None:
        self.folder = folder
        self.run_id = run_id
        self._db = db

    @classmethod
    def open(cls, folder: Path, run_id: str, make: Callable[[], Instances]) -> Self:
        """Open the world of a run; the first opener creates it from `make()`, which later ones never call."""
        folder.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(folder / f"{run_id}.world", timeout=BUSY_TIMEOUT_S, isolation_level=None)
        db.execute("PRAGMA synchronous=FULL")
        world = cls(folder, run_id, db)
        if not world._exists():
            with _Transaction(db):
                if not world._exists():
                    for statement in filter(str.strip, SCHEMA.split(";")):
                        db.execute(statement)
                    db.execute("INSERT INTO world VALUES (1, ?)", (pickle.dumps(make()),))
        return world

    def apply(self, key: str, api: str, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method that may change the world; its change and its record are committed together or not at all."""
        with _Transaction(self._db):
            instances = self._load()
            result = invoke(instances[api], method, arguments)
            self._db.execute("UPDATE world SET instances = ?", (pickle.dumps(instances),))
            self._db.execute(
                "INSERT INTO applied (key, api, method, result) VALUES (?, ?, ?, ?)",
                (key, api, method, json.dumps(result)),
            )
        self._witness(key, method)
        return result

    def read(self, api: str, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method that leaves the world as it is, without a transaction; a method that does not is refused."""
        instances = self._load()
        before = canonical(instances)
        result = invoke(instances[api], method, arguments)
        if canonical(instances) != before:
            raise ReadChangedWorld(api, method)
        return result

    def applied(self, key: str | None = None) -> list[Applied]:
        """The record, oldest first, of one key or of all; an empty list says that the call did not happen."""
        query = "SELECT seq, key, api, method, result FROM applied WHERE :key IS NULL OR key = :key ORDER BY seq"
        rows = self._db.execute(query, {"key": key})
        return [Applied(seq, key, api, method, json.loads(result)) for seq, key, api, method, result in rows]

    def snapshot(self) -> str:
        """The whole world as canonical JSON; equal worlds have equal snapshots."""
        return canonical(self._load())

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _exists(self) -> bool:
        return self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'applied'").fetchone() is not None

    def _load(self) -> Instances:
        (blob,) = self._db.execute("SELECT instances FROM world").fetchone()
        instances: Instances = pickle.loads(blob)
        return instances

    def _witness(self, key: str, method: str) -> None:
        """One write to a file opened for appending: lines of many processes do not mix."""
        file = os.open(self.folder / LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, f"{self.run_id},{key},{method}\n".encode())
        finally:
            os.close(file)


class _Transaction:
    """BEGIN IMMEDIATE: the state that a change starts from is read under the lock under which it is replaced."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")
