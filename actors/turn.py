"""A model's answer as events: the message, an intent for each call, and what is decided about a call at once.

A call of an unknown tool, or with arguments that do not fit, has its error result in the same append; so has one that
its tool's policy denies. A gated call has its question there: nobody ever sees it without its gate.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping

from pydantic import JsonValue, ValidationError

from ..store.events import AssistantMessage, Event, ToolCallRequested, ToolResult, canonical
from .agent import Agent
from .approvals import denial, question, ruled
from .machine import Call, idempotency_key
from .model import ModelReply, ToolUse
from .results import plain_error, valid_text
from .tools import ApprovalAsk, Tool


async def turn_events(
    run_id: str, turn_index: int, reply: ModelReply, agent: Agent, metadata: Mapping[str, JsonValue] | None = None
) -> list[Event]:
    """The events of a turn, in the order in which they are legal. Asks the policies of gated tools."""
    requests: list[ToolCallRequested] = []
    questions: list[Event] = []
    refusals: list[Event] = []
    for number, use in enumerate(reply.tool_calls):
        call_id = f"t{turn_index}c{number}"  # providers repeat ids; ours are unique within the run
        tool = agent.tool(use.name)
        arguments, fit = checked_arguments(use, agent)
        request = ToolCallRequested(
            turn_index=turn_index,
            tool_call_id=call_id,
            provider_id=use.id or call_id,
            name=use.name,
            arguments=arguments,
            effect=tool.options.effect if tool else "read_only",
            idempotency_key=idempotency_key(run_id, call_id),
        )
        requests.append(request)
        if isinstance(fit, str):
            refusals.append(_invalid(call_id, 1, fit))
        elif fit.approval.rule != "never":
            ruling = await ruled(fit, _ask(run_id, request, metadata or {}))
            if ruling.word == "ask":
                questions.append(question(request, arguments, fit, ruling.reason))
            elif ruling.word == "deny":
                refusals.append(denial(call_id, ruling))
    message = AssistantMessage(
        turn_index=turn_index,
        text=valid_text(reply.text),
        stop_reason=reply.stop_reason or ("tool_use" if reply.tool_calls else "end_turn"),
        usage=reply.usage,
    )
    return [message, *requests, *questions, *refusals]


def asked_again(calls: Iterable[Call], agent: Agent) -> list[Event]:
    """What becomes of gated calls when their run was resumed: each is put to a person anew, or does not fit its tool
    any more."""
    questions: list[Event] = []
    refusals: list[Event] = []
    for call in calls:
        fit = fitting(call.request.name, call.arguments, agent)
        if isinstance(fit, str):
            refusals.append(_invalid(call.tool_call_id, call.attempt, fit))
        else:
            questions.append(question(call.effective, call.arguments, fit, "the run was resumed: asked again"))
    return [*questions, *refusals]


def checked_arguments(use: ToolUse, agent: Agent) -> tuple[str, Tool | str]:
    """The call's arguments as canonical JSON text, and what `fitting` says of them."""
    try:
        text = valid_text(canonical(use.arguments))
    except (ValueError, RecursionError) as error:
        return "{}", plain_error("InvalidArguments", f"the arguments are not JSON: {error}")
    return text, fitting(use.name, text, agent)


def fitting(name: str, arguments: str, agent: Agent) -> Tool | str:
    """The tool that a call can run on, or what is wrong with the call, as a result for the model."""
    tool = agent.tool(name)
    if tool is None:
        known = ", ".join(sorted(tool.name for tool in agent.tools)) or "none"
        return plain_error("UnknownTool", f"there is no tool {name!r}; available: {known}")
    problem = unfit(tool, arguments)
    return plain_error("InvalidArguments", problem) if problem else tool


def unfit(tool: Tool, arguments: str) -> str:
    """What is wrong with the arguments of a call of this tool; empty where they fit."""
    try:
        tool.arguments.model_validate_json(arguments)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
        return "; ".join(problems)
    except Exception as error:  # noqa: BLE001 - a validator of the user's may raise anything
        return f"checking them raised {type(error).__name__}: {error}"
    return ""


def _invalid(call_id: str, attempt: int, problem: str) -> ToolResult:
    return ToolResult(tool_call_id=call_id, attempt=attempt, content=problem, is_error=True, source="validation")


def _ask(run_id: str, request: ToolCallRequested, metadata: Mapping[str, JsonValue]) -> ApprovalAsk:
    """What a policy is shown: copies, so that it changes nothing."""
    return ApprovalAsk(
        run_id=run_id,
        tool=request.name,
        arguments=json.loads(request.arguments),
        effect=request.effect,
        turn_index=request.turn_index,
        metadata=copy.deepcopy(dict(metadata)),
    )
