"""One process as one rank of a world that does not exist, to check streams at sizes that no test can start.

The real ``NcclComm`` runs over communicators whose other ranks are pretended. These send the same data as this rank, so
numbers are finite but have no meaning. The order of work does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.parallelize import apply_plan
from shardwise.api.preparation import prepare
from shardwise.comm.axes import DATA_PARALLEL, Comms, open_mesh_comms
from shardwise.comm.base import Bounds, Comm, Handle
from shardwise.comm.nccl import NcclComm
from shardwise.comm.record import RecordComm
from shardwise.comm.stall import Stamp
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan
from shardwise.testing.streams.calls import Alone, Calls
from shardwise.testing.streams.detector import active


def lone_rank(plan: ParallelPlan, mesh: Mesh, rank: int) -> Comms:
    """The Comms of one rank of a mesh whose other ranks do not exist. To be called inside ``pretended_cuda()``.

    The mesh may have any size. In a pipeline ``rank`` must be in the first stage, because later stages learn from
    earlier ranks what they will receive.
    """
    calls, device = Calls(active(), Alone()), torch.device("cuda", torch.cuda.current_device())
    of_communicators: dict[tuple[str, str, tuple[int, ...]], torch.cuda.Stream] = {}

    def open_axis(axis: str, purpose: str, ranks: Sequence[int]) -> Comm:
        group = _Group(tuple(ranks), rank, f"{axis}/{purpose}")
        host = _Echo(axis, rank=group.rank(), size=group.size(), device="cpu")
        key = axis, purpose, group.ranks
        if key not in of_communicators:
            of_communicators[key] = torch.cuda.Stream(device, priority=-1)
        pretended: Any = group
        return NcclComm(pretended, axis, device, host=host, stream=of_communicators[key], calls=calls)

    mesh.coordinate(rank)
    return open_mesh_comms(mesh, rank, open_axis, is_replicated=plan.is_replicated)


def lone_model(model: nn.Module, plan: ParallelPlan, mesh: Mesh, rank: int) -> nn.Module:
    """Shard ``model`` by ``plan`` as on one rank of a mesh, with :func:`lone_rank`, and return the model."""
    comms, samples = lone_rank(plan, mesh, rank), mesh.data_parallel_group(rank)
    apply_plan(
        model,
        prepare(model, plan, device=comms.control.device),
        comms,
        lambda: _Echo(DATA_PARALLEL, rank=samples.index(rank), size=len(samples), device="cpu"),
    )
    return model


@dataclass(frozen=True)
class _Group:
    """Replaces a process group.

    Attributes:
        ranks: Members of the group, as ranks of the world.
        own: This rank of the world.
        group_name: Name of the communicator.
    """

    ranks: tuple[int, ...]
    own: int
    group_name: str

    def rank(self) -> int:
        """This rank's index in the group."""
        return self.ranks.index(self.own)

    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class _Echo(RecordComm):
    """Control messages of the host: all other ranks send the same message as this rank."""

    def _do_all_gather(self, stamp: Stamp, buffer: Tensor, bounds: Bounds) -> Handle:
        if bounds is None:
            rows = buffer.view(self.size, -1)
            rows.copy_(rows[self.rank].clone().expand_as(rows))
        return super()._do_all_gather(stamp, buffer, bounds)
