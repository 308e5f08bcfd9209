"""Our engine and others on the same model and data, in turns: time, memory, traffic and losses.

In a checkout: ``python -m bench.compare --help``.

``request``   what is trained (three named cases, or a run configuration), by whom, checked before a process starts
``run``       the launcher's side: workers for one case, and their results
``rank``      one worker: it owns one process per engine and lets them take turns
``process``   one engine on one rank
``engine``    model, loss and batches, the same for every engine; our engine and the plain process
``peer``      torch's engines and DeepSpeed, as their documentation recommends
``audit``     bytes of tensors and of collectives, counted from outside
``result``    from measurements to rows: medians, ratios, sums
``table``     rows as text and as Markdown
"""
