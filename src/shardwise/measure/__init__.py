"""Measures what a model holds and computes by running it: on meta tensors, or counted from outside."""
