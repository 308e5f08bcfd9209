"""What meets shards at an optimizer's step: checks, flat parameters, clipping, loss scaling, averages."""
