"""What an owner sends to the journal: the events to append, and what the journal needs to see open calls through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..store.errors import UsageError
from ..store.events import (
    AgentRef,
    CodeChanged,
    Event,
    ProcessesChecked,
    RunCancelled,
    RunCompleted,
    RunFailed,
    ToolCallRequested,
)
from .changed import misfits
from .loading import LoadedAgent
from .machine import State, evolve
from .requests import Execute, Start


def submission(
    start: Start, state: State, pending: Sequence[Event], code: AgentRef, load: Callable[[], LoadedAgent]
) -> Execute:
    """The request to append what is pending after `state`. Raises UsageError where calls need code that is not there,
    unless the run is cancelled: nothing is started any more then, and what runs is over without its code."""
    events = tuple(pending)
    as_known = evolve(state, events[0]) if events and isinstance(events[0], CodeChanged) else state
    known = tuple(call.effective for call in as_known.open_calls)
    requests = [event for event in (*known, *events) if isinstance(event, ToolCallRequested)]
    ends = bool(events) and isinstance(events[-1], (RunCompleted, RunFailed, RunCancelled, ProcessesChecked))
    plain = Execute(start.run_id, start.epoch, state.seq, events)
    if ends or not requests:
        return plain
    try:
        agent = load().agent
    except UsageError:
        if state.cancel:
            return plain
        raise
    options = {request.name: tool.options for request in requests if (tool := agent.tool(request.name))}
    released = [call for call in as_known.open_calls if not call.waits]
    unfit = misfits(released, agent) if as_known.changes else {}
    about = (code, state.created.metadata, options, start.apart, unfit)
    return Execute(start.run_id, start.epoch, state.seq, events, known, *about)
