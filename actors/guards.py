"""What keeps a run in bounds: its limits, and the decisions that follow from them. Pure: values in, decisions out.

The rules themselves stand in `ceilings` (turns and calls), `budgets` (tokens and dollars) and `loops` (repetition);
here they are put in order. `timeout_s`, the run's deadline, is the store's to watch.

For the machine: `Limits` is the one of `Agent.limits`, stored as `model_dump(mode="json")` in
`run_created.config["limits"]`; `limits_of` reads it, overlaid by what each `run_requeued` changed. `Standing` is built
from a State. `next_step`, with no call open and the newest turn's text as `text`:

    a refusal                      -> `unanswered.refused`: fail
    calls made in a final turn     -> `after_final`: complete, or fail
    nothing said                   -> `unanswered.silent`: fail, or ask again
    `loops.went_on`                -> fail as loop_detected
    else `plan_turn`               -> fail, or ask the model with the plan's notice, tools and output limit

`turn_events` asks `judge_calls` once per turn, before policies: a refused call has its result (`is_error`, the given
source) in the append of the turn, and is never put to a person.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from ..store.budgets import Amount, Cap
from ..store.errors import UsageError
from ..store.events import Usage
from .budgets import breach, expected_next, output_room
from .ceilings import NO_TOOLS, Answer, few_left, final_answer, final_notice, is_final, over, turns_left, used_up
from .loops import Made, call_hash, explanation, looping
from .prices import PriceList


class Limits(BaseModel):
    """Bounds of one run, stored with it. None: without bound."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=50, ge=1)
    """Model calls whose answers a run may use."""
    max_tool_calls_per_turn: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Tool calls of the whole run."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the whole run: input, output, cache creation and cache reads together."""
    max_cost: Decimal | None = Field(default=None, ge=0, max_digits=24, decimal_places=12)
    """US dollars. The model must have known prices."""
    max_repeats: int | None = Field(default=3, ge=3)
    """The n-th call in a row with the same arguments and result is not executed. Two are needed to see a change."""
    max_empty: int | None = Field(default=3, ge=1)
    """The n-th answer in a row with neither text nor calls ends the run. None: an empty answer is an answer."""
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The run's deadline, counted from its launch on the store's clock."""

    @property
    def cap(self) -> Cap:
        return Cap(self.max_tokens, self.max_cost)


def limits_of(stored: JsonValue, changes: Iterable[Mapping[str, JsonValue]] = ()) -> Limits:
    """The limits of a run: those of its launch (None in a log that has none), overlaid by those of each resume. Raises
    ValueError for a limit that there is not."""
    limits = dict(stored) if isinstance(stored, dict) else {}
    for changed in changes:
        limits |= changed
    return Limits.model_validate(limits)


def changed(limits: Limits, changes: Mapping[str, object]) -> Limits:
    """The limits with some of them changed. Raises UsageError for one that there is not, or that makes no sense."""
    try:
        return Limits.model_validate(limits.model_dump() | dict(changes))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(f"limit {first['loc'][0]} cannot be {first['input']!r}: {first['msg']}") from error


def raised(limits: Limits, changes: Mapping[str, object]) -> dict[str, JsonValue]:
    """The changes of a resume as run_requeued keeps them. Raises UsageError unless each raises a limit or lifts it."""
    now = changed(limits, changes)
    for name in changes:
        old, new = getattr(limits, name), getattr(now, name)
        if new is not None and (old is None or new < old):
            had = "has no bound" if old is None else f"is {old}"
            raise UsageError(f"{name} {had}: a resume can raise a limit or lift it, not lower it to {new}")
    return now.model_dump(mode="json", include=set(changes))


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a run has got, as far as its guards look. All of it follows from the log, and so survives a respawn."""

    turn_count: int = 0
    used: Amount = field(default_factory=Amount)
    last: Usage | None = None
    """Of the newest answer."""
    said: str = ""
    """The model's newest words, of whatever turn."""
    tools: tuple[str, ...] = ()
    """Names of the calls that took a place, see `ceilings.takes_place`."""


# -- before a turn ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stop:
    """The run fails, resumable: `code` and `message` of run_failed."""

    code: Literal["max_turns", "budget_exceeded", "loop_detected", "refusal", "content_filter", "empty_answer"]
    message: str


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """How the next turn is asked for. A final one has its notice and no tools."""

    turns_left: str
    few_left: bool = False
    """Few enough that a model has to be told in so many words."""
    notice: str | None = None
    max_output_tokens: int | None = None

    @property
    def final(self) -> bool:
        return self.notice is not None


def plan_turn(limits: Limits, standing: Standing, prices: PriceList | None = None) -> TurnPlan | Stop:
    """The next turn, or why it is not started. Raises ValueError for a cap in dollars without prices."""
    turn = standing.turn_count
    if turn >= limits.max_turns:
        return Stop("max_turns", used_up(limits.max_turns, standing.said, standing.tools))
    prompt = expected_next(standing.last)
    if why := breach(limits.cap, standing.used, prompt, prices):
        return Stop("budget_exceeded", why)
    return TurnPlan(
        turns_left(turn, limits.max_turns),
        few_left(turn, limits.max_turns),
        final_notice(limits.max_turns) if is_final(turn, limits.max_turns) else None,
        output_room(limits.cap, standing.used, prompt, prices),
    )


def after_final(limits: Limits, standing: Standing, text: str) -> Answer | Stop:
    """How a run ends whose final turn is over; `text` is what the model said in it."""
    return final_answer(text) or Stop("max_turns", used_up(limits.max_turns, standing.said, standing.tools))


# -- before a turn's calls --------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """A call that the model asks for. `fits`: there is such a tool, and it takes these arguments."""

    tool: str
    arguments: str
    fits: bool = True


class Refused(NamedTuple):
    """A call that is not executed: the source, kind and text of its error result."""

    source: Literal["limit", "loop"]
    kind: str
    why: str


def judge_calls(
    limits: Limits, standing: Standing, past: Sequence[Made], calls: Sequence[Wanted]
) -> tuple[Refused | None, ...]:
    """What the guards say to each call of turn `standing.turn_count`, which no call of has started. `past` are the
    calls of the turns before. A call that does not fit and is not refused here is to be refused for that."""
    if is_final(standing.turn_count, limits.max_turns):
        return tuple(Refused("limit", "LimitReached", NO_TOOLS) for _ in calls)
    verdicts: list[Refused | None] = [None] * len(calls)
    hashes = [call_hash(call.tool, call.arguments) for call in calls] if past else []
    loop = looping(past, hashes, limits.max_repeats)
    if loop and limits.max_repeats:
        told = Refused("loop", "LoopDetected", explanation(loop, limits.max_repeats))
        verdicts[: loop.calls] = [told] * loop.calls
    places = [n for n, call in enumerate(calls) if call.fits and verdicts[n] is None]
    texts = over(len(places), len(standing.tools), limits.max_tool_calls_per_turn, limits.max_tool_calls)
    for n, why in zip(places, texts, strict=True):
        verdicts[n] = Refused("limit", "LimitReached", why) if why else None
    return tuple(verdicts)
