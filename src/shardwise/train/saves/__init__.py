"""Checkpoints of a run, and what they hold beside tensors."""
