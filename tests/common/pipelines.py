"""Peak numbers of stored microbatches of pipelines in closed form, beside which the counted ones are held."""

from __future__ import annotations

from shardwise.spec.schedule.builders import forwards_ahead
from shardwise.spec.schedule.closed import StoredPairs


def peak_stored_pairs(schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int, rank: int) -> StoredPairs:
    """The peak number of stored pairs of a rank, of all its stages, in closed form.

    ====================  =================================  ==================
    schedule              activations                        in flight
    ====================  =================================  ==================
    ``gpipe``             m                                  the same
    ``1f1b``              min(p - r, m)                      the same
    ``interleaved-1f1b``  min(2(p-r-1) + (v-1)p + 1, vm)     the same
    ``zb-h1``             min(p - r, m)                      min(p, m)
    ``zb-v``              min(2p, 2m, m + r + 1)             the same
    ====================  =================================  ==================

    A stage of ``interleaved-1f1b`` and ``zb-v`` is a ``v``-th of a rank's layers. Counted in layers, every rank of
    ``zb-v`` stores as much as the first rank of 1F1B.
    """
    p, m, v = pp, num_microbatches, num_virtual_stages
    if schedule == "gpipe":
        return StoredPairs(m, m)
    if schedule == "interleaved-1f1b":
        peak = min(forwards_ahead(p, rank, v) + 1, v * m)
        return StoredPairs(peak, peak)
    if schedule == "zb-v":
        peak = min(2 * p, 2 * m, m + rank + 1)
        return StoredPairs(peak, peak)
    return StoredPairs(min(p - rank, m), min(p, m) if schedule == "zb-h1" else min(p - rank, m))
