"""The cost of a step: FLOPs and bytes of a model's units, and the hardware's time for them. No torch."""
