"""The drill: a user's own agent, killed at every point of a run, and what became of it each time."""
