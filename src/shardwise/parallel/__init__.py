"""Model parallelism: ways to divide a model over ranks besides those of its data."""
