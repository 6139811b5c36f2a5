"""What the author of an agent may do about what a drill showed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..actors.tools import Tool
from .verdict import Verdict


def advice(tools: Sequence[Tool], called: Collection[str], verdicts: Sequence[Verdict], counted: bool) -> Iterator[str]:
    """A sentence for each thing that a tool's declaration lacks, and for what the drill could not see. `counted`: the
    user named a file of effects."""
    for tool in tools:
        options = tool.options
        if options.effect == "non_idempotent" and not options.has_probe:
            asked = sum(f"{tool.name} (" in question for verdict in verdicts for question in verdict.questions)
            yield (
                f"{tool.name} is non_idempotent and has no reconcile probe: each interrupted call is a question for "
                f"a person ({asked} here); add @{tool.name}.reconcile where the world can tell"
            )
        elif options.effect == "non_idempotent" and options.settles_after_s is None:
            yield (
                f"{tool.name} has no settles_after_s: after a crash it is known only {options.quiet_s:g} s later (its "
                "timeout_s) that a call did not happen; say how long a request of it may still be under way"
            )
        if options.effect == "idempotent_write" and not tool.takes_context:
            yield (
                f"{tool.name} is idempotent_write and takes no ToolContext, so it cannot pass its idempotency_key on; "
                "that is right only where its arguments alone make a repeated call harmless"
            )
        if options.effect != "non_idempotent" and options.attempts_max == 1:
            yield f"{tool.name} has attempts_max=1: a call whose process dies gets an error result"
    if unused := [tool.name for tool in tools if tool.name not in called]:
        yield f"the script calls {', '.join(unused)} never: nothing is shown about that"
    if called and not counted:
        yield (
            "what a handler had done when it was killed inside, and what it does when it runs again, is not seen from "
            "here: --ledger FILE compares the lines of a file that gets one with each effect"
        )
