"""Measurement of a model's memory and work, on meta tensors or during a run, and of a machine's speed."""
