"""The Comms of a data-parallel mesh: which ranks each collective of a model runs over.

On ``dp_replicate=2 x dp_shard=4`` with an inner size of 2, rank 5 (``*``) belongs to these groups::

    dp_replicate 0    0   1 | 2   3
    dp_replicate 1    4   5*| 6   7

    dp_shard          4 5 6 7      gathers, and sums of gradients inside the group that holds the parameters once
    dp_shard_inner    4 5          gathers for backward, where units are kept sharded over 2 ranks after forward
    dp_replicate      1 5          sums of gradient shards over the groups
    dp                0 to 7       control messages, losses, checkpoints

With ``ep=2`` the experts have Comms of their own, and tokens travel between ranks that hold different ones::

    ep                4 5          tokens to experts and back
    edp               5 7          gathers and sums of the experts that these ranks hold
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.comm.base import Comm
from shardwise.spec.mesh import AXES, Mesh
from shardwise.spec.slice import Slice

#: The axis of all data-parallel ranks, and that of the inner groups of ``dp_shard``: no axes of the mesh themselves.
DATA_PARALLEL, INNER, WORLD = "dp", "dp_shard_inner", "world"

#: The ranks that share parameters and hold the same experts.
EXPERT_SHARD = "edp"


#: Opens a Comm over some ranks of the mesh, this one among them: ``open(axis, purpose, ranks)``.
OpenAxis = Callable[[str, str, Sequence[int]], Comm]


@dataclass(frozen=True)
class Comms:
    """The Comms of one model on this rank.

    Attributes:
        gather: Along ``dp_shard`` (and ``cp``, whose ranks hold the same model): parameters.
        reduce: Along ``dp_shard`` (and ``cp``): gradients.
        replicate: Along ``dp_replicate``; ``None`` where the model is not replicated over groups.
        control: Over all ranks that train the same parameters, in the order of the mesh.
        world: Over all ranks of the mesh, in its order; ``control`` where that is all of them.
        inner: Along inner groups of ``dp_shard``, by their size; :meth:`inner_comm` fills it.
        tp: Along ``tp``; ``None`` where that has one rank. Likewise ``pp``, ``cp`` and ``ep``.
        expert: Those of the experts, where ranks hold different ones; ``None``: the same as of other parameters.
    """

    gather: Comm
    reduce: Comm
    replicate: Comm | None
    control: Comm
    world: Comm
    inner: dict[int, Comm]
    _open_inner: Callable[[int], Comm]
    tp: Comm | None = None
    pp: Comm | None = None
    cp: Comm | None = None
    ep: Comm | None = None
    expert: Comms | None = None

    def __iter__(self) -> Iterator[Comm]:
        """Each Comm once."""
        held = (self.gather, self.reduce, self.replicate, *self.inner.values(), self.control)
        held += (self.world, self.tp, self.pp, self.cp, self.ep, *(self.expert or ()))
        return iter(dict.fromkeys(comm for comm in held if comm is not None))

    def inner_comm(self, size: int) -> Comm:
        """Along the inner groups of ``size`` neighbours on ``dp_shard``.

        Collective:
            On CUDA the first call for a size makes a communicator: all ranks must call, in the same order.
        """
        if size not in self.inner:
            self.inner[size] = self._open_inner(size)
        return self.inner[size]

    def of(self, held: Slice | None) -> Comms:
        """Over the ranks that hold the same part of a parameter."""
        return self.expert if held is not None and held.is_expert and self.expert is not None else self

    @property
    def num_replicas(self) -> int:
        """Groups that each hold the whole model."""
        return self.replicate.size if self.replicate is not None else 1

    @property
    def replica(self) -> int:
        """Which of those groups this rank belongs to."""
        return self.replicate.rank if self.replicate is not None else 0

    @property
    def num_ranks(self) -> int:
        """Ranks that train the same parameters: what sums of gradients are divided by."""
        return self.num_replicas * self.reduce.size

    @property
    def reader(self) -> tuple[int, int]:
        """Which share of the samples this rank reads, and of how many shares: ranks of one model read the same."""
        context = self.cp.size if self.cp is not None else 1
        return self.control.rank // context, self.control.size // context

    @property
    def sizes(self) -> dict[str, int]:
        """Size by mesh axis, outermost first; axes of one rank other than the data-parallel ones are left out."""
        context = self.cp.size if self.cp is not None else 1
        found = {"dp_replicate": self.num_replicas, "dp_shard": self.reduce.size // context}
        others = {axis: comm.size for axis in ("pp", "cp", "tp") if (comm := getattr(self, axis)) is not None}
        return {axis: size for axis in AXES if (size := (found | others).get(axis)) is not None}

    def counts(self, held: Slice | None) -> bool:
        """Whether what is added up over :attr:`across` counts a parameter here: of those that hold the same, once."""
        if held is not None:
            return held.counts
        return self.tp is None or self.tp.rank == 0

    @property
    def across(self) -> tuple[Comm, ...]:
        """Along the axes whose ranks hold different parameters of one model, innermost first."""
        return tuple(comm for comm in (self.tp, self.pp) if comm is not None)


def lay_out(mesh: Mesh, rank: int, open_axis: OpenAxis, *, is_replicated: bool = False) -> Comms:
    """The Comms of ``rank`` on ``mesh``, each opened by ``open_axis``, in one order on all ranks.

    Args:
        mesh: The axes.
        rank: This rank in the mesh.
        open_axis: Makes a Comm.
        is_replicated: Sums go over ``dp_replicate`` also where that has one rank only.
    """
    shard = mesh.shard_group(rank)
    gather, reduce = open_axis("dp_shard", "gather", shard), open_axis("dp_shard", "reduce", shard)
    replicate, control = None, gather
    if is_replicated or mesh.dp_replicate > 1:
        replicate = open_axis("dp_replicate", "reduce", mesh.group("dp_replicate", rank))
    if mesh.dp_replicate > 1:
        control = open_axis(DATA_PARALLEL, "control", mesh.data_parallel_group(rank))

    def open_inner(size: int) -> Comm:
        return open_axis(INNER, "gather", mesh.inner_group(rank, size))

    world = control
    if mesh.world_size > len(shard) * mesh.dp_replicate:
        world = open_axis(WORLD, "control", range(mesh.world_size))
    others: dict[str, Any] = {
        axis: open_axis(axis, purpose, mesh.group(axis, rank))
        for axis, purpose in (("tp", "activations"), ("pp", "activations"), ("cp", "activations"))
        if mesh.size(axis) > 1
    }
    comms = Comms(gather, reduce, replicate, control, world, {}, open_inner, **others)
    return comms if mesh.ep == 1 else _with_experts(comms, mesh, rank, open_axis)


def _with_experts(comms: Comms, mesh: Mesh, rank: int, open_axis: OpenAxis) -> Comms:
    same = mesh.expert_shard_group(rank)
    gather, reduce = open_axis(EXPERT_SHARD, "gather", same), open_axis(EXPERT_SHARD, "reduce", same)
    control = gather
    if mesh.dp_replicate > 1:
        step = mesh.ep * len(same)
        place = mesh.shard_group(rank).index(rank) % mesh.ep
        everyone = mesh.data_parallel_group(rank)
        ranks = [r for start in range(0, len(everyone), step) for r in everyone[start : start + step][place :: mesh.ep]]
        control = open_axis(EXPERT_SHARD, "control", ranks)
    expert = dataclasses.replace(comms, gather=gather, reduce=reduce, control=control, inner={})
    return dataclasses.replace(comms, expert=expert, ep=open_axis("ep", "activations", mesh.inner_group(rank, mesh.ep)))
