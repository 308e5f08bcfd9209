"""Logical tensors in and out (``state``), and first values (``init``)."""
