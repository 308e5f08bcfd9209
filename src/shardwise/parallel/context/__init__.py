"""Context parallelism: every rank has a part of each sequence, and keys and values are sent around a ring.

``spec.traffic.context`` assigns positions to ranks, ``kernel`` is attention to one block of keys, ``ring`` attention to
all blocks, ``root`` divides a model's inputs and joins its loss or logits, and ``apply`` installs this in a model.
"""
