"""One attempt of a tool call, as it runs inside a Ray task.

Order matters: the kernel's deadline is armed and the lock taken before leave to begin is asked, the handler runs
only after leave was given, and its result is left in the lock file before it is returned. So whoever finds the
lock free knows that the attempt is over, and either reads its result or has to ask the world.

Nothing that a handler does may escape: every ending but the death of the process is an Outcome, as JSON bytes.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from ..store.errors import PerdureError
from ..store.events import AgentRef, Effect, ToolCallStarted
from . import stopping
from .children import Children
from .kernel import AttemptLock, Deadline, boot_id, own_start, runtime_folder
from .loading import loaded
from .results import Keep, NoJsonForm, error_text, keep_all, plain_error, recorded, throw_away, valid_text
from .servers import RemoteTool
from .stopping import GRACE_S as GRACE_S
from .stopping import Again, Stoppable, TimedOut, served, stopped_by
from .tools import Cancelled, EffectUnknown, Misfitting, Settled, Tool, ToolContext

ITEMS_MAX = 10_000
"""How many values of a generator are recorded."""
SERVER_S = 1.0
"""How long an MCP server has to end by itself."""


class Work(BaseModel):
    """What a task needs to know of its attempt; all of it plain JSON."""

    model_config = ConfigDict(frozen=True)
    run_id: str
    turn_index: int
    tool_call_id: str
    attempt: int
    name: str
    arguments: str
    effect: Effect
    idempotency_key: str
    agent: AgentRef
    metadata: dict[str, JsonValue]
    timeout_s: float
    store: str
    probe: bool = False
    apart: bool = False
    """Whether it needs a worker that serves only this version of the agent's code."""
    remote: tuple[str, str] | None = None
    """The MCP server that has the tool, and its name there."""


class Outcome(BaseModel):
    """How an attempt ended. `content` is JSON text of a value or error, or says why there is none. Where its handler
    ran, `node` and `pid` are its process and `took_s` is how long it ran.

    result: the call's result. exited: the handler left its process, or lost the server that it asked, so the effect is
    unknown. timeout, stopped: it was interrupted. spared: it was told to stop before its handler began. refused: it
    never had leave to begin. died: its process ended, for the reason in `content`. happened, did_not_happen, unknown: a
    probe's answer.
    """

    model_config = ConfigDict(frozen=True)
    kind: Literal[
        "result", "exited", "timeout", "stopped", "spared", "refused", "died", "happened", "did_not_happen", "unknown"
    ]
    content: str = '""'
    is_error: bool = False
    node: str = ""
    pid: int = 0
    took_s: float | None = None
    left: bool = False
    """Whether the handler may have left processes behind."""


Begin = Callable[[ToolCallStarted | None], str | None]
"""Asks the journal for leave to begin, with the start mark where one is due. Returns why not, or None."""


class _Journal(NamedTuple):
    """What an attempt asks of the journal."""

    begin: Begin
    keep: Keep


def perform(work: Work, begin: Begin, node: str, keep: Keep = throw_away) -> Outcome:
    """Run one attempt, or one probe, to its end. `keep` keeps what of a value is too large for the log."""
    end_a_spoilt_process()
    deadline = Deadline(work.timeout_s + GRACE_S)

    def leave(mark: ToolCallStarted | None) -> str | None:
        deadline.restart(work.timeout_s + GRACE_S)  # loading the agent has taken none of the handler's time
        return begin(mark)

    try:
        with served(Stoppable(work.store, work.run_id, work.tool_call_id, work.attempt, deadline)):
            return _performed(work, _Journal(leave, keep), node)
    except PerdureError as error:
        return Outcome(kind="result", content=plain_error(type(error).__name__, str(error)), is_error=True)
    finally:
        deadline.disarm()


def _performed(work: Work, journal: _Journal, node: str) -> Outcome:
    children = Children(work.store, work.run_id, work.tool_call_id, work.attempt)
    if work.probe:
        began, answer = time.monotonic(), _probe(work, _tool(work), journal.keep)
        children.end()
        return answer.model_copy(update={"node": node, "pid": os.getpid(), "took_s": time.monotonic() - began})
    call = _bound(work)
    if isinstance(call, Outcome):
        return call
    if work.effect == "non_idempotent":
        return _marked(work, call, journal, node, children)
    refusal = journal.begin(None)
    return Outcome(kind="refused", content=refusal) if refusal else _handled(work, call, journal, node, children)


def _bound(work: Work) -> Callable[[], Any] | Outcome:
    """The handler with its arguments, or why it cannot be called; nothing has begun by then."""
    tool = _tool(work)
    try:
        return tool.bind(tool.handler, _context(work), work.arguments)
    except Misfitting as error:
        return Outcome(kind="result", content=plain_error("InvalidArguments", str(error)), is_error=True)
    except ValidationError as error:
        text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        return Outcome(kind="result", content=plain_error("InvalidArguments", text), is_error=True)
    except Exception as error:  # noqa: BLE001 - a validator of the user's may raise anything
        return Outcome(kind="result", content=error_text(error), is_error=True)


def _tool(work: Work) -> Tool:
    agent = loaded(work.agent.ref, work.agent.digest).agent
    if work.remote:
        server, there = work.remote
        found = next((each for each in agent.servers if each.name == server), None)
        tool: Tool | None = RemoteTool(found, there, work.effect) if found else None
    else:
        tool = agent.tool(work.name)
    if tool is None:
        raise PerdureError(f"the agent has no tool {work.name!r} any more")
    return tool


def _context(work: Work) -> ToolContext:
    return ToolContext(
        run_id=work.run_id,
        turn_index=work.turn_index,
        tool_call_id=work.tool_call_id,
        attempt=work.attempt,
        idempotency_key=work.idempotency_key,
        deadline=time.time() + work.timeout_s,
        metadata=work.metadata,
        cancelled=stopping.serving.cancelled if stopping.serving else Cancelled(),
    )


def _marked(work: Work, call: Callable[[], Any], journal: _Journal, node: str, children: Children) -> Outcome:
    """A non_idempotent attempt: lock, mark, handler, result in the lock file, in this order."""
    nonce = uuid4().hex
    lock = AttemptLock(runtime_folder(work.store) / f"{work.run_id}.{work.tool_call_id}.{work.attempt}.{nonce[:8]}")
    try:
        mark = ToolCallStarted(
            tool_call_id=work.tool_call_id,
            attempt=work.attempt,
            nonce=nonce,
            node=node,
            boot_id=boot_id(),
            pid=os.getpid(),
            pid_started=own_start(),
            lock=str(lock.path),
            hold_s=work.timeout_s + GRACE_S,
        )
        if refusal := journal.begin(mark):
            lock.path.unlink()
            return Outcome(kind="refused", content=refusal)
        outcome = _handled(work, call, journal, node, children)
        if outcome.kind == "result":
            lock.leave(outcome.model_dump_json().encode())
        return outcome
    finally:
        lock.release()


def _probe(work: Work, tool: Tool, keep: Keep = throw_away) -> Outcome:
    if tool.probe is None:
        return Outcome(kind="unknown", content="the tool has no reconcile probe any more")
    box: list[Settled] = []
    contents: list[str] = []

    def ask() -> None:
        answer = _resolve(tool.bind(tool.probe, _context(work), work.arguments), work.timeout_s)  # type: ignore[arg-type]
        if not isinstance(answer, Settled):
            raise TypeError(f"a reconcile probe returns Settled, not {type(answer).__name__}")
        if answer.outcome == "happened":
            contents.append(_recorded(answer.value, keep))
        box.append(answer)

    outcome = _run(work, ask)
    if not box:
        return Outcome(kind="unknown", content=f"the probe failed: {outcome.content}")
    if box[0].outcome == "happened":
        return Outcome(kind="happened", content=contents[0])
    kind: Literal["did_not_happen", "unknown"] = "did_not_happen" if box[0].outcome == "did_not_happen" else "unknown"
    return Outcome(kind=kind, content=valid_text(box[0].why))


def _handled(work: Work, call: Callable[[], Any], journal: _Journal, node: str, children: Children) -> Outcome:
    """The outcome of the handler, with where and how long it ran. What it has started is ended, unless it returned."""
    began = time.monotonic()
    outcome = _run(work, call, journal.keep)
    took_s = time.monotonic() - began
    ends = outcome.kind != "result" or (stopping.serving is not None and stopping.serving.cancelled.came)
    if work.remote:  # its server is to go by itself, which it is to do once its standard input is closed
        left = not children.end(SERVER_S if outcome.kind == "result" else 0.0)
    else:
        left = not children.end() if ends else bool(children.found())
    if left:
        children.leave(*children.found())
    if spoilt():  # the thread goes on in this process
        children.leave((os.getpid(), own_start()))
    return outcome.model_copy(update={"node": node, "pid": os.getpid(), "took_s": took_s, "left": left or spoilt()})


def _run(work: Work, call: Callable[[], Any], keep: Keep = throw_away) -> Outcome:
    """Call the handler; every ending is an Outcome. A process that it forked and that comes back here ends."""
    pid, threads = os.getpid(), set(threading.enumerate())
    try:
        if stopping.serving and stopping.serving.cancelled.came:
            return Outcome(kind="spared", content=plain_error("Cancelled", "stopped before it began"), is_error=True)
        return Outcome(kind="result", content=_recorded(_resolve(call, work.timeout_s), keep))
    except TimedOut:
        text = plain_error("Timeout", f"the tool was interrupted after {work.timeout_s:g} s")
        return Outcome(kind="timeout", content=text, is_error=True)
    except SystemExit as error:
        text = plain_error("ProcessExited", f"the tool's process ended itself with code {error.code!r}")
        return Outcome(kind="exited", content=text, is_error=True)
    except EffectUnknown as error:
        return Outcome(kind="exited", content=plain_error("EffectUnknown", str(error)), is_error=True)
    except NoJsonForm as error:
        return Outcome(kind="result", content=plain_error("NoJsonForm", str(error)), is_error=True)
    except BaseException as error:  # noqa: BLE001 - an error of the handler, of whatever class, is its result
        if stopping.serving and stopping.serving.cancelled.came and stopped_by(error):
            return Outcome(kind="stopped", content=plain_error("Cancelled", "it was interrupted"), is_error=True)
        return Outcome(kind="result", content=error_text(error), is_error=True)
    finally:
        if os.getpid() != pid:  # or it would go on as its parent does, and answer over its parent's connections
            os._exit(0)
        _spoilt.update(each for each in threading.enumerate() if each not in threads and not isinstance(each, Again))


def _recorded(value: Any, keep: Keep) -> str:
    """A value as it is recorded, once what that leaves out is kept. Raises NoJsonForm."""
    content, blobs = recorded(value)
    keep_all(blobs, keep)
    return content


def _resolve(call: Callable[[], Any], timeout_s: float) -> Any:
    """The value of a handler of any kind: plain or async function, generator, or one that hides a coroutine."""
    with _alarm(timeout_s), _interruptible():
        value = call()
        if inspect.isgenerator(value):
            return _bounded(value)
    if inspect.isawaitable(value) or inspect.isasyncgen(value):
        with _alarm(timeout_s + 0.5):  # for a coroutine that blocks its loop
            return asyncio.run(_awaited(value, timeout_s))
    return value


def _interruptible() -> AbstractContextManager[None]:
    return stopping.serving.interruptible() if stopping.serving else nullcontext()


async def _awaited(value: Any, timeout_s: float) -> Any:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            with stopping.serving.cancellable() if stopping.serving else nullcontext():
                return await _gathered(value) if inspect.isasyncgen(value) else await value
    except TimeoutError as error:
        if limit.expired():
            raise TimedOut from error
        raise


async def _gathered(values: AsyncIterator[Any]) -> list[Any]:
    items = []
    async for item in values:
        items.append(item)
        if len(items) > ITEMS_MAX:
            raise OverflowError(f"the tool yielded over {ITEMS_MAX} values")
    return items


def _bounded(values: Iterator[Any]) -> list[Any]:
    items = []
    for item in values:
        items.append(item)
        if len(items) > ITEMS_MAX:
            raise OverflowError(f"the tool yielded over {ITEMS_MAX} values")
    return items


@contextmanager
def _alarm(after_s: float) -> Iterator[None]:
    """Raise TimedOut in this (main) thread after a time."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_spoilt: set[threading.Thread] = set()
"""Threads that handlers left running in this process."""


def spoilt() -> bool:
    """Whether a handler left a thread running in this process."""
    return any(thread.is_alive() for thread in _spoilt)


def end_a_spoilt_process() -> None:
    """A process in which a handler left a thread serves no further attempt: that thread may act at any time."""
    if spoilt():
        os._exit(0)
