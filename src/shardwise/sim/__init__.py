"""Simulation of a step as tasks on streams that wait for each other. No torch."""
