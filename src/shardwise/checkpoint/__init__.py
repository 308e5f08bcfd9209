"""Checkpoints: a folder of safetensors files with a JSON manifest, which appears either complete or not at all.

Checkpoints consist of :class:`~shardwise.spec.extent.Extent`: ranges of named logical tensors. Different ranks may own
a range at saving and at loading, so a checkpoint loads on any number of ranks.
"""
