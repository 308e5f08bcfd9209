"""Expert parallelism: each rank of ``ep`` stores some experts of every mixture, and tokens are sent to their experts.

``route`` routes tokens and exchanges them; ``layer`` finds mixtures, divides them and replaces their forward.
"""
