"""The engine: when units are gathered, released and reduced. One unit's step, in the order of time.

``build`` makes units (``unit``) and groups (``group``) of a module; ``hooks`` tells the engine (``engine``) when
forward and backward come to a unit; ``order`` and ``spec.prefetch`` say which is next; ``gradient`` takes gradients
from autograd to the shards; ``pool`` lends both their memory.
"""
