"""What a model is asked for a turn, from the state of its run."""

from __future__ import annotations

from .agent import Agent
from .machine import CallModel, State, messages
from .model import ModelRequest


def request_of(run_id: str, state: State, agent: Agent, step: CallModel) -> ModelRequest:
    """The request for the turn that is due."""
    created, plan = state.created, step.plan
    tools = [{"name": t.name, "description": t.description, "schema": t.schema} for t in agent.offered]
    return ModelRequest.model_construct(
        run_id=run_id,
        turn_index=step.turn_index,
        input=created.input,
        metadata=created.metadata,
        instructions=agent.instructions,
        messages=messages(state),
        tools=[] if plan.final else tools,
        withheld=tools if plan.final else [],
        turns_left=plan.turns_left,
        few_turns_left=plan.few_left,
        notice=plan.notice or step.notice,
        max_output_tokens=plan.max_output_tokens,
    )
