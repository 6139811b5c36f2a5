"""The gate of a call: whether it may run at once, a person has to approve it, or its tool's policy denies it.

`ruled` runs the user's policy; everything else is pure. A policy that fails in any way never lets a call pass: a
person is asked, and told what went wrong. What a decision is bound to is `approval_digest`.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, get_args

from pydantic import JsonValue

from ..store.events import ApprovalRequested, ToolCallRequested, ToolResult, canonical
from .results import plain_error, valid_text
from .tools import ApprovalAsk, Policy, Tool, Word

POLICY_S: Final = 30.0
"""How long a policy may take to answer."""


class Ruling(NamedTuple):
    """What becomes of a call, and why."""

    word: Word
    reason: str = ""


def approval_digest(name: str, arguments: str, schema: Mapping[str, JsonValue]) -> str:
    """What an approval is bound to: the tool, the exact arguments as canonical JSON text, and the tool's schema."""
    bound = {"tool": name, "arguments": arguments, "schema": schema}
    return hashlib.sha256(canonical(bound).encode()).hexdigest()


async def ruled(tool: Tool, ask: ApprovalAsk) -> Ruling:
    """The ruling of a tool on one of its calls."""
    rule = tool.approval.rule
    if rule == "never":
        return Ruling("allow")
    if rule == "always":
        return Ruling("ask", f"every call of {tool.name} needs approval")
    return await _judged(rule, ask)


async def _judged(policy: Policy, ask: ApprovalAsk) -> Ruling:
    """A policy's answer. A plain function runs in a thread, so that it cannot hold up other runs."""
    target = policy if inspect.isroutine(policy) else type(policy).__call__
    limit = asyncio.timeout(POLICY_S)
    try:
        async with limit:
            answer = policy(ask) if inspect.iscoroutinefunction(target) else await asyncio.to_thread(policy, ask)
            return read_ruling(await answer if inspect.isawaitable(answer) else answer)
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        if limit.expired():
            return Ruling("ask", f"the policy has not answered within {POLICY_S:g} s")
        return Ruling("ask", _failure(error))


def read_ruling(answer: Any) -> Ruling:
    """A policy's answer as a ruling: a word, or a word and a reason; anything else is put to a person."""
    word, reason = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
    if isinstance(word, str) and word in get_args(Word) and isinstance(reason, str):
        return Ruling(word, valid_text(reason))  # type: ignore[arg-type]  # it is one of the words
    said = valid_text(repr(answer))[:100] if isinstance(answer, (str, tuple)) else f"a {type(answer).__name__}"
    return Ruling("ask", f"the policy answered {said}, not allow, ask or deny")


def _failure(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - foreign code, which may fail even here
        text = ""
    return valid_text(f"the policy failed with {type(error).__name__}: {text}"[:500])


def question(request: ToolCallRequested, arguments: str, tool: Tool, reason: str) -> ApprovalRequested:
    """The question to a person whether a call may run with these arguments."""
    return ApprovalRequested(
        tool_call_id=request.tool_call_id,
        name=request.name,
        arguments=arguments,
        effect=request.effect,
        digest=approval_digest(request.name, arguments, tool.schema),
        arguments_schema=tool.schema,
        reason=reason,
        timeout_s=tool.approval.timeout_s,
        default=tool.approval.default,
    )


def denial(tool_call_id: str, ruling: Ruling) -> ToolResult:
    """The result of a call that its tool's policy denies."""
    text = plain_error("Denied", ruling.reason or "the tool's policy denies this call")
    return ToolResult(tool_call_id=tool_call_id, attempt=1, content=text, is_error=True, source="policy")
