"""Plain data and arithmetic that planning and the runtime share. Nothing here imports torch."""
