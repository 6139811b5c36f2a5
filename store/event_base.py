"""What all events have, and values that many of them hold."""

from __future__ import annotations

from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field


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


class BaseEvent(Model):
    """What every event has; `events` has them all."""

    event_id: str = Field(default_factory=lambda: uuid4().hex)
    v: Literal[1] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Events travel between processes as their JSON text: smaller and quicker than a pickled model."""
        from .events import decode

        return decode, (self.model_dump_json(),)
