"""From files to the samples of each rank's step.

`source` finds the files behind a name, `token_files` maps tokens that are on disk, `records` reads rows, `form` says
what a row becomes, with `tokenizer`, `chat` for conversations and `pairs` for answers and classes; `examples` keeps
what they have become, `packing` lays it into rows, `samples` gives the rows of an index, `sampler` says who reads
which, and `mixture` from which of several sources. `stream` reads samples without an index.
"""
