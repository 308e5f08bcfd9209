"""Checkpoints: safetensors files and a JSON manifest in a folder that appears whole or not at all.

It works on :class:`~shardwise.spec.extent.Extent`: ranges of named logical tensors. Who holds which range at saving and
at loading does not matter, so a checkpoint loads on any number of ranks.
"""
