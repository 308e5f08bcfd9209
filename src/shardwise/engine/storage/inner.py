"""A form for ``reshard_after_forward=k`` (ZeRO++'s hpZ): after forward a group stays sharded over ``k`` ranks.

Between steps a group is sharded over all ranks of ``dp_shard``. After its forward each rank keeps a larger slice, so
that the ``k`` ranks of an inner group (for example those of one machine) together store all of it, and backward gathers
within the inner group. On four ranks with an inner size of 2::

    between steps      | rank 0 | rank 1 | rank 2 | rank 3 |
    after forward      |   ranks 0 and 2 |   ranks 1 and 3 |
                         inner groups: ranks 0 and 1, ranks 2 and 3
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.comm.base import Handle
from shardwise.engine.group import Form, Group

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


def _as_inner(name: str) -> Any:
    """Make a method of :class:`Around` that calls the other form's method."""

    def call(self: Around, *args: Any) -> Any:
        return getattr(self.inner, name)(*args)

    return call


class Around(Form):
    """A form that changes some methods of another form, ``inner``, and delegates the rest to it."""

    def __init__(self, inner: Form) -> None:
        self.inner = inner

    make_master = _as_inner("make_master")
    zeros = _as_inner("zeros")
    elements = _as_inner("elements")
    values = _as_inner("values")
    set_values = _as_inner("set_values")
    start = _as_inner("start")
    gather = _as_inner("gather")
    reduce = _as_inner("reduce")
    store_sum = _as_inner("store_sum")
    wait_for_host = _as_inner("wait_for_host")
    buffers = _as_inner("buffers")


class Inner(Around):
    """Keeps a slice of the gathered parameters from forward to backward, valid until the parameters change.

    Args:
        inner: Form of the group between steps.
        size: Number of ranks in an inner group.

    Attributes:
        kept_slice: The slice, in the compute dtype.
    """

    def __init__(self, inner: Form, size: int) -> None:
        super().__init__(inner)
        self._size = size

    def start(self, group: Group, engine: Engine) -> None:
        """Open the inner group's Comm, and allocate the slice."""
        super().start(group, engine)
        comm = self._comm = engine.comms.inner_comm(self._size)
        cuts = group.layout.inner_bounds(comm.size)
        self._range = slice(cuts[comm.rank], cuts[comm.rank + 1])
        self._uneven_bounds = cuts if len({stop - start for start, stop in itertools.pairwise(cuts)}) > 1 else None
        self.kept_slice = group.gathered.new_zeros(
            cuts[comm.rank + 1] - cuts[comm.rank]
        )  # gathered may have no memory now

    def keep(self, group: Group) -> None:
        """Copy this rank's slice out of the gathered buffer, which is about to be released."""
        self.kept_slice.copy_(group.gathered[self._range])
        self.kept_epoch = group.epoch

    def gather_kept(self, group: Group) -> Handle:
        """Fill the gathered buffer again from the slices of the inner group.

        Collective:
            All-gather on ``dp_shard_inner`` in the compute dtype; each of the ``k`` ranks sends ``(k-1)/k`` of the
            padded group. All of them must call in the same order.
        """
        group.gathered[self._range].copy_(self.kept_slice)
        return self._comm.all_gather(group.gathered, unit=group.unit.name, bounds=self._uneven_bounds)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers of the inner form, and the slice."""
        return [*super().buffers(), ("gathered", self.kept_slice)]
