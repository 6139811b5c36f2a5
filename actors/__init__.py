"""The run's machine, the actors that drive it and the tasks that act: everything above the log."""
