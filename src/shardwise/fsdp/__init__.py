"""The engine: sharded parameters, gradients and optimizer state for any module. Read placement, layout, order, group,
gradient, unit, runtime, build, in that order.
"""
