"""Expert parallelism: each rank of ``ep`` holds some experts of every mixture, and tokens go to those that they chose.

Read in this order: ``find`` (which modules are mixtures), ``route`` (which token goes where), ``exchange`` (how it gets
there and back), ``layer`` (forwards), ``apply`` (the model is cut).
"""
