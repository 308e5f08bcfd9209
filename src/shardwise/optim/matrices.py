"""Exchange of matrices: slices are gathered into full matrices, each on one rank, and results are scattered.

With three matrices over two ranks, ``a`` and ``c`` owned by rank 0 and ``b`` by rank 1::

    gather       rank 0 has a0 b0 c0       -- b0 -->          rank 1 assembles b
                 rank 1 has a1 b1 c1       -- a1 c1 -->       rank 0 assembles a and c
    scatter      rank 0                    -- a1 c1 -->       rank 1
                 rank 1                    -- b0 -->          rank 0

Each direction is one all-to-all for all matrices. A slice of which several ranks have copies is sent by one of them,
and the result is sent to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.comm.dtype import copy_shared
from shardwise.comm.rows import exchange_rows
from shardwise.spec.extent import Extent
from shardwise.spec.layout import contiguous_stride

#: The ranges of matrices on one rank, by the matrices' names.
RankRanges = Mapping[str, Extent]


@dataclass(frozen=True)
class Matrix:
    """A matrix and its distribution over ranks.

    Attributes:
        full: Extent of the full matrix.
        holders: The range on each rank that has some of it, by rank.
        owner: The rank that assembles it.
    """

    full: Extent
    holders: Mapping[int, Extent]
    owner: int

    def senders(self) -> list[int]:
        """Return the ranks that send their range to the owner: of ranks with copies, the owner itself or the first."""
        first: dict[Extent, int] = {}
        for rank in sorted(self.holders, key=lambda rank: (rank != self.owner, rank)):
            first.setdefault(self.holders[rank], rank)
        return sorted(first.values())


def assign_owners(by_rank: Sequence[RankRanges], work: Callable[[tuple[int, ...]], float]) -> dict[str, Matrix]:
    """Choose an owner for every matrix among the ranks with a part of it, so that work is balanced.

    Matrices are assigned in descending order of work, each to the rank with the least so far. All ranks compute the
    same result.

    Args:
        by_rank: The ranges on each rank, by rank.
        work: Returns the work of a matrix, given its shape.
    """
    holders: dict[str, dict[int, Extent]] = {}
    for rank, extents in enumerate(by_rank):
        for name, extent in extents.items():
            if extent.numel:
                holders.setdefault(name, {})[rank] = extent
    load = [0.0] * len(by_rank)
    found = {}
    costs = {name: work(next(iter(ranks.values())).shape) for name, ranks in holders.items()}
    for name in sorted(holders, key=lambda name: (-costs[name], name)):
        extent = next(iter(holders[name].values()))
        owner = min(holders[name], key=lambda rank: (load[rank], rank))
        load[owner] += costs[name]
        full = replace(extent, start=0, stop=math.prod(extent.shape), cuts=())
        found[name] = Matrix(full, holders[name], owner)
    return {name: found[name] for name in sorted(found)}


class Exchange:
    """Moves matrices between their holders and their owners.

    Args:
        matrices: The matrices to exchange, in the same order on all ranks that have some of them.
        comm: Comm over all ranks.
    """

    def __init__(self, matrices: Mapping[str, Matrix], comm: Comm) -> None:
        self._comm, self._rank = comm, comm.rank
        self._matrices = matrices
        ranks = range(comm.size)
        own, own_rank = {name: m for name, m in matrices.items() if m.owner == self._rank}, self._rank
        sent = {name: m for name, m in matrices.items() if own_rank in m.senders()}
        received = {name: m for name, m in matrices.items() if own_rank in m.holders}
        self._to_owners = [[name for name, m in sent.items() if m.owner == rank] for rank in ranks]
        self._from_senders = [[name for name, m in own.items() if rank in m.senders()] for rank in ranks]
        self._to_holders = [[name for name, m in own.items() if rank in m.holders] for rank in ranks]
        self._from_owners = [[name for name, m in received.items() if m.owner == rank] for rank in ranks]

    @property
    def owned(self) -> list[str]:
        """The names of the matrices that this rank assembles."""
        return [name for name, matrix in self._matrices.items() if matrix.owner == self._rank]

    def gather(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Assemble the matrices that this rank owns.

        Args:
            parts: This rank's slices by name, each flat in memory order.
            dtype: Dtype of the messages and of the result.

        Collective:
            All-to-all of every slice that its owner does not have, once, in ``dtype``. All ranks must call.
        """
        rows = [parts[name].to(dtype=dtype, device=self._comm.device) for names in self._to_owners for name in names]
        received = exchange_rows(
            _packed(rows, dtype, self._comm.device),
            self._cuts(self._to_owners, lambda _: self._rank),
            self._cuts(self._from_senders, lambda rank: rank),
            self._comm,
            "matrices",
        )
        full = {name: received.new_empty(self._matrices[name].full.numel) for name in self.owned}
        place = 0
        for rank, names in enumerate(self._from_senders):
            for name in names:
                extent = self._matrices[name].holders[rank]
                copy_shared(extent, received[place : place + extent.numel], self._matrices[name].full, full[name])
                place += extent.numel
        return {name: self._view(name, flat) for name, flat in full.items()}

    def scatter(self, full: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Send slices of full matrices from their owners to all ranks; returns this rank's slices, flat, by name.

        Collective:
            All-to-all of every slice to each rank that has it and is not the owner, in ``dtype``. All ranks must call.
        """
        rows = []
        for rank, names in enumerate(self._to_holders):
            for name in names:
                matrix = self._matrices[name]
                flat, extent = self._flat(name, full[name].to(dtype)), matrix.holders[rank]
                part = flat.new_empty(extent.numel)
                copy_shared(matrix.full, flat, extent, part)
                rows.append(part)
        received = exchange_rows(
            _packed(rows, dtype, self._comm.device),
            self._cuts(self._to_holders, lambda rank: rank),
            self._cuts(self._from_owners, lambda _: self._rank),
            self._comm,
            "matrices",
        )
        names = [name for of_owner in self._from_owners for name in of_owner]
        sizes = [self._matrices[name].holders[self._rank].numel for name in names]
        return dict(zip(names, received.split(sizes), strict=True))

    def _cuts(self, by_rank: Sequence[Sequence[str]], holder: Callable[[int], int]) -> list[int]:
        """Return offsets of the elements for or from each rank, and the end; ``holder`` maps it to the range's rank."""
        sizes = [
            sum(self._matrices[n].holders[holder(rank)].numel for n in names) for rank, names in enumerate(by_rank)
        ]
        return list(accumulate(sizes, initial=0))

    def _view(self, name: str, flat: Tensor) -> Tensor:
        full = self._matrices[name].full
        return flat.as_strided(full.shape, full.stride or contiguous_stride(full.shape))

    def _flat(self, name: str, matrix: Tensor) -> Tensor:
        """Return the elements of a matrix in the memory order of the parameter."""
        flat = matrix.new_empty(matrix.numel())
        self._view(name, flat).copy_(matrix)
        return flat


def _packed(rows: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat([row.view(-1) for row in rows]) if rows else torch.empty(0, dtype=dtype, device=device)
