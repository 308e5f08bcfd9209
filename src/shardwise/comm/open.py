"""Opening the Comms of mesh axes over torch.distributed."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.comm.axes import DATA_PARALLEL, Comms, lay_out
from shardwise.comm.base import Comm
from shardwise.comm.communicator import communicator, timeout_s_of
from shardwise.comm.debug import TRANSPORT, debugged
from shardwise.comm.gloo import GlooComm
from shardwise.comm.ledger import Ledger
from shardwise.comm.staged import StagedComm
from shardwise.comm.watch import StallWatch
from shardwise.launch.world import init_process_group, read_world
from shardwise.spec.errors import CommError, MeshError
from shardwise.spec.mesh import Mesh

#: The name of a channel lists up to so many ranks.
_MAX_SHOWN = 8

#: How many Comms of one purpose this process has opened over the same ranks on one axis. These ranks open them in the
#: same order, whatever else each of them opens.
_num_opened: Counter[tuple[str, str]] = Counter()


def join_world(device: torch.device) -> dist.ProcessGroup:
    """The default process group: the one that exists, or a new one as the environment describes it.

    Collective:
        All ranks must call where no group exists yet.
    """
    if not dist.is_initialized():
        init_process_group(read_world(), device)
    group = dist.group.WORLD
    assert group is not None
    return group


def open_comms(
    device: torch.device, axis: str = "dp_shard", group: dist.ProcessGroup | None = None
) -> tuple[Comm, Comm]:
    """The Comms for gathers and for reductions over ``group`` (the whole world where it is ``None``).

    On NCCL each has a communicator of its own, so that a gather never queues behind a reduction; Comms of other models
    over the same ranks share both (``comm.communicator``). On Gloo messages go from rank to rank and are told apart by
    their tags: every Comm uses the group as it is. Where the group has no NCCL, tensors on a GPU go over Gloo by way of
    host memory (``comm.staged``).

    Collective:
        All ranks of the group must call, in the same order.

    Raises:
        CommError: The group's backend cannot move tensors of this device.
    """
    open_axis = _Opener(device, group or join_world(device))
    return open_axis(axis, "gather", open_axis.ranks), open_axis(axis, "reduce", open_axis.ranks)


@dataclass(frozen=True)
class Place:
    """Ranks to shard a model over.

    Attributes:
        mesh: Their axes.
        group: A process group that holds them; ``None``: the whole world.
        ranks: Those of the group's ranks that make up the mesh, ascending; ``None``: all.
    """

    mesh: Mesh
    group: dist.ProcessGroup | None = None
    ranks: Sequence[int] | None = None

    @classmethod
    def of(cls, where: dist.ProcessGroup | dist.DeviceMesh | None, device: torch.device) -> Place:
        """The ranks of a group, of a ``DeviceMesh`` (shard) or (replicate, shard), or of the world.

        Raises:
            MeshError: The mesh has more dimensions, or its ranks are not in ascending order.
        """
        if not isinstance(where, dist.DeviceMesh):
            return cls(Mesh(dp_shard=(where or join_world(device)).size()), where)
        other = {"tp", "pp", "cp", "ep"}.intersection(where.mesh_dim_names or ())
        if other:
            raise MeshError(
                f"a DeviceMesh with the axes {', '.join(where.mesh_dim_names or ())}: sw.fully_shard shards over"
                f" data-parallel ranks only, not over {', '.join(sorted(other))}.\n"
                f"  Use sw.parallelize(model, sw.ParallelPlan({min(other)}=...)), or pass mesh['dp_shard']."
            )
        if where.ndim == 1:
            return cls(Mesh(dp_shard=where.size()), where.get_group())
        ranks = where.mesh.flatten().tolist()
        if where.ndim != 2 or ranks != sorted(ranks):
            raise MeshError(
                f"a DeviceMesh of shape {list(where.mesh.shape)} over ranks {ranks} cannot be sharded over.\n"
                "  Use one dimension (shard) or two (replicate, shard), with ranks in ascending order."
            )
        replicate, shard = where.mesh.shape
        return cls(Mesh(dp_replicate=replicate, dp_shard=shard), ranks=ranks)

    def open(self, device: torch.device, *, is_replicated: bool = False) -> Comms:
        """Its Comms.

        Args:
            device: Of the tensors that move.
            is_replicated: As for :func:`shardwise.comm.axes.lay_out`.

        Collective:
            On CUDA every axis connects its ranks: all ranks of the mesh must call, in the same order.

        Raises:
            CommError: The group's backend cannot move tensors of this device.
        """
        open_axis = _Opener(device, self.group or join_world(device), self.ranks)
        rank = open_axis.ranks.index(open_axis.own)
        return lay_out(self.mesh, rank, open_axis.by_place, is_replicated=is_replicated)

    def open_samples(self, device: torch.device) -> Comm:
        """One more Comm over this rank's data-parallel ranks: those that have other samples, for one model.

        Collective:
            As :meth:`open`.
        """
        open_axis = _Opener(device, self.group or join_world(device), self.ranks)
        rank = open_axis.ranks.index(open_axis.own)
        return open_axis.by_place(DATA_PARALLEL, "samples", self.mesh.data_parallel_group(rank))


class _Opener:
    """Opens Comms over some ranks of a process group.

    Attributes:
        ranks: All that it knows, in the group's numbers.
        own: This one.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        self.ranks = tuple(ranks) if ranks is not None else tuple(range(group.size()))
        self._device = device
        self._group = group
        self.own = group.rank()
        backends = dist.get_backend_config(group)
        self._is_nccl = _is_moved_by_nccl(device, backends)
        if not self._is_nccl and "gloo" not in backends:
            raise CommError(
                f"the process group's backend is {dist.get_backend(group)}, which does not move {device.type.upper()}"
                " tensors.\n  Call torch.distributed.init_process_group('gloo') (or 'cpu:gloo,cuda:nccl')."
            )
        self._has_gloo = "gloo" in backends
        self._watch = StallWatch.of(group) if group.size() > 1 else None
        if self._watch is not None and self._is_nccl:
            self._watch.limit_s = timeout_s_of(group, device)

    def by_place(self, axis: str, purpose: str, places: Sequence[int]) -> Comm:
        """A Comm over the ranks at these places of ``ranks``."""
        return self(axis, purpose, [self.ranks[place] for place in places])

    def __call__(self, axis: str, purpose: str, ranks: Sequence[int]) -> Comm:
        """A Comm over ``ranks``."""
        # Ranks tell messages and the watch compares histories by the channel's name: it is the same on all members, and
        # no other Comm of this process has it.
        world = dist.get_process_group_ranks(self._group)
        place = f"{axis}{_shown([world[rank] for rank in ranks])}"
        channel = f"{place}/{_num_opened[place, purpose]}/{purpose}"
        _num_opened[place, purpose] += 1
        if self._is_nccl:
            from shardwise.comm.nccl import NcclComm  # needs a CUDA build only when it is used

            group = communicator(self._group, ranks, axis, purpose, self._device)
            ledger = Ledger(channel, ranks.index(self.own), ranks, self._watch)
            host = None
            if self._has_gloo:
                host = GlooComm(self._group, axis, channel=f"{channel}/host", watch=self._watch, ranks=ranks)
            return NcclComm(group, axis, self._device, ledger=ledger, host=host)
        transport = os.environ.get(TRANSPORT)
        watch = None if transport else self._watch
        comm: Comm = GlooComm(self._group, axis, channel=channel, watch=watch, ranks=ranks)
        comm = debugged(comm, transport) if transport else comm
        return StagedComm(comm, self._device) if self._device.type == "cuda" else comm


def _is_moved_by_nccl(device: torch.device, backends: str) -> bool:
    return device.type == "cuda" and "nccl" in backends


def _shown(members: Sequence[int]) -> str:
    """Ranks of the world in the name of a channel; nothing for all of them."""
    if len(members) == dist.get_world_size():
        return ""
    if len(members) <= _MAX_SHOWN:
        return "@" + ",".join(map(str, members))
    return f"@{members[0]}..{members[-1]}:{zlib.crc32(repr(members).encode()):08x}"
