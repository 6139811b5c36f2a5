"""A supervisor that stays: `up` starts it, `down` ends it, commands find it.

What was started is written to a file beside the store: the cluster's address, and its processes by pid and start
time. Only these are ever ended. On a cluster that was joined, only our actors are.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from ..actors.kernel import boot_id
from ..store.errors import PerdureError, UsageError
from ..store.log import EventLog
from ..store.sql import SqlLog, open_log
from .cluster import CLUSTER_ENV, OBJECT_STORE_BYTES, Cluster, namespace_digest, remove_actors, store_url
from .lease import SUPERVISOR, lease_is_over, wait_for_lease
from .processes import MARK, Known, end, processes_of
from .runtime import Runtime

START_S: Final = 60.0
CORE: Final = ("gcs_server", "raylet")
"""Without these a cluster is dead."""
TERM_S: Final = 3.0
REST_TERM_S: Final = 1.0
KILL_S: Final = 5.0


class Standing(BaseModel):
    """What `up` started, as the state file keeps it."""

    model_config = ConfigDict(frozen=True)
    store: str
    namespace: str
    address: str = ""
    folder: str = ""
    """Ray's folder of a cluster that we started; empty for one that was joined."""
    boot: str
    started_at: float
    processes: tuple[Known, ...] = ()

    @property
    def joined(self) -> bool:
        """Whether the cluster is somebody else's."""
        return not self.folder

    def cluster_lives(self) -> bool:
        """Whether the processes of a cluster of our own still run."""
        core = [one for one in self.processes if one.name.startswith(CORE)]
        return self.boot == boot_id() and bool(core) and all(one.lives for one in core)

    async def works(self, event_log: EventLog) -> bool:
        """Whether the supervisor is there to take work: by its processes, or on a joined cluster by its lease."""
        if not self.joined:
            return self.cluster_lives()
        lease = await event_log.lease(SUPERVISOR)
        return lease is not None and not lease_is_over(lease)


def state_file(db: str) -> Path:
    """Where it is noted what `up` started for a store."""
    store = store_url(db)
    if "://" not in store:
        return Path(f"{store}.up.json")
    return Path.home() / ".perdure" / f"{namespace_digest(store)}.up.json"


def find_standing(db: str) -> Standing | None:
    """What `up` noted for a store; whether that still works is another question."""
    try:
        return Standing.model_validate_json(state_file(db).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{state_file(db)} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise UsageError(f"{state_file(db)} is damaged; if nothing runs here, delete it") from error


def _note(db: str, standing: Standing) -> None:
    path = state_file(db)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(standing.model_dump_json(indent=1))
    os.replace(draft, path)


@contextlib.contextmanager
def _one_at_a_time(db: str) -> Iterator[None]:
    """`up` and `down` of a store exclude each other."""
    path = state_file(db).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = "another `perdure up` or `perdure down` is at work on this store"
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # unlinked by the one before us
                raise UsageError(busy)
        except OSError as error:
            raise UsageError(busy) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


# -- up -----------------------------------------------------------------------------------------------------


async def up(
    db: str,
    *,
    address: str | None = None,
    actors: int | None = None,
    concurrency: int | None = None,
    num_cpus: int | None = None,
) -> Standing:
    """Start a supervisor that stays. Raises UsageError or LeaseHeld before anything is started."""
    event_log = await open_log(db)
    try:
        with _one_at_a_time(db):
            if (before := find_standing(db)) and await before.works(event_log):
                raise UsageError(f"a supervisor is up already for this store, at {before.address}")
            await wait_for_lease(event_log)
            if before:
                await _end(db, before, event_log)
            store = store_url(db)
            standing = Standing(
                store=store, namespace=f"perdure-{namespace_digest(store)}", boot=boot_id(), started_at=time.time()
            )
            try:
                standing = await _start(db, standing, address, num_cpus)
                async with Runtime(db, address=standing.address, actors=actors, concurrency=concurrency, standing=True):
                    pass
            except BaseException:
                if found := find_standing(db):
                    await _end(db, found, event_log)
                raise
            return standing
    finally:
        await event_log.close()


async def _start(db: str, standing: Standing, address: str | None, num_cpus: int | None) -> Standing:
    if address:
        standing = standing.model_copy(update={"address": address})
        _note(db, standing)
        return standing
    folder = tempfile.mkdtemp(prefix="perdure-up-")
    standing = standing.model_copy(update={"folder": folder})
    _note(db, standing)  # before there is anything to end
    address = await _ray_start(folder, num_cpus)
    standing = standing.model_copy(update={"address": address, "processes": tuple(processes_of(folder))})
    _note(db, standing)
    return standing


async def _ray_start(folder: str, num_cpus: int | None) -> str:
    """`ray start --head` with our settings; the address of the cluster."""
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment = CLUSTER_ENV | inherited | {MARK: folder}
    options = [
        "--head",
        "--port=0",
        "--node-ip-address=127.0.0.1",
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--temp-dir={folder}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--num-cpus={num_cpus or os.cpu_count() or 1}",
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ray.scripts.scripts", "start", *options),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(START_S):
            said, _ = await process.communicate()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if isinstance(error, TimeoutError):
            raise PerdureError(f"Ray did not start within {START_S:g} s") from error
        raise
    try:
        return (Path(folder) / "ray_current_cluster").read_text().strip()
    except OSError as error:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise PerdureError(f"Ray did not start: {last[0]}") from error


# -- down ---------------------------------------------------------------------------------------------------


async def down(db: str) -> Standing | None:
    """End what `up` started; what it was, or None if nothing is noted. Raises PerdureError if something stays."""
    with _one_at_a_time(db):
        standing = find_standing(db)
        if standing is None:
            return None
        try:
            event_log = await open_log(db, create=False)
        except PerdureError:  # the store is gone: what works on it has to go all the same
            await _end(db, standing, None)
            return standing
        try:
            await _end(db, standing, event_log)
        finally:
            await event_log.close()
        return standing


async def _end(db: str, standing: Standing, event_log: SqlLog | None) -> None:
    if standing.joined:
        if event_log is None or await standing.works(event_log):
            await asyncio.to_thread(_leave_cluster, standing)
    else:
        await asyncio.to_thread(_end_processes, standing)
    if event_log:
        await _drop_lease(event_log)
    state_file(db).unlink(missing_ok=True)


def _leave_cluster(standing: Standing) -> None:
    cluster = Cluster(standing.address)
    cluster.start()
    try:
        remove_actors(standing.namespace)
    finally:
        cluster.stop()


def _end_processes(standing: Standing) -> None:
    """The raylet first, since it ends its workers; then whatever is left."""
    recorded = standing.processes if standing.boot == boot_id() else ()
    every = list(dict.fromkeys([*processes_of(standing.folder, recorded), *recorded]))
    raylets = [one for one in every if one.name == "raylet"]
    end(raylets, TERM_S, KILL_S)
    if left := end([one for one in every if one.lives], REST_TERM_S, KILL_S):
        raise PerdureError(f"processes {', '.join(str(one.pid) for one in left)} could not be ended")
    shutil.rmtree(standing.folder, ignore_errors=True)


async def _drop_lease(event_log: SqlLog) -> None:
    lease = await event_log.lease(SUPERVISOR)
    if lease and lease_is_over(lease):
        await event_log.drop_lease(SUPERVISOR, lease.nonce)
