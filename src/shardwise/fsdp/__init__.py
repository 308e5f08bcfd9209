"""The engine: sharded parameters, gradients and optimizer state for any module.

To read it from the bottom up: ``spec.placement``, ``spec.layout``, ``spec.prefetch``, then ``group``, ``gradient``,
``unit``, ``runtime`` (with ``hooks`` and ``mishaps``), ``build``, ``start``, ``api`` and ``fully_shard``.
"""
