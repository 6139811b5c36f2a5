"""The certificate of a cancelled run, for people and for programs: what became of its calls and of its processes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from ..client.cancel import CallEnd, Certificate
from ..store.events import ProcessesChecked
from .text import clock, line

WORDS: Final = {
    "never started": "never started",
    "stopped": "stopped",
    "finished": "finished all the same",
    "unknown": "outcome unknown",
    "open": "still being stopped",
}
"""What became of a call, for people."""


def certificate_lines(told: Certificate) -> list[str]:
    """A line for each call, and what is known of processes."""
    return [*(_call_line(end) for end in told.calls), *process_lines(told)]


def certificate_json(told: Certificate) -> dict[str, Any]:
    """The same for a program; `processes` is null as long as nobody has looked."""
    checked = told.checked.event if told.checked else None
    if isinstance(checked, ProcessesChecked) and told.checked:
        looked = checked.model_dump(mode="json", include={"asked", "machines", "gone"})
        processes: dict[str, Any] | None = {"at": told.checked.at, **looked}
    else:
        processes = None if told.may_have_begun else {"at": None, "asked": 0, "machines": [], "gone": []}
    return {"calls": [asdict(end) for end in told.calls], "processes": processes}


def process_lines(told: Certificate) -> list[str]:
    """What is known of the processes of a cancelled run."""
    if not told.may_have_begun:
        return ["processes: none, no tool call of it has begun"]
    checked = told.checked.event if told.checked else None
    if told.checked is None or not isinstance(checked, ProcessesChecked):
        return ["processes: not looked for yet"]
    left = [(machine.host, machine.left) for machine in checked.machines if machine.left]
    hosts = sorted({machine.host for machine in checked.machines})
    named = ", ".join(map(line, hosts))
    asked = f"{checked.asked} machine{'' if checked.asked == 1 else 's'}"
    where = named if len(hosts) == checked.asked else asked + (f", {named} among them" if named else "")
    texts = [f"processes: {sum(len(pids) for _, pids in left)} left, looked for on {where} at {clock(told.checked.at)}"]
    texts += [f"  left on {line(host)}: {', '.join(map(str, pids))}" for host, pids in left]
    if checked.gone:
        gone = ", ".join(line(node[:12]) for node in checked.gone)
        texts.append(f"  not asked, since it is gone: node {gone}, where an attempt ran")
    return texts


def _call_line(end: CallEnd) -> str:
    said = f": {line(end.text)}" if end.text and end.fate != "never started" else ""
    return f"{line(end.tool_call_id)} {line(end.name)}: {WORDS[end.fate]}{said}"
