"""Pipeline parallelism: a rank stores some of a model's stages and exchanges activations with its neighbours.

``stage_module`` finds the modules that a model's forward calls and assigns them to stages. ``marks`` and ``trace`` find
the tensors that stages exchange. ``stage`` is one stage's forward, ``runner`` runs a schedule of forwards and
backwards, ``weight_grad_store`` splits a backward in two, and ``pipelined`` is the model's training step.
"""
