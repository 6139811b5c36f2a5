"""The temporary folders of local clusters: who uses one, and what is left when its driver was killed.

The driver holds a lock on a file in the folder as long as it lives, and all processes of the cluster carry the
folder's mark. Ray ends a cluster with its driver, except for two idle helpers when the driver was killed -9: these
and the folder stay until the next local cluster of this user is started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import psutil

from ..actors.kernel import lock_if_free, locked_file
from .processes import kill, processes_of

PREFIX: Final = "perdure-ray-"
DRIVER: Final = "driver.lock"
KILL_S: Final = 2.0


class ClusterFolder:
    """The folder of a local cluster of this process."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = locked_file(Path(self.path, DRIVER))

    def end(self) -> None:
        """End every process of the cluster, and delete the folder."""
        end_cluster(self.path)
        os.close(self._lock)


def end_cluster(folder: str) -> None:
    """SIGKILL to the cluster of this folder; its raylet is stopped before, so that it starts no more workers."""
    for one in processes_of(folder):
        if one.name == "raylet":
            with contextlib.suppress(psutil.Error):
                psutil.Process(one.pid).suspend()
    kill(processes_of(folder), KILL_S)
    shutil.rmtree(folder, ignore_errors=True)


def sweep_folders() -> None:
    """End what is left of this user's clusters whose driver is gone."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{DRIVER}"):
        with contextlib.suppress(OSError), lock_if_free(lock) as free:
            if free and lock.parent.lstat().st_uid == os.getuid():
                end_cluster(str(lock.parent))
