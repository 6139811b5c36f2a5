"""The event log: what is durable, and the rules under which it may change. Knows nothing of Ray."""
