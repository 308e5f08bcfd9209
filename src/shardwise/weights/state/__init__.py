"""Logical tensors in and out: whole state dicts, ranges for checkpoints, whole parameters, optimizer state."""
