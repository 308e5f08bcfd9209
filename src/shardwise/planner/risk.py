"""The risk that a plan turns out slower than predicted. The search ranks by step time times one plus the risk.

A search over many plans tends to select the plan with the most optimistic error. Each term below is a share of the
step, for a property that the time model predicts badly, or that costs people time when it goes wrong. For example, a
plan with one axis less is preferred if it is slower by no more than :data:`AXIS`.
"""

from __future__ import annotations

import math

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import Candidate
from shardwise.planner.planned import MARGIN
from shardwise.spec.placement import PRESETS

#: Each axis in addition to data parallelism: another communicator, and another possible mistake.
AXIS = 0.08

#: A mixture with ``ep`` over all GPUs of a node, the usual way; a mixture without ``ep`` (smaller degrees are in
#: between); and each axis if only adapters are trained, because libraries for that (PEFT, TRL, Axolotl) divide data
#: only.
_EXPERTS, _WHOLE_EXPERTS, _ADAPTERS = 0.02, 0.08, 0.3

#: ``cp`` with fewer tokens on a rank than this: the ring's kernels are short, and its messages hard to hide.
_MANY_TOKENS, _FEW = 8192, 0.05

#: Schedules that split backwards: no published recipe uses them, and the simulation does not model disturbances.
_SCHEDULES = {"zb-h1": 0.12, "zb-v": 0.15, "interleaved-1f1b": 0.01}

#: Strategies, relative to ``ddp``. In a pipeline ``zero1`` is usual, because ``zero3`` keeps units gathered for a step.
_STRATEGIES = {"zero3": 0.02, "zero1": 0.02, "hsdp": 0.02, "zero2": 0.05, "shard_grad_op": 0.04}
_STRATEGIES |= {"hybrid_shard_grad_op": 0.05, "ddp": 0.0}
_IN_PIPELINES = {"ddp": 0.0, "zero1": 0.01, "zero3": 0.04, "hsdp": 0.04}

#: Sharding in several groups: one more communicator.
_GROUPS = 0.01

#: Updates inside backward: gradients cannot be clipped, and no other library has this in its recipes.
_IN_BACKWARD = 0.05

#: The loss in chunks: only rounding changes, but it needs torch 2.13 and a head that ``sw.chunk_cross_entropy`` knows.
_CHUNKED = 0.06

#: Size of a group over the network up to which its collectives have full speed, and the cost of each doubling beyond.
#: ZeRO-3 on Azure fell from 79 to 36 GB/s a node between 128 and 1,024 GPUs. A step of 4.0 s took 7.2 s with sharding
#: over 1,024 GPUs, and 4.5 s with sharding inside nodes (planner.md).
WIDE_GROUP, _PER_DOUBLING = 128, 0.1

#: Share of the memory above which a fuller device is a risk. Predicted peaks are wrong by some percent, and an
#: allocator that is almost full frees memory and retries, which costs time before it fails.
_FULL, _PER_SHARE = 0.85, 0.5

#: A tight plan is recommended only if it is far faster than others. The risk grows over a hundredth of the memory, so
#: that a few MiB do not decide.
_TIGHT, _RAMP = 0.25, 0.01


def risk(candidate: Candidate, cluster: Cluster, workload: Workload, *, is_mixture: bool = False) -> float:
    """The share of the step time by which a plan may be slower than predicted, without the risk of :func:`fullness`."""
    layout, is_pipeline = candidate.layout, candidate.layout.pp > 1
    axis = AXIS if workload.lora_rank is None else _ADAPTERS
    found = axis * sum(size > 1 for size in (layout.tp, layout.pp, layout.cp))
    if is_mixture and cluster.num_gpus > 1:
        node = max(2, min(cluster.gpus_per_node, cluster.num_gpus))
        found += _WHOLE_EXPERTS + (_EXPERTS - _WHOLE_EXPERTS) * min(math.log(layout.ep, node), 1.0)
    found += _SCHEDULES.get(candidate.schedule, 0.0) + _IN_BACKWARD * candidate.in_backward
    found += _CHUNKED * candidate.chunks_loss
    found += _FEW * (layout.cp > 1 and workload.seq_len < _MANY_TOKENS * layout.cp)
    found += (_IN_PIPELINES if is_pipeline else _STRATEGIES).get(candidate.strategy, 0.05)
    found += _GROUPS * (layout.dp_replicate > 1 and candidate.strategy != "ddp")
    ranks = layout.dp_shard * layout.cp
    if (
        ranks > WIDE_GROUP
        and ranks * layout.tp > cluster.gpus_per_node
        and PRESETS[candidate.strategy].shards_optimizer
    ):
        found += _PER_DOUBLING * math.log2(ranks / WIDE_GROUP)
    return found


def fullness(share: float) -> float:
    """The risk of a device with this share of its memory in use."""
    return _PER_SHARE * max(0.0, share - _FULL) + _TIGHT * min(max(share - 1 + MARGIN, 0.0) / _RAMP, 1.0)


def order(candidate: Candidate) -> tuple[object, ...]:
    """A sort key that gives plans of equal cost a fixed order."""
    layout = candidate.layout
    degrees = layout.pp, layout.tp, layout.cp, layout.ep, layout.dp_replicate
    return (*degrees, candidate.strategy, candidate.schedule, str(candidate.recompute), -candidate.micro_batch)
