"""Initialization: models that are built on meta and filled unit by unit, and equal values on all ranks."""
