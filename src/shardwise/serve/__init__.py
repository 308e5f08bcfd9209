"""A server that answers OpenAI's requests for completions and chats with a model over one process, ``tp`` or ``pp``.

``job`` is a prompt under way and the queue before the model, ``scheduler`` decides between two steps which rows leave
and which begin, ``protocol`` reads requests and writes answers, ``text`` makes text of tokens as they come, ``app`` is
what HTTP reaches, and ``server`` joins them: HTTP in a thread, the model in the main thread of every rank.
"""
