"""From files to the samples of each rank's step.

`source` finds the files of a source, `token_files` maps tokens on disk, `records` reads rows. `tokenizer`, `chat`
(conversations) and `pairs` (answers and classes) convert rows to examples, which `examples` stores. `packing` puts
examples into rows, `samples` returns the rows of an index, `sampler` assigns samples to ranks, and `mixture` chooses
between sources. `stream` reads samples without an index, `user_data` the samples of a spec.
"""
