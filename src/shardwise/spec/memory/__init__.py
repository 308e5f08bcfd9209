"""Closed forms of a rank's memory: the engine's buffers, and optimizer state."""
