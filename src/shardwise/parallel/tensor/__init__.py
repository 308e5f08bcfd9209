"""Tensor parallelism: every rank of ``tp`` stores a part of the large weights and computes with it.

``sharding_plan`` turns a table of styles (data, in ``spec.styles``) into a plan, ``apply`` slices the parameters of a
plain model and replaces forwards, ``mappings`` are the collectives, each with its counterpart in backward, ``layer``,
``linear``, ``loss`` and ``dropout`` are the replaced forwards, and ``agreement`` compares the ranks.
Tensors stay local.
"""
