"""Inference: choosing tokens, decoding with a cache, over a pipeline too."""
