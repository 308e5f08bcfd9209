"""The Comms of a mesh: the ranks of each collective of a model, and how Comms are opened.

On ``dp_replicate=2 x dp_shard=4`` with an inner size of 2, rank 5 (``*``) belongs to these groups::

    dp_replicate 0    0   1 | 2   3
    dp_replicate 1    4   5*| 6   7

    dp_shard          4 5 6 7      gathers, and sums of gradients over the ranks that store the parameters once
    dp_shard_inner    4 5          gathers for backward, if units are kept sharded over 2 ranks after forward
    dp_replicate      1 5          sums of gradient shards over the replicas
    dp                0 to 7       control messages, losses, checkpoints

With ``ep=2`` the experts have separate Comms, and ranks with different experts exchange tokens::

    ep                4 5          tokens to experts and back
    edp               5 7          gathers and sums of the experts that these ranks store
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import hashlib
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardwise.comm.base import Comm
from shardwise.comm.gloo import GlooComm
from shardwise.comm.issue_order import IssueOrder
from shardwise.comm.staged import StagedComm
from shardwise.comm.stall import Ledger, StallWatch
from shardwise.launch import watchdog
from shardwise.launch.world import gloo_on_loopback, init_process_group, read_world
from shardwise.spec.errors import CommError, MeshError, ShardwiseError
from shardwise.spec.mesh import AXES, Mesh
from shardwise.spec.slice import Slice

#: Axes of Comms that are not mesh axes: all data-parallel ranks, the inner groups of ``dp_shard``, all ranks.
DATA_PARALLEL, INNER, WORLD = "dp", "dp_shard_inner", "world"

#: Axis of the ranks that share the parameters of the same experts.
EXPERT_SHARD = "edp"


#: Opens a Comm over some ranks of the mesh, including this one: ``open(axis, purpose, ranks)``.
OpenAxis = Callable[[str, str, Sequence[int]], Comm]


@dataclass(frozen=True)
class Comms:
    """The Comms of one model on this rank."""

    gather: Comm  # gathers parameters along ``dp_shard`` (and ``cp``, whose ranks share the model)
    reduce: Comm  # reduces gradients along ``dp_shard`` (and ``cp``)
    replicate: Comm | None  # along ``dp_replicate``; ``None`` if the model is not replicated over groups
    control: Comm  # over all ranks that train the same parameters, in mesh order
    world: Comm  # over all ranks of the mesh, in mesh order; the same Comm as ``control`` if both have all ranks
    inner: dict[int, Comm]  # along inner groups of ``dp_shard``, by their size; :meth:`inner_comm` fills it
    _open_inner: Callable[[int], Comm]
    tp: Comm | None = None  # along ``tp``; ``None`` if that axis has one rank
    pp: Comm | None = None  # along ``pp``; ``None`` if that axis has one rank
    cp: Comm | None = None  # along ``cp``; ``None`` if that axis has one rank
    ep: Comm | None = None  # along ``ep``; ``None`` if that axis has one rank
    #: The Comms of experts, if ranks store different experts; ``None``: experts use these Comms.
    expert: Comms | None = None

    def __iter__(self) -> Iterator[Comm]:
        """Iterate over the Comms, each once."""
        comms = (self.gather, self.reduce, self.replicate, *self.inner.values(), self.control)
        comms += (self.world, self.tp, self.pp, self.cp, self.ep, *(self.expert or ()))
        return iter(dict.fromkeys(comm for comm in comms if comm is not None))

    def inner_comm(self, size: int) -> Comm:
        """Return the Comm along the inner groups of ``size`` neighbours on ``dp_shard``.

        Collective:
            On CUDA the first call for a size makes a communicator: all ranks must call, in the same order.
        """
        if size not in self.inner:
            self.inner[size] = self._open_inner(size)
        return self.inner[size]

    def of(self, part: Slice | None) -> Comms:
        """The Comms over the ranks that share a parameter with the slice ``part``: those of experts, or these."""
        return self.expert if part is not None and part.is_expert and self.expert is not None else self

    @property
    def num_replicas(self) -> int:
        """Number of groups that each store the full model."""
        return self.replicate.size if self.replicate is not None else 1

    @property
    def replica(self) -> int:
        """Number of this rank's group along ``dp_replicate``."""
        return self.replicate.rank if self.replicate is not None else 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks that train the same parameters, by which sums of gradients are divided."""
        return self.num_replicas * self.reduce.size

    @property
    def reader(self) -> tuple[int, int]:
        """Index of this rank's share of the samples, and number of shares. Ranks of one model read the same share."""
        context = self.cp.size if self.cp is not None else 1
        return self.control.rank // context, self.control.size // context

    @property
    def sizes(self) -> dict[str, int]:
        """Size by mesh axis, outermost first, without axes of one rank other than the data-parallel ones."""
        context = self.cp.size if self.cp is not None else 1
        found = {"dp_replicate": self.num_replicas, "dp_shard": self.reduce.size // context}
        others = {axis: comm.size for axis in ("pp", "cp", "tp") if (comm := getattr(self, axis)) is not None}
        return {axis: size for axis in AXES if (size := (found | others).get(axis)) is not None}

    def counts(self, part: Slice | None) -> bool:
        """Whether this rank's copy of a parameter counts in sums over :attr:`model_parallel`: one copy does."""
        if part is not None:
            return part.is_counted
        return self.tp is None or self.tp.rank == 0

    @property
    def model_parallel(self) -> tuple[Comm, ...]:
        """The Comms along axes whose ranks store different parameters of one model, innermost first."""
        return tuple(comm for comm in (self.tp, self.pp) if comm is not None)


def open_mesh_comms(mesh: Mesh, rank: int, open_axis: OpenAxis, *, is_replicated: bool = False) -> Comms:
    """Open the Comms of ``rank`` on ``mesh`` with ``open_axis``, in the same order on all ranks."""
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
        index = mesh.shard_group(rank).index(rank) % mesh.ep
        everyone = mesh.data_parallel_group(rank)
        ranks = [r for start in range(0, len(everyone), step) for r in everyone[start : start + step][index :: mesh.ep]]
        control = open_axis(EXPERT_SHARD, "control", ranks)
    expert = dataclasses.replace(comms, gather=gather, reduce=reduce, control=control, inner={})
    return dataclasses.replace(comms, expert=expert, ep=open_axis("ep", "activations", mesh.inner_group(rank, mesh.ep)))


# -- opening them over torch.distributed

#: Maximum number of ranks that the name of a channel lists.
_MAX_SHOWN = 8

#: Number of Comms that this process has opened, by ranks on an axis and purpose. It is the same on all ranks of a Comm,
#: because these open their common Comms in the same order.
_num_opened: Counter[tuple[str, str]] = Counter()


def join_world(device: torch.device) -> dist.ProcessGroup:
    """Return the default process group; if there is none, make it as the environment describes.

    Collective:
        All ranks must call if no group exists yet.
    """
    if not dist.is_initialized():
        init_process_group(read_world(), device)
    group = dist.group.WORLD
    assert group is not None
    return group


def open_comms(
    device: torch.device, axis: str = "dp_shard", group: dist.ProcessGroup | None = None
) -> tuple[Comm, Comm]:
    """Open the Comms for gathers and for reductions over ``group``, by default the world.

    On NCCL each has a separate communicator, so that a gather never queues behind a reduction; Comms of other models
    over the same ranks share both. Control messages use Gloo: a separate group if ``group`` has only NCCL. On Gloo,
    messages are matched by rank and tag, so every Comm uses ``group`` itself. If the group has no NCCL, tensors on a
    GPU are sent over Gloo through host memory (``comm.staged``).

    Collective:
        All ranks of the group must call, in the same order.
    """
    open_axis = _Opener(device, group or join_world(device))
    return open_axis(axis, "gather", open_axis.ranks), open_axis(axis, "reduce", open_axis.ranks)


@dataclass(frozen=True)
class MeshRanks:
    """Ranks to shard a model over."""

    mesh: Mesh
    group: dist.ProcessGroup | None = None  # a process group that includes the ranks; ``None``: the world
    ranks: Sequence[int] | None = None  # the ranks of the group that make up the mesh, ascending; ``None``: all

    @classmethod
    def of(cls, where: dist.ProcessGroup | dist.DeviceMesh | None, device: torch.device) -> MeshRanks:
        """Return the ranks of a group, of a ``DeviceMesh`` (shard) or (replicate, shard), or of the world."""
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
        """Open the Comms of the mesh.

        Collective:
            On CUDA this connects the ranks of every axis: all ranks of the mesh must call, in the same order.
        """
        open_axis = _Opener(device, self.group or join_world(device), self.ranks)
        rank = open_axis.ranks.index(open_axis.own)
        return open_mesh_comms(self.mesh, rank, open_axis.by_index, is_replicated=is_replicated)

    def open_samples(self, device: torch.device) -> Comm:
        """Open one more Comm for a model, over the data-parallel ranks, which read different samples.

        Collective:
            As :meth:`open`.
        """
        open_axis = _Opener(device, self.group or join_world(device), self.ranks)
        rank = open_axis.ranks.index(open_axis.own)
        return open_axis.by_index(DATA_PARALLEL, "samples", self.mesh.data_parallel_group(rank))


@dataclass(frozen=True)
class Transport:
    """The transport of tensors."""

    backend: str = "nccl"  # backend of the process groups for tensors on a GPU
    calls: Any = dist  # module with the collectives of ``torch.distributed``
    device: torch.device | None = None  # device of these tensors for the process groups; ``None``: the GPU
    on_host: Callable[..., Comm] = GlooComm  # makes a Comm for host memory


#: The transport in use. ``shardwise.testing`` replaces it.
transport = Transport()


class _Opener:
    """Opens Comms over some ranks of a process group.

    Messages for which the host waits (control messages, answers of the stall watch) use Gloo, whatever moves the
    tensors. The host would wait for a message on the device without a limit, and could not be woken. If the group has
    no Gloo, the ranks open an additional Gloo group.

    Collective:
        Over a group without Gloo, the first opener for these ranks connects them: all of them must make one.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        #: The ranks of the mesh, in the group's numbers.
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
        self._host, self._host_rank = group, {rank: rank for rank in self.ranks}
        if "gloo" not in backends:
            self._host = _control_group(group, self.ranks, device)
            self._host_rank = {rank: index for index, rank in enumerate(self.ranks)}
        self._watch = StallWatch.of(self._host) if self._host.size() > 1 else None
        if self._watch is not None and self._is_nccl:
            self._watch.limit_s = timeout_s_of(group, transport.device or device)

    def by_index(self, axis: str, purpose: str, indices: Sequence[int]) -> Comm:
        """Open a Comm over the ranks at these indices of ``ranks``."""
        return self(axis, purpose, [self.ranks[index] for index in indices])

    def __call__(self, axis: str, purpose: str, ranks: Sequence[int]) -> Comm:
        """Open a Comm over ``ranks``."""
        # The channel's name is part of messages, and of the histories that the stall watch compares. It is the same on
        # all ranks of the Comm, and unique in this process.
        world = dist.get_process_group_ranks(self._group)
        label = f"{axis}{_format_ranks([world[rank] for rank in ranks])}"
        channel = f"{label}/{_num_opened[label, purpose]}/{purpose}"
        _num_opened[label, purpose] += 1
        if self._is_nccl:
            from shardwise.comm.nccl import NcclComm  # a build without CUDA can import the rest

            device = transport.device or self._device
            group = communicator(self._group, ranks, axis, purpose, device, backend=transport.backend)
            indices = [self._host_rank[rank] for rank in ranks]
            ledger = Ledger([index for index in indices if index != self._host.rank()], self._watch)
            host, control = (
                GlooComm(self._host, axis, channel=name, watch=self._watch, ranks=indices)
                for name in (f"{channel}/host", f"{label}/{purpose}/turns")
            )
            order = _orders.setdefault(group, IssueOrder())
            record_order = functools.partial(order.record, channel, control)
            nccl = NcclComm(
                group,
                axis,
                self._device,
                channel=f"{label}/{purpose}",
                ledger=ledger,
                host=host,
                record_order=record_order,
                stream=order.stream,
                calls=transport.calls,
            )
            order.stream = nccl._stream
            order.num_comms += 1
            nccl._num_issued = control._num_issued = order.num_issued
            return nccl
        comm = transport.on_host(self._group, axis, channel=channel, watch=self._watch, ranks=ranks)
        return StagedComm(comm, self._device) if self._device.type == "cuda" else comm


def _is_moved_by_nccl(device: torch.device, backends: str) -> bool:
    return device.type == "cuda" and transport.backend in backends


def _format_ranks(members: Sequence[int]) -> str:
    """Ranks of the world for the name of a channel; empty if they are all ranks."""
    if len(members) == dist.get_world_size():
        return ""
    if len(members) <= _MAX_SHOWN:
        return "@" + ",".join(map(str, members))
    return f"@{members[0]}..{members[-1]}:{zlib.crc32(repr(members).encode()):08x}"


# -- communicators of NCCL
#
# Some ranks of a process group open an NCCL communicator without the others, and all models of a process share it.
#
# torch's ``new_group`` cannot do this. If the default group has a ``device_id``, torch makes a group by splitting the
# default group's communicator, in which all its ranks must take part. And the name by which the members find each other
# includes the number of groups that a process has made, which differs between ranks if only some have opened a group
# before. Here the name consists of the members and the purpose, and nothing is split.
#
# Models that communicate among the same ranks for the same purpose share a communicator, as those of FSDP2 do. The
# number of communicators therefore does not grow with the number of models. They are freed with the process group.

_Key = tuple[str, str, tuple[int, ...]]
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_orders: weakref.WeakKeyDictionary[dist.ProcessGroup, IssueOrder] = weakref.WeakKeyDictionary()


def communicator(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    axis: str,
    purpose: str,
    device: torch.device,
    *,
    backend: str = "nccl",
    margin_s: float = watchdog.MARGIN_S,
) -> dist.ProcessGroup:
    """Return the process group of these ranks of ``parent`` for one purpose on one axis.

    The time limit is ``margin_s`` longer than that of ``parent``, so that ``comm.stall`` reports the cause first.

    Collective:
        The first call for these ranks and this purpose connects them: all of them must call, in the same order. The
        other ranks of ``parent`` need not.
    """
    opened = _opened.setdefault(parent, {})
    key = axis, purpose, tuple(ranks)
    if key not in opened:
        opened[key] = _open(parent, key, device, backend, margin_s)
    return opened[key]


def timeout_s_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """The time limit of a collective of ``group``, in seconds."""
    timeout: dt.timedelta = group._get_backend(device).options._timeout
    return timeout.total_seconds()


def _control_group(parent: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """Return a Gloo group over these ranks of a group without Gloo, with the same time limit."""
    with gloo_on_loopback() if _is_on_one_machine() else contextlib.nullcontext():
        return communicator(parent, ranks, "host", "control", device, backend="gloo", margin_s=0.0)


def _is_on_one_machine() -> bool:
    """Whether the environment says that all ranks are on this machine; it may say nothing."""
    try:
        world = read_world()
    except ShardwiseError:
        return False
    return world.is_single_node and world.size == dist.get_world_size()


def _open(
    parent: dist.ProcessGroup, key: _Key, device: torch.device, backend: str, margin_s: float
) -> dist.ProcessGroup:
    axis, purpose, ranks = key
    world = dist.get_process_group_ranks(parent)
    members = [world[rank] for rank in ranks]
    digest = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
    name: Any = f"shardwise/{parent.group_name}/{axis}/{purpose}/{digest}"
    timeout_s = timeout_s_of(parent, device)
    try:
        with _without_split():
            group, _ = c10d._new_process_group_helper(
                len(members),
                ranks.index(parent.rank()),
                members,
                dist.Backend(backend),
                parent.get_group_store(),
                name,
                timeout=dt.timedelta(seconds=timeout_s + margin_s),
                # Connects now. Otherwise the first message between two ranks would connect only these two, which
                # blocks both hosts, and a ring of ranks that each send first would block forever.
                device_id=device if device.type == "cuda" and backend == "nccl" else None,
                group_desc=f"{axis}: {purpose}",
            )
    except RuntimeError as error:
        raise CommError(
            f"ranks {members} did not all connect for {axis}/{purpose} within {timeout_s:g} s: {error}\n"
            "  See whether all of these ranks build the same model, and the first error among the ranks' logs."
        ) from error
    assert isinstance(group, dist.ProcessGroup)
    # new_group records this too.
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


@contextlib.contextmanager
def _without_split() -> Iterator[None]:
    """Keep torch from splitting the default group's communicator, as it does if that group is bound to a device."""
    default = dist.group.WORLD
    assert default is not None
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
