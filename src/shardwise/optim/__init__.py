"""Optimizers on shards: checks, flat parameters, clipping, loss scaling, averages of the weights."""
