"""Facts of a group and of a unit, one record each, that the engine and every prediction share; engine options.

A record is plain data, made before any memory is allocated. The engine's groups allocate and communicate according to
it; footprint, traffic, dry run and summary compute with the same object. A group's record is replaced only when the
tree of units is known, when the optimizer updates flat runs of parameters, and when it begins to step inside backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.spec.granularity import ELEMENT, Granularity
from shardwise.spec.layout import GroupLayout, ReduceLayout
from shardwise.spec.order import Ahead
from shardwise.spec.placement import Placements
from shardwise.spec.policies import (
    FULL_PRECISION,
    ActivationOffloadPolicy,
    OffloadPolicy,
    PrecisionPolicy,
    RecomputePolicy,
)
from shardwise.spec.precision import item_bytes
from shardwise.spec.quantize import NO_QUANTIZATION, Quantization, packed_bounds, packed_bytes, summed_bounds


@dataclass(frozen=True)
class GroupFacts:
    """Facts of a group: its layout, placements, memory and communication.

    Attributes:
        unit: Number of the group's unit, in order of registration; the root is 0.
        layout: Flat layout of the group.
        placements: Placements of the group. Frozen groups are fully replicated if the strategy replicates parameters.
        depth: Number of units that enclose the group's unit.
        reshards: Whether the unit is released between forward and backward.
        is_trainable: Whether gradients are reduced.
        compute_dtype: Dtype of the gathered buffer; ``None``: the master's.
        reduce_dtype: Dtype of gradient buffers and sums; ``None``: the master's.
        stored_as: Form in which a frozen master is stored (``spec.quantize``); ``None``: its own dtype.
        gathered_as: Form in which the group is gathered; ``None``: the compute dtype.
        reduced_as: Form in which gradients are sent; ``None``: the reduce dtype.
        flat_kinds: Weight-decay group of each parameter, if the optimizer updates flat runs of parameters
            (``spec.layout``).
        recomputed_in: Name of a module around the unit that is recomputed in backward.
        inner_size: Ranks over which the group stays sharded after forward; 0: it is released, or stays gathered.
        updates_in_backward: The optimizer steps inside backward, so gradients exist in pooled buffers only.
        is_offloaded: Whether master, ``.grad`` and optimizer state are on the host.
        keeps_shard: For an offloaded group, whether the device keeps its shard in the compute dtype.
        ep: Ranks with different experts: every ``ep``-th rank of ``dp_shard`` shares the group. 1: no experts.
        num_ranks: Ranks over whose batches gradients are averaged.
        has_part_grads: Whether this rank's gradients are only a part of the model's, because other ranks have different
            slices or parameters.
        num_ahead: Most units that are gathered ahead of their turn.
    """

    unit: int
    layout: GroupLayout
    placements: Placements
    depth: int
    reshards: bool
    is_trainable: bool
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    stored_as: str | None = None
    gathered_as: str | None = None
    reduced_as: str | None = None
    flat_kinds: tuple[int | None, ...] | None = None
    recomputed_in: str | None = None
    inner_size: int = 0
    updates_in_backward: bool = False
    is_offloaded: bool = False
    keeps_shard: bool = False
    ep: int = 1
    num_ranks: int = 1
    has_part_grads: bool = False
    num_ahead: int = 1

    def slice_index(self, rank: int) -> int:
        """Index of rank ``rank`` of ``dp_shard`` among the ranks that share the group, as other methods expect it."""
        return rank // self.ep

    @property
    def axis(self) -> str:
        """Axis on which the group is gathered and reduced."""
        return "dp_shard" if self.ep == 1 else "edp"

    @property
    def is_expert(self) -> bool:
        """Whether the group has experts, which fewer ranks share than other groups."""
        return self.ep > 1

    @property
    def master_dtype(self) -> str:
        """Dtype of the master, which the optimizer updates."""
        return self.layout.params[0].dtype

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of the master."""
        return item_bytes(self.master_dtype)

    @property
    def gather_item_bytes(self) -> int:
        """Bytes of one gathered element."""
        return item_bytes(self.compute_dtype or self.master_dtype)

    @property
    def reduce_item_bytes(self) -> int:
        """Bytes of one element of a gradient buffer."""
        return item_bytes(self.reduce_dtype or self.master_dtype)

    @property
    def is_cast(self) -> bool:
        """Whether the gathered values differ from the master's: another dtype, or quantized for the gather."""
        return self.compute_dtype not in {None, self.master_dtype} or self.gathered_as is not None

    @property
    def has_separate_master(self) -> bool:
        """Whether the master can never be part of the gathered buffer: another dtype or form, or on the host."""
        return self.is_cast or self.is_offloaded or self.stored_as is not None

    @property
    def is_resident(self) -> bool:
        """Whether parameters are replicated and never released."""
        return not self.placements.shards_parameters and self.stored_as is None

    def master_numel(self, rank: int) -> int:
        """Elements of the master, padding included."""
        return self.layout.slice_numel(rank) if self.placements.shards_optimizer else self.layout.numel

    def master_bytes(self, rank: int) -> int:
        """Bytes of the master; 0 where it is part of the replica."""
        numel = self.master_numel(rank)
        if self.stored_as is not None:
            return packed_bytes(numel, self.stored_as, self.master_dtype)
        return self.item_bytes * numel if self.placements.shards_parameters or self.is_cast or self.is_offloaded else 0

    def replica_bytes(self, rank: int) -> int:
        """Bytes of the replica of replicated parameters, or of the device's shard if the master is offloaded."""
        if self.is_resident:
            return self.gather_item_bytes * self.layout.numel
        size = self.item_bytes if self.gathered_as is not None else self.gather_item_bytes
        return size * self.layout.slice_numel(rank) if self.keeps_shard else 0

    @property
    def needs_staging(self) -> bool:
        """Whether the host's master needs a buffer on the device before it is cast or packed there."""
        is_packed = self.keeps_shard and self.gathered_as is not None  # packed from the device's shard
        return self.is_offloaded and self.stored_as is None and self.is_cast and not is_packed

    def grad_bytes(self, rank: int) -> int:
        """Bytes of the memory of ``.grad``; 0 if it is part of the buffer that is reduced."""
        if not self.is_trainable or self.updates_in_backward:
            return 0
        is_separate = self.pools_gradients or self.has_separate_grad
        return self.item_bytes * self.reduce_layout.slice_numel(rank) if is_separate else 0

    def host_sum_bytes(self, rank: int, *, is_added: bool = False) -> int:
        """Bytes of the host's buffer for a sum whose dtype differs from ``.grad``'s, or that is added to ``.grad``."""
        is_needed = self.is_offloaded and self.is_trainable and (self.reduces_cast or is_added)
        return self.reduce_item_bytes * self.reduce_layout.slice_numel(rank) if is_needed else 0

    def slice_bytes(self, rank: int) -> int:
        """Bytes of a rank's slice in the form in which it is gathered."""
        numel = self.layout.slice_numel(rank)
        if self.gathered_as is not None:
            return packed_bytes(numel, self.gathered_as, self.master_dtype)
        return numel * self.gather_item_bytes

    @cached_property
    def summed_bytes(self) -> tuple[int, ...]:
        """For each rank, bytes of the packed part of the gradients that the rank sums."""
        assert self.reduced_as is not None
        dtype = self.reduce_dtype or self.master_dtype
        bounds = packed_bounds(summed_bounds(self.reduce_layout), self.reduced_as, dtype)
        return tuple(stop - start for start, stop in itertools.pairwise(bounds))

    @property
    def reduces_cast(self) -> bool:
        """Whether gradients are reduced in another dtype than the master's."""
        return self.reduce_dtype not in {None, self.master_dtype}

    @property
    def has_separate_grad(self) -> bool:
        """Whether ``.grad`` is never in the buffer that is reduced."""
        return self.reduces_cast or self.is_offloaded

    @property
    def pools_gradients(self) -> bool:
        """Whether full gradients exist in pooled buffers only."""
        is_pooled = self.placements.pools_gradients and (self.layout.size > 1 or self.has_separate_grad)
        return is_pooled or self.updates_in_backward

    @property
    def is_unsharded_locally(self) -> bool:
        """Whether the unit computes with the shard itself, because a single rank has the full group."""
        return self.placements.shards_parameters and self.layout.size == 1 and not self.has_separate_master

    @property
    def reduce_layout(self) -> ReduceLayout:
        """Layout of the group's gradient buffer."""
        return self.layout.scattered if self.placements.shards_optimizer else self.layout.reduced

    def inner_numel(self, rank: int) -> int:
        """Elements of a rank's slice between forward and backward, if an inner group keeps the unit."""
        bounds = self.layout.inner_bounds(self.inner_size)
        return bounds[rank % self.inner_size + 1] - bounds[rank % self.inner_size]


@dataclass(frozen=True)
class UnitFacts:
    """Facts of a unit: its groups, and its relation to other units.

    Attributes:
        name: The unit's name, as in recorded events.
        family: Numbers of this unit, the units that enclose it and the units that it encloses.
        groups: The unit's groups.
        recomputed_in: Name of a module around the unit that is recomputed in backward.
        ahead: Units that are gathered ahead while this one computes, in forward and in backward.
    """

    name: str
    family: frozenset[int]
    groups: Sequence[GroupFacts]
    recomputed_in: str | None = None
    ahead: tuple[Ahead, Ahead] = (1, 1)

    @property
    def is_released(self) -> bool:
        """Whether parameters are released between forward and backward."""
        return any(group.placements.shards_parameters and group.reshards for group in self.groups)

    @property
    def is_freed(self) -> bool:
        """Whether parameters are released after backward."""
        return any(group.placements.shards_parameters for group in self.groups)

    @property
    def is_trained(self) -> bool:
        """Whether gradients are reduced."""
        return any(group.is_trainable for group in self.groups)


@dataclass(frozen=True)
class EngineOptions:
    """The engine's options for a model, except its placements.

    Attributes:
        policy: Dtypes of computing and reducing.
        quantization: Forms of quantized weights and gradients.
        reshard_after_forward: ``"auto"``: the placements decide, and the root stays gathered from forward to backward.
            A number: units are sharded over that many ranks after forward, for which there is an inner Comm.
        granularity: The smallest part of a parameter that is never divided.
        accumulates_sharded: Reduce every backward, also inside ``gradient_sync(model, False)``. ``None``: the
            placements decide (ddp and zero1 keep local sums, the others reduce every time).
        defers_replicate: Reduce every backward inside its group of ``dp_shard``; inside ``gradient_sync(model, False)``
            not over ``dp_replicate``.
        prefetch: How many units are gathered ahead in forward and in backward.
        num_gradient_buffers: Most full-size gradient buffers in use at once: with n > 2, n - 2 reductions may run while
            the next unit's gradients are collected.
        recompute: Modules to recompute in backward; ``None``: none.
        activation_offload: Modules whose activations are kept on the host; ``None``: none.
        merge_limit: Most bytes of parameters of a merged unit; ``None``: the default of ``spec.module_chain``.
        offload: Data kept on the host; ``None``: none.
    """

    policy: PrecisionPolicy = FULL_PRECISION
    quantization: Quantization = NO_QUANTIZATION
    reshard_after_forward: str | bool | int = "auto"
    granularity: Granularity = ELEMENT
    accumulates_sharded: bool | None = None
    defers_replicate: bool = False
    prefetch: tuple[int, int] = (1, 1)
    num_gradient_buffers: int = 2
    recompute: RecomputePolicy | None = None
    activation_offload: ActivationOffloadPolicy | None = None
    merge_limit: int | None = 0
    offload: OffloadPolicy | None = None

    def reshards(self, *, default: bool) -> tuple[bool, int | None]:
        """Whether a unit is resharded after forward, and over how many ranks; ``None``: over all of its ranks."""
        value = self.reshard_after_forward
        if isinstance(value, str):
            return default, None
        return (value, None) if isinstance(value, bool) else (True, value)

    def accumulation(self, placements: Placements) -> str:
        """The value of ``ParallelPlan.accumulation`` that describes how microbatches are added up."""
        if self.defers_replicate:
            return "defer_replicate"
        is_sharded = placements.pools_gradients if self.accumulates_sharded is None else self.accumulates_sharded
        return "sharded" if is_sharded else "unsharded"
