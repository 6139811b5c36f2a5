"""The owner of a run: fold the log, ask `next_step`, perform it, append, repeat.

Plain asyncio; the journal is reached through `ask`, so that the same code runs in a Ray actor and in a test. What
is decided but not durable is kept apart (`_pending`) and goes to the journal with the next thing that needs it: a
turn costs one request. An append that meets newer events folds them and decides again; the model's answer to a
turn is kept for that, with what the policies of its tools ruled, so none of them is asked twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, Final, Literal

from ..store.budgets import Budget
from ..store.errors import PerdureError, UsageError
from ..store.events import (
    AgentRef,
    AssistantDelta,
    BudgetReserved,
    Event,
    NoticeInjected,
    ProcessesChecked,
    RunFailed,
    Stored,
    ToolResult,
    TurnStarted,
)
from ..store.log import Refused
from .agent import Agent
from .budgets import Share, smaller_share
from .calls import Call
from .changed import asked_anew, code_change
from .loading import LoadedAgent
from .machine import Ask as AskStep
from .machine import CallModel, Finish, State, Wait, evolve_all, fold, next_step, uncounted
from .machine import Execute as ExecuteStep
from .model import Interrupted, Model, ModelError, ModelReply, ModelRequest, delayed, make_model
from .prompts import request_of
from .reception import Reception
from .requests import Ended, Executed, Start
from .results import valid_text
from .servers import with_servers
from .shares import charged, given_back, pause, reservation, share_of
from .standing import judged
from .submission import submission
from .turn import asked_again, turn_events

Ask = Callable[[Any], Awaitable[Any]]
LINGER_S: Final = 0.02
"""How long the start of a turn waits for the model's answer to travel with; a quick model saves an append."""
LOAD_EVENTS: Final = 1_000
CONFLICT_PAUSE_S: Final = 0.05
FAILURES_MAX: Final = 5
BROKEN_MAX: Final = 20
"""How often a turn is asked anew whose answer broke off."""


class Lost(PerdureError):
    """Somebody else owns the run, or it was ended by another hand: this owner has nothing more to do."""


class Owner:
    """Drives one run in one epoch."""

    def __init__(self, start: Start, ask: Ask, load: Callable[[str, str], LoadedAgent]) -> None:
        self._start, self._ask, self._load = start, ask, load
        self._state: State
        self._code: AgentRef
        """The version of the agent's code that this owner works with."""
        self._pending: list[Event] = []
        self._outlook: tuple[State, tuple[Event, ...], State]
        """A state, events after it, and what it is with them: each is folded once."""
        self._answers: dict[int, list[Event]] = {}
        """The model's answer to the turn that is due, as events."""
        self._reception: Reception | None = None
        """The newest model call."""
        self._news = asyncio.Event()
        """Somebody says that the log has news."""
        self._joined = ""
        """The cancel, by its event id, since which everything that ran is over."""
        self._checked: ProcessesChecked | None = None
        """What the journal has found of processes of the run, which is cancelled, by its newest answer."""
        self._failures = 0
        self._broken = 0
        """How often the answer to the turn that is due broke off."""
        self._asked_with = ""
        """The reservation, by its event id, of the newest model call in a shared budget."""
        self._short: Budget | None = None
        """The shared budget that has just refused a reservation."""

    async def drive(self) -> Ended:
        """Drive the run until it ends, waits for somebody, or is lost to another owner."""
        start = self._start
        self._state = fold(start.events or await self._whole_log())
        self._outlook = self._state, (), self._state
        self._code = start.agent or self._state.code
        try:
            while True:
                state = self._decided()
                step = next_step(state)
                if isinstance(step, Wait):
                    if self._pending:
                        await self._flush()
                        continue
                    status = self._state.status
                    outcome: Literal["ended", "waits"] = "ended" if status.is_terminal else "waits"
                    return Ended(start.run_id, start.epoch, status, outcome, self._state.end)
                if self._code.digest != state.code.digest and not isinstance(step, Finish):
                    self._note_change()
                else:
                    await self._perform(step)
        except Lost:
            return Ended(start.run_id, start.epoch, self._state.status, "lost")

    def look(self) -> None:
        """The log has news: a model call under way may not be wanted any more."""
        self._news.set()

    async def _whole_log(self) -> list[Stored]:
        events: list[Stored] = []
        while piece := await self._ask((self._start.run_id, len(events), LOAD_EVENTS)):
            events += piece
            if len(piece) < LOAD_EVENTS:
                break
        return events

    def _decided(self) -> State:
        """The state as it will be once what is pending is durable."""
        base, folded, state = self._outlook
        if base is not self._state or any(a is not b for a, b in zip_longest(folded, self._pending[: len(folded)])):
            folded, state = (), self._state
        state = evolve_all(state, self._pending[len(folded) :])
        self._outlook = self._state, tuple(self._pending), state
        return state

    def _note_change(self) -> None:
        """Make it pending, before all else, that the agent's code is another than the log knows of."""
        try:
            self._pending.insert(0, code_change(self._state, self._agent().agent, self._code.digest))
        except UsageError as error:
            self._pending.append(RunFailed(code="agent_unavailable", message=error.message, phase="load"))

    async def _perform(self, step: CallModel | ExecuteStep | AskStep | Finish) -> None:
        match step:
            case CallModel() if any(isinstance(event, ToolResult) for event in self._pending):
                await self._flush()  # the model is shown what is durable, and a turn of which no call could run is not
            case CallModel() if step.turn_index not in self._answers and (lost := uncounted(self._decided())):
                self._pending += lost
            case CallModel():
                await self._take_turn(step)
            case AskStep():
                self._ask_again(step.calls)
            case Finish() if self._has_to_join():
                await self._join()
            case Finish() if piece := self._received(last=True):
                self._pending.append(piece)
            case Finish():
                self._pending += (*step.events, *([self._checked] if self._checked else ()))
                await self._flush()
            case ExecuteStep() if questions := self._asked_anew(step.calls):
                self._pending += questions
            case ExecuteStep():
                await self._flush()

    # -- the model ----------------------------------------------------------------------------------------

    async def _take_turn(self, step: CallModel) -> None:
        """Ask the model, and make its answer pending."""
        try:
            loaded = self._agent()
            answer = self._answers.get(step.turn_index)
            self._start_turn(step)
            if answer is None and self._state.created.budget is not None:
                share = await self._reserve(loaded.agent, self._request(loaded.agent, step))
                if share is None:
                    return
                step = replace(step, plan=replace(step.plan, max_output_tokens=share.output_tokens))
            if answer is None:
                answer = await self._answer(loaded, step)
            if answer is not None:
                self._answers, self._broken = {step.turn_index: answer}, 0
                self._start_turn(step)
                self._pending += answer
        except Lost:
            raise
        except UsageError as error:
            self._pending += given_back(error, self._decided())
            self._pending.append(RunFailed(code="agent_unavailable", message=error.message, phase="model"))
        except Exception as error:  # noqa: BLE001 - a model may raise anything; the run ends and says what
            self._came_to_nothing(error)

    def _came_to_nothing(self, error: Exception) -> None:
        """Make what came of a model call that failed pending, and the end of the run, or the turn is asked anew."""
        if piece := self._received(last=isinstance(error, Interrupted)):
            self._pending.append(piece)
        self._pending += uncounted(self._decided())
        self._broken += isinstance(error, Interrupted)
        if isinstance(error, Interrupted) and self._broken <= BROKEN_MAX:
            return
        self._pending += given_back(error, self._decided())
        text = valid_text(str(error) if isinstance(error, PerdureError) else f"{type(error).__name__}: {error}")
        code = error.code if isinstance(error, ModelError) else "model_error"
        self._pending.append(RunFailed(code=code, message=text, phase="model"))

    def _start_turn(self, step: CallModel) -> None:
        state = self._decided()
        if step.notice and all(told.text != step.notice for told in state.notices[-1:]):
            self._pending.append(NoticeInjected(turn_index=step.turn_index, text=step.notice))
        if not state.turn_started:
            self._pending.append(TurnStarted(turn_index=step.turn_index))

    async def _answer(self, loaded: LoadedAgent, step: CallModel) -> list[Event] | None:
        """The model's answer as events, or None when it is not wanted any more."""
        reply = await self._ask_model(loaded, step)
        if reply is None:
            return None
        state = self._state
        judge = partial(judged, state.limits, state.turns, state.resumed)
        about = (loaded.agent, state.created.metadata, judge)
        events = await turn_events(self._start.run_id, step.turn_index, reply, *about)
        return events if state.created.budget is None else charged(events, state.prices)

    async def _reserve(self, agent: Agent, request: ModelRequest) -> BudgetReserved | None:
        """Hold what a model call can take of the shared budget, durably. None: it is not to be made now."""
        wanted: Share | str | None = share_of(request, agent, self._state)
        while isinstance(wanted, Share):
            if not any(isinstance(event, BudgetReserved) for event in self._pending):
                self._pending.append(reservation(request.turn_index, wanted))
            await self._flush()
            short, self._short = self._short, None
            if short is None:
                held = self._state.reserved
                fresh = held and held.event_id != self._asked_with and isinstance(next_step(self._state), CallModel)
                self._asked_with = held.event_id if held and fresh else self._asked_with
                return held if fresh else None
            self._pending = [event for event in self._pending if not isinstance(event, BudgetReserved)]
            wanted = smaller_share(short, wanted, self._state.prices)
        if wanted is None:
            await pause(self._news)
        else:
            self._pending = [event for event in self._pending if not isinstance(event, TurnStarted)]
            self._pending.append(RunFailed(code="budget_exceeded", message=wanted, phase="model"))
        return None

    def _ask_again(self, calls: Sequence[Call]) -> None:
        """Make the questions about gated calls of a resumed run pending."""
        try:
            self._pending += asked_again(calls, self._agent().agent)
        except UsageError as error:
            self._pending.append(RunFailed(code="agent_unavailable", message=error.message, phase="tool"))

    def _asked_anew(self, calls: Sequence[Call]) -> list[Event]:
        """The questions about calls that were approved for other code than there is now."""
        if not self._decided().changes:
            return []
        try:
            return [*asked_anew(calls, self._agent().agent)]
        except UsageError as error:
            return [RunFailed(code="agent_unavailable", message=error.message, phase="tool")]

    async def _ask_model(self, loaded: LoadedAgent, step: CallModel) -> ModelReply | None:
        """The model's answer, or None when the run changed meanwhile and the answer is not wanted any more."""
        reception = self._reception = Reception(step.turn_index, self._news.set)
        asking = asyncio.create_task(self._reply(loaded, step, reception))
        try:
            await asyncio.wait({asking}, timeout=LINGER_S)
            looks = bool(self._pending)
            while not asking.done():
                if looks:
                    piece = self._received() if reception.is_due else None
                    self._pending += [piece] if piece else []
                    if await self._flush() and piece:
                        reception.keep(piece)
                    if not isinstance(next_step(self._state), CallModel):
                        return None
                looks = await self._has_news(asking)
            return await asking
        finally:
            asking.cancel()
            reception.end()

    async def _reply(self, loaded: LoadedAgent, step: CallModel, reception: Reception) -> ModelReply:
        reply = await self._model(loaded)(self._request(loaded.agent, step), reception.stream)
        await delayed(reply, reception.stream)
        reception.end(reply)
        return reply

    def _received(self, last: bool = False) -> AssistantDelta | None:
        """What has come of the answer that is due and is not durable, nor about to be."""
        state, reception = self._decided(), self._reception
        due = reception and state.turn_started and state.turn_count == reception.turn_index
        if reception is None or not due or any(isinstance(event, AssistantDelta) for event in self._pending):
            return None
        return reception.piece(last)

    async def _has_news(self, asking: asyncio.Task[ModelReply]) -> bool:
        """Wait for the model; True as soon as somebody says that the log has news instead."""
        news = asyncio.create_task(self._news.wait())
        await asyncio.wait({asking, news}, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        told = self._news.is_set()
        self._news.clear()
        return told

    def _agent(self) -> LoadedAgent:
        loaded = self._load(self._code.ref, self._code.digest)
        agent = with_servers(loaded.agent, self._state.created.config)
        return loaded if agent is loaded.agent else replace(loaded, agent=agent)

    def _model(self, loaded: LoadedAgent) -> Model:
        chosen = self._state.created.config.get("model")
        agent = loaded.agent
        model = chosen if isinstance(chosen, str) else agent.model
        return make_model(model, loaded.folder, agent.model_settings, agent.base_url)

    def _request(self, agent: Agent, step: CallModel) -> ModelRequest:
        return request_of(self._start.run_id, self._decided(), agent, step)

    # -- a cancel -----------------------------------------------------------------------------------------

    def _has_to_join(self) -> bool:
        """Whether anything of a cancelled run may still run: what is said of that at its end has to be true."""
        state = self._state
        return state.cancel is not None and state.turn is not None and self._joined != state.cancel.event_id

    async def _join(self) -> None:
        """Wait until nothing of the cancelled run's calls runs any more, and fold what became of them."""
        cancel = self._state.cancel
        if await self._flush() and cancel:
            self._joined = cancel.event_id

    # -- the journal --------------------------------------------------------------------------------------

    async def _flush(self) -> bool:
        """Make what is pending durable and get the open calls their results; fold whatever happened meanwhile. False
        when the journal did not do it."""
        try:
            ask = submission(self._start, self._state, self._pending, self._code, self._agent)
            done: Executed = await self._ask(ask)
        except Refused as refusal:
            await self._refused(refusal)
        except UsageError as error:
            self._pending = [RunFailed(code="agent_unavailable", message=error.message, phase="tool")]
        except PerdureError as error:
            await self._failed(error)
        else:
            self._failures = 0
            self._pending.clear()
            self._checked = done.checked
            self._state = fold(done.events, self._state)
            if not done.events:
                await asyncio.sleep(CONFLICT_PAUSE_S)
            return True
        return False

    async def _refused(self, refusal: Refused) -> None:
        if refusal.reason in ("conflict", "ended", "cancelled"):
            self._pending.clear()
            if refusal.newer:
                self._state = fold(refusal.newer, self._state)
            else:
                await asyncio.sleep(CONFLICT_PAUSE_S)
                self._state = fold(await self._ask((self._start.run_id, self._state.seq, LOAD_EVENTS)), self._state)
            if self._state.epoch == self._start.epoch:
                return
        elif refusal.reason == "budget":
            self._short = refusal.budget
            return
        elif refusal.reason == "illegal":
            self._pending = [RunFailed(code="internal_error", message=refusal.message, phase="append")]
            return
        raise Lost(refusal.message)

    async def _failed(self, error: PerdureError) -> None:
        """The journal met an unexpected error: try again a few times, then end the run and say so."""
        self._failures += 1
        if self._failures > FAILURES_MAX:
            self._pending = [RunFailed(code="internal_error", message=error.message, phase="journal")]
        await asyncio.sleep(CONFLICT_PAUSE_S * 2 ** min(self._failures, FAILURES_MAX))
