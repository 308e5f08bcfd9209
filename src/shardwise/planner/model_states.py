"""A rank's memory for a model's units between and during steps, by the formulas that the engine's tests assert.

A stage of the model is the root (embedding, head) and runs of equal units. Only a few units of each run are computed:
``spec.memory.footprint`` grows by the same bytes for every additional unit, because only a few are gathered or reduced
at once (``tests/planner/test_states.py`` compares with all units).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.memory.footprint import (
    Footprint,
    Replicas,
    footprint,
    packed_buffer_bytes,
    reduce_bytes,
    staging_bytes,
)
from shardwise.spec.module_chain import Mergeable, default_limit, merge
from shardwise.spec.placement import PRESETS, Placements
from shardwise.spec.policies import OffloadPolicy, choose
from shardwise.spec.precision import item_bytes
from shardwise.spec.quantize import NO_QUANTIZATION, Quantization
from shardwise.spec.unit_facts import GroupFacts


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one unit on a rank, before they are divided over data-parallel ranks.

    Attributes:
        trained: Trained elements, without routed experts.
        experts: Elements of routed experts, which are trained.
        frozen: Frozen elements.
        packed: The part of ``frozen`` in linear layers, which ``quantize_frozen`` quantizes.
        frozen_experts: The part of ``frozen`` in routed experts.
        matrices: The part of ``trained`` for which the optimizer has one state tensor less: hidden matrices, with Muon.
        expert_matrices: The same part of ``experts``.
    """

    trained: int
    experts: int = 0
    frozen: int = 0
    packed: int = 0
    frozen_experts: int = 0
    matrices: int = 0
    expert_matrices: int = 0

    @property
    def numel(self) -> int:
        """All elements."""
        return self.trained + self.experts + self.frozen

    def times(self, count: int) -> Parameters:
        """The parameters of ``count`` such units together."""
        return Parameters(**{field.name: getattr(self, field.name) * count for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Everything in a plan, a workload and a device that determines the memory of units.

    Attributes:
        placements: Placements of the strategy.
        shard_size: Ranks over which parameters are sharded: ``dp_shard * cp``.
        num_replicas: Ranks of ``dp_replicate``.
        is_replicated: Gradients are also summed over ``dp_replicate``.
        ep: Expert-parallel ranks.
        compute_dtype: Dtype in which units compute, and of frozen parameters. Masters are fp32.
        reduce_dtype: Dtype of gradient buffers.
        reshards: Units are released between forward and backward.
        inner_size: Ranks over which released units stay sharded until backward; 0: none.
        in_backward: The optimizer steps inside backward.
        offload: Data kept on the host.
        quantization: Forms of quantized weights and gradients.
        optimizer_tensors: State tensors per parameter.
        prefetch: How many units are gathered ahead in forward and in backward.
        num_gradient_buffers: Most gradient buffers in use at once.
        accumulation: How microbatches are added up; ``None``: a step has one microbatch.
        is_pipeline: Units stay gathered until the last microbatch's backward.
        merge_limit: See ``ParallelPlan.merge_limit``.
        device_type: Type of the device that computes.
    """

    placements: Placements
    shard_size: int
    num_replicas: int = 1
    is_replicated: bool = False
    ep: int = 1
    compute_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    reshards: bool = True
    inner_size: int = 0
    in_backward: bool = False
    offload: OffloadPolicy | None = None
    quantization: Quantization = NO_QUANTIZATION
    optimizer_tensors: float = 2
    prefetch: tuple[int, int] = (1, 1)
    num_gradient_buffers: int = 2
    accumulation: str | None = None
    is_pipeline: bool = False
    merge_limit: int | None = None
    device_type: str = "cuda"

    @property
    def reduces_apart(self) -> bool:
        """Whether ``.grad`` is never in the buffer that is reduced."""
        return self.reduce_dtype != "fp32" or self.offload is not None

    @property
    def receives(self) -> bool:
        """Whether this library computes sums, and needs memory to receive peers' slices: Gloo on CPUs."""
        return self.device_type == "cpu"


#: Bytes of an element of a master.
_MASTER_BYTES = 4

#: Runs of equal units: the number of units, and the parameters of one.
Runs = tuple[tuple[int, Parameters], ...]


@dataclass(frozen=True)
class Unit:
    """The memory of one unit in a run of equal units, in addition to masters and optimizer state.

    Attributes:
        count: Units in the run.
        blocks: Blocks of the model in each unit.
        gathered: Bytes of gathered parameters; 0 if they are never released.
        gradients: Bytes of gradients that autograd makes, in the compute dtype.
        shard: Bytes of the memory of ``.grad``, if that is separate from the buffer that is reduced and from ``waits``.
        sums: Bytes of a full-size gradient buffer that no other unit uses.
        inner: Bytes of the slice that an inner group of ranks keeps from forward to backward.
        buffer: Bytes of the pooled full-size buffer in which gradients are reduced; 0: none.
        waits: Bytes of sums that wait for ``dp_replicate`` until the last microbatch.
        stays: The part of ``sums`` that stays allocated from step to step, because ``.grad`` has separate memory.
    """

    count: int
    blocks: int
    gathered: int
    gradients: int
    shard: int
    sums: int
    inner: int
    buffer: int
    waits: int = 0
    stays: int = 0


@dataclass(frozen=True)
class States:
    """The memory of a rank for a stage.

    Attributes:
        footprint: The peak of each category, by ``spec.memory.footprint``.
        root: The root unit.
        units: The other units, in order.
        staging: Bytes of the device's buffers for offloaded masters before they are cast, of the receive buffers of
            packed gathers, and of those for packed gradients and for sums that this library receives.
    """

    footprint: Footprint
    root: Unit
    units: tuple[Unit, ...]
    staging: int = 0


@functools.lru_cache(maxsize=4096)
def states(root: Parameters, runs: Runs, rules: Rules) -> States:
    """Compute the memory of a rank for a stage, in closed form; ``root`` are the parameters outside of blocks."""
    of_root, placed = _placed(root, merged_runs(root, runs, rules), rules)
    few = max(1 + max(rules.prefetch), rules.num_gradient_buffers) + 2
    if rules.receives and rules.num_gradient_buffers > 2:  # receive buffers then do not grow equally with each unit
        few = max((run.count for run in placed), default=0)
    least = [min(run.count, few) for run in placed]
    ends = (root, of_root)
    total = base = _footprint(ends, placed, least)
    for place, run in enumerate(placed):
        if run.count > few:
            fewer = [number - (index == place) for index, number in enumerate(least)]
            total = _plus(total, base, _footprint(ends, placed, fewer), run.count - few)
    different = [ends, *((run.unit, run.rules) for run in placed)]
    groups = [group for number, (unit, how) in enumerate(different) for group in _groups(unit, how, unit=number)]
    return States(
        footprint=total,
        root=_unit(1, 0, root, of_root, depth=0),
        units=tuple(_unit(run.count, run.blocks, run.unit, run.rules, depth=1) for run in placed),
        staging=staging_bytes(groups, rank=0)
        + packed_buffer_bytes(groups)
        + _received_bytes(_every_group(ends, placed, least), rules),
    )


class _Run(NamedTuple):
    """A run of equal units with the same rules."""

    count: int
    blocks: int
    unit: Parameters
    rules: Rules


def _placed(
    root: Parameters, merged: Sequence[tuple[int, int, Parameters]], rules: Rules
) -> tuple[Rules, tuple[_Run, ...]]:
    """The rules of the root, and the runs of units; offloaded units and others are in different runs."""
    policy = rules.offload
    if policy is None or policy.ratio == 1:
        return rules, tuple(_Run(*run, rules) for run in merged)
    on_device = replace(rules, offload=None)
    every = [(blocks, unit) for count, blocks, unit in merged for _ in range(count)]
    sizes = [_covered_bytes(unit, rules, policy) for unit in (root, *(unit for _, unit in every))]
    first, *chosen = (rules if is_chosen else on_device for is_chosen in choose(sizes, policy.ratio))
    found: list[_Run] = []
    for (blocks, unit), how in zip(every, chosen, strict=True):
        if found and found[-1][1:] == (blocks, unit, how):
            found[-1] = found[-1]._replace(count=found[-1].count + 1)
        else:
            found.append(_Run(1, blocks, unit, how))
    return first, tuple(found)


def _covered_bytes(unit: Parameters, rules: Rules, policy: OffloadPolicy) -> int:
    """Bytes of a unit's parameters that are kept on the host if the policy chooses the unit."""
    trained, frozen = unit.trained + unit.experts, unit.frozen
    covers = [policy.covers(rules.placements, is_trainable=is_trainable) for is_trainable in (True, False)]
    return covers[0] * trained * _MASTER_BYTES + covers[1] * frozen * item_bytes(rules.compute_dtype)


def merged_runs(root: Parameters, runs: Runs, rules: Rules) -> tuple[tuple[int, int, Parameters], ...]:
    """Runs of units after small neighbours are merged: units of a run, blocks of a unit, and parameters of a unit."""
    total = _MASTER_BYTES * (root.numel + sum(count * block.numel for count, block in runs))
    limit = rules.merge_limit
    if limit is None:
        limit = default_limit(total, device_type=rules.device_type, num_ranks=rules.shard_size)
    found: list[tuple[int, int, Parameters]] = []
    for place, (count, block) in enumerate(runs):
        if 2 * _MASTER_BYTES * block.numel > limit:
            found.append((count, 1, block))
            continue
        chain = [Mergeable(f"{place}.{i}", "", (), _MASTER_BYTES * block.numel) for i in range(count)]
        for names in merge(chain, limit):
            blocks = len(names)
            if found and found[-1][1:] == (blocks, block.times(blocks)):
                found[-1] = (found[-1][0] + 1, *found[-1][1:])
            else:
                found.append((1, blocks, block.times(blocks)))
    return tuple(found)


def _footprint(root: tuple[Parameters, Rules], runs: Sequence[_Run], counts: Sequence[int]) -> Footprint:
    """The footprint of the root and of ``counts`` units of the runs."""
    rules = root[1]
    total = footprint(
        _every_group(root, runs, counts),
        rank=0,
        optimizer_tensors=rules.optimizer_tensors,
        has_receive_buffers=rules.receives,
        **_reductions(rules),
    )
    for (unit, how), count in zip((root, *((run.unit, run.rules) for run in runs)), (1, *counts), strict=True):
        spared = count * _MASTER_BYTES * owned_matrices(unit, how)
        is_offloaded = how.offload is not None and how.offload.covers(how.placements, is_trainable=True)
        category = "host" if is_offloaded else "optimizer"
        total = replace(total, **{category: getattr(total, category) - spared})
    return total


def _every_group(root: tuple[Parameters, Rules], runs: Sequence[_Run], counts: Sequence[int]) -> list[GroupFacts]:
    groups = list(_groups(*root, unit=0))
    for run, count in zip(runs, counts, strict=True):
        first = _groups(run.unit, run.rules, unit=1)
        number = groups[-1].unit if groups else 0
        for index in range(count):
            groups += [replace(group, unit=number + 1 + index) for group in first]
    return groups


def _reductions(rules: Rules) -> dict[str, Any]:
    """The arguments for ``spec.memory.footprint`` about the reduction of gradients."""
    is_deferred = rules.accumulation == "defer_replicate"
    return {
        "num_gradient_buffers": rules.num_gradient_buffers,
        "replicas": Replicas(rules.num_replicas, is_deferred=is_deferred) if rules.is_replicated else None,
        "accumulations": () if rules.accumulation is None else (rules.accumulation,),
    }


def _received_bytes(groups: Sequence[GroupFacts], rules: Rules) -> int:
    """Bytes of the buffers in which sums are received, and of those for packed gradients."""
    plain = [replace(group, reduced_as=None) for group in groups]
    if not rules.receives and plain == list(groups):
        return 0
    total = reduce_bytes(groups, rank=0, has_receive_buffers=rules.receives, **_reductions(rules))
    return total - reduce_bytes(plain, rank=0, has_receive_buffers=False, **_reductions(rules))


def owned_matrices(unit: Parameters, rules: Rules) -> int:
    """Elements of hidden matrices of a unit that a rank updates."""
    ranks = rules.shard_size if rules.placements.shards_optimizer else 1
    return unit.matrices // ranks + unit.expert_matrices // max(ranks // rules.ep, 1)


def _groups(unit_parameters: Parameters, rules: Rules, *, unit: int) -> tuple[GroupFacts, ...]:
    """The groups of a unit: trained parameters and experts, frozen parameters, packed ones, frozen experts."""
    packed_as = rules.quantization.frozen
    is_smaller = packed_as != "none" and (packed_as != "bf16" or item_bytes(rules.compute_dtype) > 2)
    packed = unit_parameters.packed if is_smaller else 0
    found = []
    for numel, ep, is_trainable, frozen_as in (
        (unit_parameters.trained, 1, True, "none"),
        (unit_parameters.experts, rules.ep, True, "none"),
        (unit_parameters.frozen - packed - unit_parameters.frozen_experts, 1, False, "none"),
        (packed, 1, False, packed_as),
        (unit_parameters.frozen_experts, rules.ep, False, "none"),
    ):
        if numel:
            found.append(_group(numel, ep, rules, unit=unit, is_trainable=is_trainable, frozen_as=frozen_as))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _group(numel: int, ep: int, rules: Rules, *, unit: int, is_trainable: bool, frozen_as: str) -> GroupFacts:
    master = "fp32" if is_trainable else rules.compute_dtype
    placements = rules.placements if is_trainable or rules.placements.shards_parameters else PRESETS["ddp"]
    offload, reshards = rules.offload, rules.reshards and (unit > 0 or rules.inner_size > 0)
    is_offloaded = offload is not None and offload.covers(placements, is_trainable=is_trainable)
    stored_as, gathered_as, reduced_as = rules.quantization.forms(
        frozen_as=frozen_as, is_float=True, compute_dtype=rules.compute_dtype, is_sharded=placements.shards_optimizer
    )
    packed_in = {stored_as, gathered_as, reduced_as} - {None}
    # One tensor represents all: tensors of multiples of 64 elements have no padding between them.
    spec = ParamSpec("all", (numel,), master, is_trainable)
    layout = GroupLayout.build(
        [spec],
        max(rules.shard_size // ep, 1),
        dtypes=[master, rules.compute_dtype, rules.reduce_dtype, *sorted(filter(None, packed_in))],
    )
    return GroupFacts(
        unit=unit,
        layout=layout,
        placements=placements,
        depth=min(unit, 1),
        reshards=reshards,
        is_trainable=is_trainable,
        compute_dtype=rules.compute_dtype,
        reduce_dtype=rules.reduce_dtype,
        stored_as=stored_as,
        gathered_as=gathered_as,
        reduced_as=reduced_as,
        inner_size=rules.inner_size if reshards else 0,
        updates_in_backward=rules.in_backward and is_trainable and not is_offloaded,
        is_offloaded=is_offloaded,
        keeps_shard=is_offloaded and stored_as is None and offload is not None and offload.keeps_shard(placements),
        ep=ep,
        num_ahead=max(rules.prefetch),
    )


def _plus(base: Footprint, more: Footprint, fewer: Footprint, count: int) -> Footprint:
    """``held`` plus ``count`` times the bytes that one unit adds, ``more - fewer``."""
    return Footprint(
        **{
            field.name: getattr(base, field.name) + count * (getattr(more, field.name) - getattr(fewer, field.name))
            for field in fields(Footprint)
        }
    )


def _unit(count: int, blocks: int, parameters: Parameters, rules: Rules, *, depth: int) -> Unit:
    gathered = gradients = shard = sums = inner = buffer = waits = stays = 0
    for group in _groups(parameters, rules, unit=depth):
        if not (group.is_resident or group.is_unsharded_locally):
            gathered += group.gather_item_bytes * group.layout.numel
            inner += group.gather_item_bytes * group.inner_numel(0) if group.inner_size else 0
        if not group.is_trainable:
            continue
        gradients += group.gather_item_bytes * group.layout.logical_numel
        if rules.accumulation == "defer_replicate":
            waits += group.reduce_item_bytes * group.reduce_layout.slice_numel(0)
        if rules.accumulation != "defer_replicate" or group.has_separate_grad:
            grad_bytes = 0 if group.is_offloaded else group.grad_bytes(0)
            shard += grad_bytes if group.pools_gradients else 0
            sums += 0 if group.pools_gradients else grad_bytes  # allocated together with the full-size buffer
        full = group.reduce_item_bytes * group.reduce_layout.numel
        is_occupied = rules.accumulation == "sharded" and not group.has_separate_grad  # .grad has the sum so far
        buffer += full if group.pools_gradients or is_occupied else 0
        sums += 0 if group.pools_gradients else full
        stays += full if group.is_offloaded and not group.pools_gradients else 0
    return Unit(count, blocks, gathered, gradients, shard, sums, inner, buffer, waits, stays)
