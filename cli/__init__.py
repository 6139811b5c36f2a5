"""The command line: a thin client of the store; only what must start a cluster imports Ray."""
