"""Messages of ``sw.Muon`` in a step: slices of matrices to the ranks that orthogonalize them, and the results back.

A matrix of M elements is divided into ``parts`` slices, by ``dp_shard``, ``cp`` and ``tp``, and ``replicas`` ranks
have each slice. One of these ranks owns the matrix::

    collect      the owner receives every other slice from one of its ranks       M (parts - 1) / parts
    return       every other rank receives its slice of the result                M (replicas - 1 / parts)

Owners have about equal work, so all ranks send about equally much. A matrix that is small compared with its unit is on
fewer ranks than the unit, and less is sent: the closed form is an upper bound.
"""

from __future__ import annotations

#: Bytes of an element that is sent: bfloat16.
WIRE_BYTES = 2
#: Newton-Schulz iterations of a step.
NS_STEPS = 5


def exchanged_bytes(numel: float, parts: int, replicas: int) -> tuple[float, float]:
    """Upper bounds of the bytes that a rank sends, averaged over ranks: slices to owners, and results.

    Args:
        numel: Elements of matrices that the rank updates.
        parts: Slices of a matrix.
        replicas: Ranks that have the same slice.
    """
    return (
        WIRE_BYTES * numel * (parts - 1) / (parts * replicas),
        WIRE_BYTES * numel * (1 - 1 / (parts * replicas)),
    )
