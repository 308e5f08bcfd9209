"""Context parallelism: every rank holds a part of each sequence, and keys and values go round in a ring.

To be read in this order: ``spec.zigzag`` (who holds what), ``kernel``, ``ring``, ``split``, ``root``, ``apply``.
"""
