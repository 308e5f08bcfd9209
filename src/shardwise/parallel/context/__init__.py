"""Context parallelism: every rank holds a part of each sequence, and keys and values travel around a ring.

``spec.traffic.context`` says which rank holds which positions, ``kernel`` is attention to one block of keys, ``ring``
attention to all blocks, ``root`` divides what a model is given and joins its loss or logits, ``apply`` installs this in
a model.
"""
