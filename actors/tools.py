"""Tools as users declare them: a function, its effect class, who has to approve a call, and, for non_idempotent
effects, a probe.

    @tool(effect="non_idempotent", approval="always")
    def send_refund(ctx: ToolContext, order_id: str, amount: Decimal) -> str: ...

    @send_refund.reconcile
    def refund_exists(ctx: ToolContext, order_id: str, amount: Decimal) -> Settled: ...

The arguments' schema comes from the signature through pydantic. Imports no Ray.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, JsonValue, PydanticUserError, create_model
from pydantic_core import to_json

from ..store.errors import UsageError
from ..store.events import Decision, Effect, canonical
from .exact import validated

Handler = Callable[..., Any]
_H = TypeVar("_H", bound=Handler)
EFFECTS: tuple[Effect, ...] = get_args(Effect)
_TAKEN = frozenset(name for name in dir(BaseModel) if name.startswith("model_"))
"""Names that a pydantic model needs for itself."""


class Misfitting(ValueError):
    """Arguments that a tool does not take."""


class EffectUnknown(Exception):
    """Raised by a handler that cannot tell whether its effect happened: a non_idempotent call is settled, another one
    is executed again."""


class Cancelled:
    """Whether an attempt is to stop, in the manner of threading.Event; also true or false by itself.

    A handler that has asked is expected to look again and to return, or raise, soon. One that never asks is interrupted
    by KeyboardInterrupt, or asyncio's CancelledError if it is async. Both are killed when the grace time is over.
    """

    def __init__(self) -> None:
        self.came = self.asked = False

    def is_set(self) -> bool:
        self.asked = True
        return self.came

    def __bool__(self) -> bool:
        return self.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is so, or the time in seconds is over. Says whether it is so."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))  # not a lock: this is set by a signal, in the very thread that waits
        return self.came


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a handler or probe knows about the call that it serves.

    `idempotency_key` is the same over all attempts of one call. `deadline` is the time, in seconds since the
    epoch, after which the kernel ends the attempt.

    What a handler starts, and does not end, is ended with its run; and with its attempt where that is stopped, times
    out or dies. By no means does it live longer, in a session of its own or not.
    """

    run_id: str
    turn_index: int
    tool_call_id: str
    attempt: int
    idempotency_key: str
    deadline: float
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    cancelled: Cancelled = field(default_factory=Cancelled, compare=False, repr=False)

    def run_process(
        self,
        argv: Sequence[str],
        *,
        input: str | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, in a process group of its own; what it wrote to stdout and stderr.

        Where the attempt is stopped or times out meanwhile, the group gets SIGTERM, and SIGKILL after two seconds; for
        the handler that is KeyboardInterrupt, or a BaseException of the runtime's own. The program is killed if the
        attempt's process dies. With `check`, a return code other than 0 raises CalledProcessError.
        """
        from .children import run_process  # here, since it takes psutil, which declaring a tool does not need

        return run_process(argv, self.cancelled, input, cwd, env, check)


@dataclass(frozen=True, slots=True)
class ApprovalAsk:
    """What a policy knows about the call that it rules on. `arguments` are those that the model gave; they fit."""

    run_id: str
    tool: str
    arguments: dict[str, Any]
    effect: Effect
    turn_index: int
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    """The run's own, as it was launched."""


Word = Literal["allow", "ask", "deny"]
"""What a policy can rule."""
Answer = str | tuple[str, str]
"""A word, or a word and why."""
Policy = Callable[[ApprovalAsk], Answer | Awaitable[Answer]]


@dataclass(frozen=True)
class Approval:
    """Which calls of a tool a person has to approve. `timeout_s` is how long one has for it, in seconds, None for ever;
    then `default` decides or, without one, the run times out."""

    rule: Literal["never", "always"] | Policy = "never"
    timeout_s: float | None = None
    default: Decision | None = None

    def __post_init__(self) -> None:
        if not callable(self.rule) and self.rule not in ("never", "always"):
            raise UsageError(f"unknown approval {self.rule!r}: never, always or a policy function")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise UsageError("a tool needs approval_timeout_s > 0, or None for no deadline")
        if self.default is not None and self.default not in get_args(Decision):
            raise UsageError(f"unknown approval_default {self.default!r}: approve, reject or None")
        if self.default is not None and self.timeout_s is None:
            raise UsageError("approval_default is decided when approval_timeout_s has passed: give that too")


@dataclass(frozen=True, slots=True)
class Settled:
    """A probe's answer to "did this effect happen?"."""

    outcome: str
    value: Any = None
    why: str = ""

    @classmethod
    def happened(cls, result: Any) -> Settled:
        """It happened; `result` becomes the result of the call."""
        return cls("happened", value=result)

    @classmethod
    def did_not_happen(cls) -> Settled:
        """It did not happen and cannot happen any more; the call is dispatched again."""
        return cls("did_not_happen")

    @classmethod
    def unknown(cls, why: str) -> Settled:
        """The world does not tell."""
        return cls("unknown", why=why)


@dataclass(frozen=True)
class ToolOptions:
    """How attempts of a tool are run. Times in seconds; resources as in `ray.remote`.

    settles_after_s: how long after an attempt is proven dead a request of it may still land. None: timeout_s.
    attempts_max: how many attempts may die with their process before the call gets an error result.
    """

    effect: Effect
    timeout_s: float = 60.0
    settles_after_s: float | None = None
    attempts_max: int = 3
    num_cpus: float = 1.0
    memory: int | None = None
    resources: dict[str, float] | None = None
    has_probe: bool = False
    remote: tuple[str, str] | None = None
    """The MCP server that has the tool, and its name there."""

    @property
    def quiet_s(self) -> float:
        """Time from the proof of death until the world may be asked for a final answer."""
        return self.timeout_s if self.settles_after_s is None else self.settles_after_s


class Tool:
    """A declared tool. Made by `@tool`; callable like the function it wraps."""

    def __init__(
        self, handler: Handler, options: ToolOptions, name: str | None = None, approval: Approval | None = None
    ) -> None:
        self.handler, self.options, self.approval = handler, options, approval or Approval()
        self.name = name or _name_of(handler)
        self.description = inspect.getdoc(handler) or ""
        self.probe: Handler | None = None
        self.schema: dict[str, JsonValue]
        """JSON schema of the arguments."""
        self.takes_context, self.arguments, self.schema = _arguments_model(handler, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)

    def reconcile(self, probe: _H) -> _H:
        """Register the probe that tells whether an interrupted call took effect. Returns it unchanged."""
        if self.options.effect != "non_idempotent":
            raise UsageError(f"tool {self.name!r} is {self.options.effect}: only non_idempotent tools are reconciled")
        self.probe = probe
        self.options = ToolOptions(**{**vars(self.options), "has_probe": True})
        return probe

    @property
    def facts(self) -> dict[str, JsonValue]:
        """A digest of its schema, its effect class and its timeout in seconds."""
        return {"schema": self._schema_digest, "effect": self.options.effect, "timeout_s": self.options.timeout_s}

    @functools.cached_property
    def _schema_digest(self) -> str:
        return hashlib.sha256(canonical(self.schema).encode()).hexdigest()[:16]

    def parse(self, arguments: str) -> dict[str, Any]:
        """The values of arguments that fit. Raises pydantic.ValidationError, or Misfitting."""
        parsed = validated(self.arguments, arguments)
        return {name: getattr(parsed, name) for name in type(parsed).model_fields}

    def bind(self, handler: Handler, context: ToolContext, arguments: str) -> Callable[[], Any]:
        """The handler (or probe) with validated arguments. Raises as `parse` does."""
        first = (context,) if self.takes_context else ()
        return functools.partial(handler, *first, **self.parse(arguments))

    def __repr__(self) -> str:
        return f"<tool {self.name} ({self.options.effect})>"


def tool(
    effect: Effect,
    *,
    name: str | None = None,
    timeout_s: float = 60.0,
    settles_after_s: float | None = None,
    attempts_max: int = 3,
    num_cpus: float = 1.0,
    memory: int | None = None,
    resources: dict[str, float] | None = None,
    approval: Literal["never", "always"] | Policy = "never",
    approval_timeout_s: float | None = None,
    approval_default: Decision | None = None,
) -> Callable[[Handler], Tool]:
    """Declare a tool. `effect` says what an attempt may do to the world:

    read_only: nothing. idempotent_write: something that the service does at most once per idempotency key, so
    attempts may overlap and repeat. non_idempotent: anything else; an interrupted one is settled, not repeated.

    `approval` says whether a person has to approve a call before it runs: "never", "always", or a policy, plain or
    async, that gets an ApprovalAsk and answers "allow", "ask" or "deny", alone or with a reason as (word, reason).
    A policy that fails, or takes over 30 s, asks. Nobody decides within approval_timeout_s seconds: approval_default
    ("approve" or "reject") counts, or the run times out.
    """
    if effect not in EFFECTS:
        raise UsageError(f"unknown effect class {effect!r}: read_only, idempotent_write or non_idempotent")
    if timeout_s <= 0 or attempts_max < 1:
        raise UsageError("a tool needs timeout_s > 0 and attempts_max >= 1")
    options = ToolOptions(effect, timeout_s, settles_after_s, attempts_max, num_cpus, memory, resources)
    gate = Approval(approval, approval_timeout_s, approval_default)
    return lambda handler: Tool(handler, options, name, gate)


def _name_of(handler: Handler) -> str:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__name__", type(handler).__name__)


def _arguments_model(handler: Handler, name: str) -> tuple[bool, type[BaseModel], dict[str, JsonValue]]:
    """Whether the handler takes a context first; a model of its other parameters, and their schema."""
    target = handler.func if isinstance(handler, functools.partial) else handler
    if not inspect.isroutine(target) and not inspect.isclass(target):
        target = type(target).__call__
    try:
        hints = get_type_hints(target, include_extras=True)
    except (NameError, TypeError) as error:
        raise UsageError(f"tool {name!r}: a type hint cannot be resolved: {error}") from error
    parameters = list(inspect.signature(handler).parameters.values())
    takes_context = bool(parameters) and (hints.get(parameters[0].name) is ToolContext or parameters[0].name == "ctx")
    fields: dict[str, Any] = {}
    for parameter in parameters[1 if takes_context else 0 :]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UsageError(f"tool {name!r}: parameter {parameter} has no place in a JSON object")
        if parameter.name.startswith("_") or parameter.name in _TAKEN:
            raise UsageError(f"tool {name!r}: no parameter can be called {parameter.name!r}")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    try:
        model = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = json.loads(to_json(model.model_json_schema(), inf_nan_mode="strings"))
        return takes_context, model, schema
    except (PydanticUserError, NameError) as error:
        raise UsageError(f"tool {name!r}: its parameters have no JSON schema: {str(error).splitlines()[0]}") from error
