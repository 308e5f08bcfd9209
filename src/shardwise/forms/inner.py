"""What a group leaves behind after its forward where ``reshard_after_forward`` is a number (ZeRO++'s hpZ).

Between steps a group is cut over all ranks of ``dp_shard``. After its forward each rank keeps a larger slice of it, so
that the few neighbours of an inner group (the ranks of a machine, say) hold all of it between them, and backward does
not have to ask the others. On four ranks with an inner size of 2::

    between steps      | rank 0 | rank 1 | rank 2 | rank 3 |
    after forward      |   ranks 0 and 2 |   ranks 1 and 3 |
                         inner groups: ranks 0 and 1, ranks 2 and 3
"""

from __future__ import annotations

import itertools

from torch import Tensor

from shardwise.comm.base import Comm, Handle
from shardwise.spec.layout import GroupLayout


class InnerShard:
    """A slice of a group's gathered parameters, good until the parameters change.

    Args:
        gathered: The group's gathered buffer.
        layout: Its layout.
        comm: Along the inner group.

    Attributes:
        epoch: The outermost forward whose parameters it holds.
        buffer: The slice.
    """

    def __init__(self, gathered: Tensor, layout: GroupLayout, comm: Comm) -> None:
        self.epoch = -1
        self._comm = comm
        cuts = layout.inner_cuts(comm.size)
        self._range = slice(cuts[comm.rank], cuts[comm.rank + 1])
        self._uneven_cuts = cuts if len({stop - start for start, stop in itertools.pairwise(cuts)}) > 1 else None
        self.buffer = gathered.new_zeros(cuts[comm.rank + 1] - cuts[comm.rank])  # gathered may have no memory now

    def keep(self, gathered: Tensor, epoch: int) -> None:
        """Copy this rank's slice out of the gathered buffer, which is about to be released."""
        self.buffer.copy_(gathered[self._range])
        self.epoch = epoch

    def gather(self, gathered: Tensor, *, unit: str) -> Handle:
        """Fill the gathered buffer again.

        Collective:
            All-gather on ``dp_shard_inner`` in the compute dtype; ``(k-1)/k`` of the padded group is sent by each of
            the ``k`` ranks. All of them must call in the same order.
        """
        gathered[self._range].copy_(self.buffer)
        return self._comm.all_gather(gathered, unit=unit, cuts=self._uneven_cuts)
