"""First values: models built on meta, filled unit by unit, and equal over the ranks."""
