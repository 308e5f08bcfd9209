"""Checkpoints of a run, and their content other than tensors."""
