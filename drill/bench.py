"""Where attempts of tools run in a drill: processes that die with the journal, as Ray's workers do.

A life forks a foundry before it starts a thread or loads the agent; the foundry forks a worker whenever the life
wants one, and ends when the life does. A worker is bound to the foundry, so none outlives its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from ..actors.attempt import Outcome, Work
from ..actors.children import Named
from ..actors.kernel import prove_dead
from ..actors.proof import Looked
from ..actors.pursuit import TaskDied
from ..actors.tools import ToolOptions
from ..store.events import ToolCallStarted
from ..store.rows import CallRow
from .ledger import Ledger, Note
from .points import Striker
from .worker import NODE, Worker

LINE_MAX: Final = 1 << 30
PARENT_POLL_S: Final = 0.05


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; where it cannot, a thread looks out for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_look_out, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _look_out(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def start_foundry(striker: Striker, ledger: Ledger) -> socket.socket:
    """Fork the foundry of this process; the socket takes wishes for workers. No thread may run yet."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _found(theirs, striker, ledger)
    theirs.close()
    return ours


def _found(wishes: socket.socket, striker: Striker, ledger: Ledger) -> None:
    """Fork a worker per wish, which is its end of a connection, until the life has ended. Does not return."""
    while True:
        wish, descriptors, _, _ = socket.recv_fds(wishes, 1, 1)
        if not wish:
            os._exit(0)
        founder = os.getpid()
        if os.fork() == 0:
            die_with_parent(founder)
            wishes.close()
            Worker(socket.socket(fileno=descriptors[0]), striker, ledger).serve()
        os.close(descriptors[0])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


class Bench:
    """`Tasks` in processes of the drill."""

    def __init__(self, foundry: socket.socket, ledger: Ledger) -> None:
        self._foundry, self._ledger = foundry, ledger
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.begin: Any = None
        """The journal's `begin`, which is there only after the journal."""

    async def run(self, work: Work, options: ToolOptions) -> Outcome:
        reader, writer = self._idle.pop() if self._idle else await self._worker()
        writer.write(work.model_dump_json().encode() + b"\n")
        while line := await _line(reader):
            said = json.loads(line)
            if "outcome" in said:
                self._idle.append((reader, writer))
                return Outcome.model_validate(said["outcome"])
            mark = ToolCallStarted.model_validate(said["mark"]) if said["mark"] else None
            refusal = await self.begin(work.run_id, work.tool_call_id, work.attempt, NODE, mark)
            writer.write(json.dumps(refusal).encode() + b"\n")
        writer.close()
        self._ledger.write(Note("died", tool=work.name, call=work.tool_call_id, attempt=work.attempt))
        raise TaskDied("the process exited, crashed or was killed")

    async def _worker(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._foundry, [b"w"], [theirs.fileno()])
        return await asyncio.open_connection(sock=ours, limit=LINE_MAX)

    async def prove_dead(self, call: CallRow) -> bool:
        return await asyncio.to_thread(prove_dead, call.lock)

    def begun(self, run_id: str, tool_call_id: str, attempt: int, node: str, pid: int) -> None:
        return None

    async def stop(self, run_id: str, tool_call_id: str) -> None:
        return None

    async def end_children(self, wanted: str, nodes: Collection[str]) -> None:
        return None

    async def look(self, store: str, everywhere: bool = True) -> list[Looked]:
        return []

    async def end(self, node: str, processes: Sequence[Named]) -> None:
        return None

    def kill(self, run_id: str, tool_call_id: str) -> None:
        return None  # a run that has ended ends its life, and that its workers


async def _line(reader: asyncio.StreamReader) -> bytes:
    """What a worker says, or nothing when it is gone."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""
