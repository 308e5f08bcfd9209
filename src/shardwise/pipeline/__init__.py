"""Pipeline parallelism: a rank holds some of a model's stages and exchanges activations with its neighbours.

``element`` finds what a model's forward calls, ``split`` says which stage holds it, ``taint`` and ``trace`` find which
tensors go from stage to stage, ``stage`` is one stage's forward, ``interpret`` runs a schedule of forwards and
backwards, ``weight_gradient`` splits a backward in two, and ``pipelined`` is the model's training step.
"""
