"""Our engine and torch's own on the same model and data, in turns: time, memory, traffic and losses.

``case``      what is trained: three named cases, or a run configuration (no torch)
``request``   what is asked for, checked before a process starts (no torch)
``run``       the launcher's side: workers for one case, and their results
``rank``      one worker: it owns one process per engine and lets them take turns
``process``   one engine on one rank
``workload``  model, loss and batches, the same for every engine
``engine``    our engine and the plain process; ``peer``: torch's engines as their documentation recommends
``count``     bytes of tensors, seen from outside
``result``    from measurements to rows: medians, ratios, sums
``table``     rows as text, as a terminal's table and as Markdown
``verb``      what ``shardwise compare`` calls
"""
