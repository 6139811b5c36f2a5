"""The agent of the benchmark: one tool per method of the eight classes, and a model that plays the ground truth.

A run is one task. Its id is in the run's metadata under `task`, where model and tools both find it; the worlds lie in
the folder that the environment variable PERDURE_BFCL_FOLDER names, one file per run.

The tools' schemas are those of the methods' signatures, the values are passed on as they came. The data set is looser
than its signatures (one task closes a ticket whose id is a text where an integer is declared), and what counts is the
world after the very same calls.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import TypeAdapter, WithJsonSchema

from perdure.actors.agent import Agent
from perdure.actors.model import ModelRequest
from perdure.actors.tools import Settled, Tool, ToolContext, tool
from perdure.benchmarks.bfcl.data import Task, methods, tasks
from perdure.benchmarks.bfcl.effects import READ_ONLY, effect_of
from perdure.benchmarks.bfcl.world import World

FOLDER_VARIABLE = "PERDURE_BFCL_FOLDER"
TIMEOUT_S = 60.0


def open_world(run_id: str, metadata: dict[str, Any]) -> World:
    """The world of a run, created in the initial state of its task at the first call."""
    return World.open(Path(os.environ[FOLDER_VARIABLE]), run_id, task_of(metadata).instances)


def task_of(metadata: dict[str, Any]) -> Task:
    """The task that a run is about."""
    return tasks()[str(metadata["task"])]


def ground_truth(request: ModelRequest) -> dict[str, Any]:
    """Ask for the next right call, one a turn since each depends on the one before; then say that it is done."""
    calls = task_of(request.metadata).calls
    if request.turn_index >= len(calls):
        return {"text": f"done after {len(calls)} calls"}
    call = calls[request.turn_index]
    return {"tool_calls": [{"name": call.method, "arguments": call.arguments}]}


def tool_of(api: str, name: str, method: Callable[..., Any]) -> Tool:
    """The tool for one method; one that changes the world has a probe that looks into the world's own record."""
    if effect_of(api, name) == "read_only":

        def look(ctx: ToolContext, **arguments: Any) -> Any:
            with open_world(ctx.run_id, ctx.metadata) as world:
                return world.read(api, name, arguments)

        return tool("read_only", name=name, timeout_s=TIMEOUT_S)(_like(method, look))

    def change(ctx: ToolContext, **arguments: Any) -> Any:
        with open_world(ctx.run_id, ctx.metadata) as world:
            return world.apply(ctx.idempotency_key, api, name, arguments)

    def changed(ctx: ToolContext, **arguments: Any) -> Settled:
        with open_world(ctx.run_id, ctx.metadata) as world:
            record = world.applied(ctx.idempotency_key)
        return Settled.happened(record[0].result) if record else Settled.did_not_happen()

    # settles_after_s=0: the world is a file, so nothing of a dead process is still on its way to it
    declared = tool("non_idempotent", name=name, timeout_s=TIMEOUT_S, settles_after_s=0)(_like(method, change))
    declared.reconcile(changed)
    return declared


def _like(method: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """Give a handler the signature and the documentation of a method, with a context in the place of `self`."""
    hints = get_type_hints(method)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY, annotation=ToolContext)
    parameters = [
        parameter.replace(annotation=Annotated[Any, WithJsonSchema(TypeAdapter(hints[name]).json_schema())])
        for name, parameter in inspect.signature(method).parameters.items()
        if name != "self"
    ]
    signature = inspect.Signature([context, *parameters])
    handler.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    handler.__doc__ = method.__doc__
    handler.__dict__["__signature__"] = signature
    return handler


agent = Agent(
    name="bfcl",
    model=ground_truth,
    instructions="Carry out the task by calling one tool at a time.",
    tools=tuple(tool_of(api, name, method) for api in READ_ONLY for name, method in methods(api).items()),
)
