"""A server that answers OpenAI's requests for completions and chats with a model over one process, ``tp`` or ``pp``.

``protocol`` reads requests and writes answers. ``completion`` holds the continuation of one prompt, and the queue in
which completions wait for the model. ``scheduler`` decides between two steps which of them leave the model and which
begin. ``text`` turns tokens into text as they come. ``app`` answers HTTP, ``server`` runs it in a thread beside the
model, and ``triton`` and ``repository`` do the same for Triton.
"""
