"""Tensor parallelism: every rank of ``tp`` holds a part of the large weights and computes with it.

``apply`` cuts the parameters of a plain model and replaces the forwards that need it; ``pairs`` are the collectives,
each with its counterpart in backward; the other files are one kind of layer each. Which layer is cut how is data
(``spec.styles``). Tensors stay plain and local: outside of this folder nothing knows about the axis.
"""
