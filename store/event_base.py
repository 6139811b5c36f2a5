"""What all events have, and values that many of them hold."""

from __future__ import annotations

import json
from secrets import token_hex
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Effect = Literal["read_only", "idempotent_write", "non_idempotent"]
ResultSource = Literal[
    "tool", "crash", "timeout", "probe", "validation", "cancel", "policy", "rejection", "person", "limit", "loop"
]
Decision = Literal["approve", "reject"]
Settlement = Literal["happened", "not_happened", "abandon"]
Fate = Literal["never started", "stopped", "finished", "unknown"]
"""What became of a call that was open when its run was cancelled: it never began; it was stopped before it took effect;
it came to an end of its own all the same; it may have taken effect."""


class Model(BaseModel):
    """A frozen value that takes its own types only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Usage(Model):
    """Tokens of one model call, each kind priced on its own."""

    input_tokens: int = Field(default=0, ge=0)
    output_tokens: int = Field(default=0, ge=0)
    cache_creation_input_tokens: int = Field(default=0, ge=0)
    cache_read_input_tokens: int = Field(default=0, ge=0)


class AgentRef(Model):
    """Where an agent's code is: `module:name` or `/abs/file.py:name`, the digest of its folder, and the folder
    that its imports start from."""

    ref: str
    digest: str
    root: str = ""


class Machine(Model):
    """A machine on which processes were looked for: `left` are the pids of those that are still there."""

    host: str
    nodes: tuple[str, ...]
    left: tuple[int, ...] = ()


class Raised(Model):
    """What an open call is from now on, whose tool is of a stricter class than it was. An attempt that may be running
    without a start mark can act until `hold_s` after the commit."""

    effect: Effect
    hold_s: float


class BaseEvent(Model):
    """What every event has; `events` has them all."""

    event_id: str = Field(default_factory=lambda: token_hex(16))
    v: Literal[1] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Events travel between processes as their JSON text: smaller and quicker than a pickled model."""
        from .events import decode

        return decode, (self.model_dump_json(),)


def canonical(value: Any) -> str:
    """JSON text with sorted keys and no spaces, equal for equal values. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
