"""The model and the optimizer that a configuration describes."""
