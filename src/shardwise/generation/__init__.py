"""Inference: choosing tokens, and decoding with a cache, also over a pipeline."""
