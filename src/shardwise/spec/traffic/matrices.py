"""Messages of ``sw.Muon`` in a step: slices of matrices to the ranks that orthogonalize them, and the results back.

A matrix of M elements lies in ``parts`` slices, by ``dp_shard``, ``cp`` and ``tp``, each of which ``replicas`` ranks
hold. One of these ranks owns it::

    collect      every other slice comes from one of its holders             M (parts - 1) / parts
    give back    every holder but the owner gets its slice of the result     M (replicas - 1 / parts)

Owners have about equal work, so that the ranks send about equal shares of it. A matrix that is small beside its unit
lies on fewer ranks than share the unit, and less of it is sent: the closed form is the most.
"""

from __future__ import annotations

#: Bytes of an element on its way: bfloat16.
WIRE_BYTES = 2
#: Newton-Schulz iterations of a step.
NS_STEPS = 5


def exchanged_bytes(held: float, parts: int, replicas: int) -> tuple[float, float]:
    """Bytes that a rank sends to owners of matrices, and of results, at most, on the average of the ranks.

    Args:
        held: Elements of matrices that the rank updates.
        parts: Slices that a matrix lies in.
        replicas: Ranks that hold the same slice.
    """
    return (
        WIRE_BYTES * held * (parts - 1) / (parts * replicas),
        WIRE_BYTES * held * (1 - 1 / (parts * replicas)),
    )
