"""From files to the samples of each rank's step.

`source` finds the files behind a name, `token_files` maps tokens that are on disk, `tokenizer` makes them of text,
`records` reads data sets, `chat` says which tokens of a conversation are trained, `examples` keeps tokenized
conversations, `packing` lays them into rows, `samples` gives the rows of an index, `sampler` says who reads which, and
`mixture` from which of several sources.
"""
