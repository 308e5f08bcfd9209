"""A server for OpenAI's completion and chat requests, with a model on one process, or parallelized by ``tp`` or ``pp``.

``protocol`` reads requests and writes answers. ``completion`` is the continuation of one prompt, and the queue in which
completions wait. ``scheduler`` decides between two steps which completions leave the model and which start. ``text``
converts new tokens to text. ``app`` answers HTTP, ``server`` runs it in a thread next to the model, and ``triton`` and
``repository`` do the same for Triton.
"""
