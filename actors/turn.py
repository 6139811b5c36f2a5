"""A model's answer as events: the message, an intent for each call, and what is decided about a call at once.

A call of an unknown tool, or with arguments that do not fit, has its error result in the same append; so has one that
the run's guards or its tool's policy refuse. A gated call has its question there: nobody ever sees it without its gate.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pydantic import JsonValue, ValidationError

from ..store.events import AssistantMessage, Event, ResultSource, ToolCallRequested, ToolResult, canonical
from ..store.secrets import masked
from .agent import Agent
from .approvals import denial, question, ruled
from .arguments import read
from .guards import Refused, Wanted
from .machine import Call, idempotency_key
from .model import ModelReply, ToolUse
from .results import plain_error, valid_text
from .tools import ApprovalAsk, Misfitting, Tool

Judge = Callable[[Sequence[Wanted]], Sequence[Refused | None]]
"""What the guards of a run say to the calls of a turn."""


SECRET: Final = (
    "the arguments hold a key or another secret, which is recorded nowhere, so the call was not made; a tool takes its "
    "keys from its environment"
)


def unguarded(calls: Sequence[Wanted]) -> Sequence[Refused | None]:
    """A Judge of a run without limits."""
    return [None] * len(calls)


async def turn_events(
    run_id: str,
    turn_index: int,
    reply: ModelReply,
    agent: Agent,
    metadata: Mapping[str, JsonValue] | None = None,
    judge: Judge = unguarded,
) -> list[Event]:
    """The events of a turn, in the order in which they are legal. Asks the guards about all calls at once, and then the
    policies of gated tools."""
    checked = [checked_arguments(use, agent) for use in reply.tool_calls]
    wanted = [
        Wanted(use.name, arguments, isinstance(fit, Tool))
        for use, (arguments, fit) in zip(reply.tool_calls, checked, strict=True)
    ]
    verdicts = judge(wanted)
    requests: list[ToolCallRequested] = []
    questions: list[Event] = []
    refusals: list[Event] = []
    for number, use in enumerate(reply.tool_calls):
        arguments, fit = checked[number]
        request = _intent(run_id, turn_index, number, use, arguments, agent)
        requests.append(request)
        call_id, refused = request.tool_call_id, verdicts[number]
        if refused:
            refusals.append(_refusal(call_id, 1, plain_error(refused.kind, refused.why), refused.source))
        elif isinstance(fit, str):
            refusals.append(_refusal(call_id, 1, fit))
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
        native=reply.native,
    )
    return [message, *requests, *questions, *refusals]


def _intent(run_id: str, turn_index: int, number: int, use: ToolUse, arguments: str, agent: Agent) -> ToolCallRequested:
    call_id = f"t{turn_index}c{number}"  # providers repeat ids; ours are unique within the run
    tool = agent.tool(use.name)
    return ToolCallRequested(
        turn_index=turn_index,
        tool_call_id=call_id,
        provider_id=use.id or call_id,
        name=use.name,
        arguments=arguments,
        effect=tool.options.effect if tool else "read_only",
        idempotency_key=idempotency_key(run_id, call_id),
    )


def asked_again(calls: Iterable[Call], agent: Agent) -> list[Event]:
    """What becomes of gated calls when their run was resumed: each is put to a person anew, or does not fit its tool
    any more."""
    questions: list[Event] = []
    refusals: list[Event] = []
    for call in calls:
        fit = fitting(call.request.name, call.arguments, agent)
        if isinstance(fit, str):
            refusals.append(_refusal(call.tool_call_id, call.attempt, fit))
        else:
            questions.append(question(call.effective, call.arguments, fit, "the run was resumed: asked again"))
    return [*questions, *refusals]


def checked_arguments(use: ToolUse, agent: Agent) -> tuple[str, Tool | str]:
    """The call's arguments as canonical JSON text, and what `fitting` says of them."""
    problem = ""
    if use.raw is not None:
        text, problem = read(use.raw, use.cut)
    else:
        try:
            text = valid_text(canonical(use.arguments))
        except (ValueError, RecursionError) as error:
            return "{}", plain_error("InvalidArguments", f"the arguments are not JSON: {error}")
    if (shown := masked(text, as_json=True)) != text:
        return shown, plain_error("SecretInArguments", SECRET)
    return text, problem if problem and agent.tool(use.name) else fitting(use.name, text, agent)


def fitting(name: str, arguments: str, agent: Agent) -> Tool | str:
    """The tool that a call can run on, or what is wrong with the call, as a result for the model."""
    tool = agent.tool(name)
    if tool is None:
        known = ", ".join(sorted(tool.name for tool in agent.offered)) or "none"
        return plain_error("UnknownTool", f"there is no tool {name!r}; available: {known}")
    problem = unfit(tool, arguments)
    return plain_error("InvalidArguments", problem) if problem else tool


def unfit(tool: Tool, arguments: str) -> str:
    """What is wrong with the arguments of a call of this tool; empty where they fit."""
    try:
        tool.parse(arguments)
    except Misfitting as error:
        return str(error)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
        return "; ".join(problems)
    except Exception as error:  # noqa: BLE001 - a validator of the user's may raise anything
        return f"checking them raised {type(error).__name__}: {error}"
    return ""


def _refusal(call_id: str, attempt: int, why: str, source: ResultSource = "validation") -> ToolResult:
    return ToolResult(tool_call_id=call_id, attempt=attempt, content=why, is_error=True, source=source)


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
