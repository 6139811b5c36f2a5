"""An agent whose tools misbehave in every way that a handler can. Loaded by its path, as a user's agent is."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator

from perdure.actors.agent import Agent
from perdure.actors.tools import Settled, Tool, ToolContext, ToolOptions, tool

TOOLS: list[Tool] = []


def here(name: str, effect: Any = "read_only", timeout_s: float = 30.0) -> Callable[[Callable[..., Any]], Any]:
    def register(handler: Callable[..., Any]) -> Any:
        TOOLS.append(Tool(handler, ToolOptions(effect, timeout_s=timeout_s), name))
        return handler

    return register


@here("plain")
def plain(x: int) -> int:
    return x + 1


@here("asynchronous")
async def asynchronous(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


def hidden(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A plain decorator around an async function, as a logging library has it."""

    @functools.wraps(handler)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs)

    return wrapper


@here("behind_a_decorator")
@hidden
async def behind_a_decorator(x: int) -> int:
    return x + 1


@here("generator")
def generator(x: int) -> Iterator[int]:
    yield x
    yield x + 1


@here("async_generator")
async def async_generator(x: int) -> AsyncIterator[int]:
    yield x
    await asyncio.sleep(0)
    yield x + 1


@here("endless_generator")
def endless_generator(x: int) -> Iterator[int]:
    while True:
        yield x


async def added(y: int, x: int) -> int:
    return x + y


here("partial")(functools.partial(added, 1))


class Adder:
    async def __call__(self, x: int) -> int:
        return x + 1


here("callable_object")(Adder())


@here("context")
def context(ctx: ToolContext, x: int) -> dict[str, Any]:
    return {"key": ctx.idempotency_key, "attempt": ctx.attempt, "ahead": ctx.deadline > time.time()}


@here("decimal")
def decimal(x: Decimal) -> Decimal:
    return x * 2


UNRECORDABLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "file": lambda: open(os.devnull),  # noqa: SIM115 - the open file is the point
    "lambda": lambda: lambda: 1,
    "cursor": lambda: sqlite3.connect(":memory:").cursor(),
    "nested": lambda: {"in": [threading.Lock()]},
    "coroutine": lambda: [asyncio.sleep(0)],
}


@here("unrecordable")
def unrecordable(kind: str) -> Any:
    return UNRECORDABLE[kind]()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


RAISED: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("bad"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": lambda: StopIteration(1),
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError("one"), TypeError("two")]),
    "MemoryError": MemoryError,
    "TimeoutError": TimeoutError,
    "Unspeakable": Unspeakable,
    "SystemExit": lambda: SystemExit(3),
}


@here("raises")
def raises(kind: str) -> None:
    raise RAISED[kind]()


@here("raises_async")
async def raises_async(kind: str) -> None:
    await asyncio.sleep(0)
    raise RAISED[kind]()


def refuse(value: int) -> int:
    raise RuntimeError("this validator is broken")


@here("odd_validator")
def odd_validator(x: Annotated[int, AfterValidator(refuse)]) -> int:
    return x


@here("sleeps", timeout_s=0.05)
def sleeps() -> None:
    time.sleep(60)


@here("loops", timeout_s=0.05)
def loops() -> None:
    while True:
        pass


@here("sleeps_async", timeout_s=0.05)
async def sleeps_async() -> None:
    await asyncio.sleep(60)


@here("blocks_its_loop", timeout_s=0.05)
async def blocks_its_loop() -> None:
    time.sleep(60)  # noqa: ASYNC251 - the wrong call is the point


@here("leaves_a_thread")
def leaves_a_thread() -> str:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return "left one"


@tool(effect="non_idempotent", timeout_s=30.0)
def pay(ctx: ToolContext, how: str) -> str:
    """Pay, in one of several ways to end."""
    if how == "exit":
        os._exit(1)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "stuck":
        sum(itertools.repeat(0))  # C code that looks for no signal
    if how == "fail":
        raise ValueError("no money")
    if how == "fork" and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return "paid"


@pay.reconcile
def paid(ctx: ToolContext, how: str) -> Any:
    answers: dict[str, Callable[[], Any]] = {
        "happened": lambda: Settled.happened({"by": ctx.idempotency_key}),
        "did not": Settled.did_not_happen,
        "unknown": lambda: Settled.unknown("the bank is closed \ud800"),
        "lock": lambda: Settled.happened(threading.Lock()),
        "nonsense": lambda: True,
        "raises": lambda: RAISED["KeyboardInterrupt"](),
    }
    answer = answers[how]()
    if isinstance(answer, BaseException):
        raise answer
    return answer


TOOLS.append(pay)
agent = Agent(name="odd", model="script:none.jsonl", tools=tuple(TOOLS))
