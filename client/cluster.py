"""Starting and joining Ray clusters, with the settings that perdure needs of them.

Imported before Ray is: the environment that Ray reads at import and at the start of its processes is set here. A
cluster is joined only by an explicit address; without one a local cluster of our own is started, and leaves nothing
behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from ..store.errors import UsageError
from .folders import ClusterFolder, sweep_folders
from .notices import Aside
from .processes import marked

CLUSTER_ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_worker_niceness": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_kill_worker_timeout_milliseconds": "500",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_timeout_ms_task_wait_for_death_info": "100",
    "RAY_core_worker_internal_heartbeat_ms": "100",
    "RAY_kill_idle_workers_interval_ms": "60000",
}
"""Environment of the clusters that we start, where the user has not set it.

Idle workers are ended once a minute, not at once: under `perdure up`, whose own job is over, that would be every tool
worker after every call, and the next call would wait for the start of another.
"""
OBJECT_STORE_BYTES = 100 * 2**20
REACH_S = 5.0
"""How long a cluster's address may take to accept a connection."""


def prepare_environment() -> None:
    """Set what Ray reads at import. Safe to repeat; keeps what the user has set."""
    for name, value in CLUSTER_ENV.items():
        os.environ.setdefault(name, value)


def namespace_digest(store: str) -> str:
    """A short name of a store, for the Ray namespace and for lock files."""
    return hashlib.sha256(store.encode()).hexdigest()[:12]


class Cluster:
    """A connection to a Ray cluster: to one that runs at `address`, or to a local one of our own."""

    def __init__(self, address: str | None = None, num_cpus: int | None = None) -> None:
        self.address, self._num_cpus = address, num_cpus
        self._folder: ClusterFolder | None = None
        self._aside: Aside | None = None
        """Stands while we are connected."""

    def start(self) -> Any:
        """Connect, and return the ray module. Raises UsageError when no cluster answers at the address."""
        if self.address is not None:
            check_reachable(self.address)
        early = "ray" in sys.modules
        prepare_environment()
        import ray

        if ray.is_initialized():
            raise UsageError(
                "this process is connected to a Ray cluster already; leave it first: one Runtime at a time"
            )
        if early:  # it has read another environment: have it read this one
            ray._raylet.Config.initialize("")  # type: ignore[attr-defined]

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        if self.address is None:
            sweep_folders()
            self._folder = ClusterFolder()
            options |= {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": self._num_cpus,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": self._folder.path,
            }
        else:
            options["address"] = self.address
        self._aside = Aside()
        try:
            with self._aside.here(), marked(self._folder.path) if self._folder else contextlib.nullcontext():
                ray.init(**options)
        except Exception as error:  # Ray raises a bare Exception for a node that starts too slowly
            self.stop()
            raise UsageError(f"no Ray cluster answers at {self.address or 'this machine'}: {error}") from error
        return ray

    def stop(self) -> None:
        """Leave the cluster; a local one ends with all its processes. Nothing happens where start() has failed."""
        if self._aside is None:
            return
        import ray

        with self._aside.here():
            ray.shutdown()
        self._aside.end()
        self._aside = None
        self._clean()

    def kill(self) -> None:
        """End a local cluster's processes without a farewell; one that was joined is left alone."""
        self._clean()

    def _clean(self) -> None:
        folder, self._folder = self._folder, None
        if folder:
            folder.end()


def check_reachable(address: str) -> None:
    """Raises UsageError when nothing listens at an address; Ray itself would go on asking for many minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if address in ("auto", "local"):
        raise UsageError(f"--address {address}: name the cluster's HOST:PORT")
    if not (host and colon and port.isdecimal() and int(port) < 2**16):
        raise UsageError(f"no Ray cluster can be at {address!r}: write it as HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        raise UsageError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error


def remove_actors(namespace: str) -> None:
    """End every actor of a store on the cluster that this process is connected to; the supervisor first."""
    import ray

    every = ray.util.list_named_actors(all_namespaces=True)
    names = [entry["name"] for entry in every if entry["namespace"] == namespace]
    for name in sorted(names, key=lambda name: name != "supervisor"):
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is gone already
            ray.kill(ray.get_actor(name, namespace))


def store_url(store: str | os.PathLike[str]) -> str:
    """The store's URL with an absolute path, the same for every process of the machine."""
    text = os.fspath(store)
    if "://" not in text:
        return str(Path(text).expanduser().resolve())
    head, _, path = text.partition(":///")
    if head.startswith("sqlite") and path:
        return str(Path(path).resolve())
    return text
