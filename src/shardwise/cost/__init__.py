"""The cost of a step's work: operations of a model's units, and hardware's time for them. No torch."""
