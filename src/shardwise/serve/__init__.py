"""A server for OpenAI's completion and chat requests, with a model on one process, or parallelized by ``tp`` or ``pp``.

``protocol`` reads requests and writes answers. ``queue`` has the requests that wait for the model, one for each
answer. ``scheduler`` decides between two steps which of them leave the model and which start. ``text`` converts new
tokens to text. ``app`` answers HTTP, ``server`` runs it in a thread next to the model, and ``triton`` and
``repository`` do the same for Triton.
"""
