"""What becomes of a run whose agent's code is another than before. Pure.

| open call                                  | its tool is gone, or does not take its arguments any more          |
|--------------------------------------------|--------------------------------------------------------------------|
| runs in a task                             | that goes on, and its result counts                                |
| has not begun                              | an error result that says so                                       |
| read_only or idempotent_write, may have run| the same, with the key that it may have run with                   |
| non_idempotent, started                    | once it is proven over and has left no result, a person is asked   |

An open call takes the stricter class of the two. One that was approved for a tool whose schema is another now is put
to a person anew. Results that are in the log need no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from ..store.events import STRICTNESS, ApprovalRequested, CodeChanged, Raised, ToolResult
from ..store.rows import CallRow
from .agent import Agent
from .approvals import approval_digest, question
from .attempt import GRACE_S
from .calls import Call
from .machine import State
from .requests import Misfit
from .results import plain_error
from .tools import Tool
from .turn import unfit


def code_change(state: State, agent: Agent, digest: str) -> CodeChanged:
    """The event that tells the run's log of this version of its agent."""
    raised = {}
    for call in state.open_calls:
        tool = agent.tool(call.request.name)
        if tool and STRICTNESS.index(tool.options.effect) > STRICTNESS.index(call.effect):
            hold_s = _longest_s(state, tool) + GRACE_S
            raised[call.tool_call_id] = Raised(effect=tool.options.effect, hold_s=hold_s)
    return CodeChanged(was=state.code.digest, digest=digest, tools=agent.tool_facts(), raised=raised)


def _longest_s(state: State, tool: Tool) -> float:
    """The longest timeout of a tool over the versions of the code that the run has had; the new one if nothing is known
    of them."""
    known: list[Any] = [state.created.config.get("tools"), *(change.tools for change in state.changes)]
    facts = [tools[tool.name] for tools in known if isinstance(tools, dict) and tool.name in tools]
    return max((cast(dict[str, float], fact)["timeout_s"] for fact in facts), default=tool.options.timeout_s)


def asked_anew(calls: Iterable[Call], agent: Agent) -> list[ApprovalRequested]:
    """The questions about approved calls of which nothing was dispatched, and whose tools have changed since."""
    questions = []
    for call in calls:
        tool = agent.tool(call.request.name)
        if tool and not call.attempt and _outdated(call, tool) and not unfit(tool, call.arguments):
            reason = "the tool has changed since it was approved"
            questions.append(question(call.effective, call.arguments, tool, reason))
    return questions


def misfits(calls: Iterable[Call], agent: Agent) -> dict[str, Misfit]:
    """The calls that cannot be dispatched with this code, by id, and why."""
    found = ((call.tool_call_id, _misfit(call, agent.tool(call.request.name))) for call in calls)
    return {call_id: misfit for call_id, misfit in found if misfit}


def _misfit(call: Call, tool: Tool | None) -> Misfit | None:
    name = call.request.name
    if tool is None:
        return Misfit("ToolRemoved", f"the tool {name!r} was removed from the agent after this call was made")
    if problem := unfit(tool, call.arguments):
        text = f"the tool {name!r} was changed after this call was made and does not take its arguments: {problem}"
        return Misfit("ToolChanged", text)
    if call.attempt and _outdated(call, tool):
        return Misfit("ToolChanged", f"the tool {name!r} was changed after this call was approved")
    return None


def _outdated(call: Call, tool: Tool) -> bool:
    """Whether a call was approved for another form of the tool."""
    asked = call.asked
    if call.gate != "approved" or asked is None:
        return False
    return approval_digest(asked.name, asked.arguments, tool.schema) != asked.digest


def closings(calls: Iterable[CallRow], misfits: Mapping[str, Misfit], keys: Mapping[str, str]) -> list[ToolResult]:
    """The results of calls that nothing runs for and that cannot be dispatched any more. None for those that wait for
    a person, and those that have started and may have taken effect. `keys` are idempotency keys, by call."""
    return [
        ToolResult(
            tool_call_id=call.tool_call_id,
            attempt=call.attempt,
            content=plain_error(misfit.kind, f"{misfit.problem}; {_so_far(call, keys[call.tool_call_id])}"),
            is_error=True,
            source="validation",
        )
        for call in calls
        if (misfit := misfits.get(call.tool_call_id)) and not call.barred and not in_doubt(call)
    ]


def in_doubt(call: CallRow) -> bool:
    """Whether an attempt of a call may have had an effect that nobody can repeat."""
    return call.effect == "non_idempotent" and call.started


def _so_far(call: CallRow, key: str) -> str:
    if not call.attempt or call.effect == "non_idempotent":
        return "it has not run"
    if call.effect == "read_only":
        return "it may have run, which has changed nothing"
    return f"it may have run, with the idempotency key {key}"
