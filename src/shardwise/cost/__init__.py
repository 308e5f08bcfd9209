"""What the work of a step costs: operations of a model's units, and how long hardware takes for them. No torch."""
