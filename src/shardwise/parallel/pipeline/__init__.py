"""Pipeline parallelism: a rank holds some of a model's stages and exchanges activations with its neighbours.

``stage_module`` finds what a model's forward calls and says which stage has it, ``marks`` and ``trace`` find which
tensors go from stage to stage, ``stage`` is one stage's forward, ``runner`` runs a schedule of forwards and backwards,
``weight_grad_store`` splits a backward in two, and ``pipelined`` is the model's training step.
"""
