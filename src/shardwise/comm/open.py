"""Opening the Comms of a mesh axis over torch.distributed."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from shardwise.comm.base import Comm
from shardwise.comm.gloo import GlooComm
from shardwise.comm.launch import init_process_group, read_world
from shardwise.comm.watch import StallWatch
from shardwise.spec.errors import CommError

_channels = itertools.count()


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

    On CUDA each has a communicator of its own, so that a gather never queues behind a reduction. On Gloo messages are
    told apart by their tags, and both use the group as it is.

    Collective:
        All ranks of the group must call, in the same order.

    Raises:
        CommError: The group's backend cannot move tensors of this device.
    """
    group = group or join_world(device)
    number = next(_channels)
    if device.type == "cuda":
        from shardwise.comm.nccl import NcclComm  # needs a CUDA build only when it is used

        ranks = dist.get_process_group_ranks(group)
        opened = []
        for purpose in ("gather", "reduce"):
            communicator = dist.new_group(ranks, backend="nccl")
            assert isinstance(communicator, dist.ProcessGroup)
            opened.append(NcclComm(communicator, axis, device, channel=f"{axis}/{number}/{purpose}"))
        return opened[0], opened[1]
    if "gloo" not in dist.get_backend_config(group):
        raise CommError(
            f"the process group's backend is {dist.get_backend(group)}, which does not move CPU tensors.\n"
            "  Call torch.distributed.init_process_group('gloo') (or 'cpu:gloo,cuda:nccl')."
        )
    watch = StallWatch.of(group) if group.size() > 1 else None
    gather = GlooComm(group, axis, channel=f"{axis}/{number}/gather", watch=watch)
    reduce = GlooComm(group, axis, channel=f"{axis}/{number}/reduce", watch=watch)
    return gather, reduce
