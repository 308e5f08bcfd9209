"""Pipeline parallelism: a rank holds some of a model's stages and exchanges activations with its neighbours.

In this order: ``element`` (what a model's forward calls), ``split`` (which stage holds what), ``trace`` (which tensors
go from stage to stage), ``stage`` (one stage's forward), ``interpret`` (runs a schedule), ``draws``
(random numbers of stages).
"""
