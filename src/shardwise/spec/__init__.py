"""Plain data and arithmetic that planning and the engine share. Nothing here imports torch."""
