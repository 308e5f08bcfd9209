"""Full tensors in and out: state dicts, ranges for checkpoints, full parameters, optimizer state."""
