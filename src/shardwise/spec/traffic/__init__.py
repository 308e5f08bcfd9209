"""The collectives of a step, predicted: data and context parallelism, experts, and matrices of Muon."""
