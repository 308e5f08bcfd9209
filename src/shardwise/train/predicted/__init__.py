"""Memory and time of a run's step, predicted by the planner and compared with measurements."""
