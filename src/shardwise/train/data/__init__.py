"""From files to the samples of each rank's step.

`source` finds the files behind a name, `token_files` maps tokens that are on disk, `records` reads rows; `tokenizer`,
`chat` for conversations and `pairs` for answers and classes say what a row becomes; `examples` keeps what they have
become, `packing` lays it into rows, `samples` gives the rows of an index, `sampler` says who reads which, and `mixture`
from which of several sources. `stream` reads samples without an index, `given` those of a user.
"""
