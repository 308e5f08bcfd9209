"""The collectives of a step, predicted: data, tensor, context and pipeline parallelism, and their products."""
