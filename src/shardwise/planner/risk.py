"""The risk that a plan turns out slower than predicted. The search ranks by step time times one plus the risk.

A search over many plans finds the one whose error is the most optimistic. Each term below is a share of the step: what
a plan has that the time model knows least about, or that costs people time when it goes wrong. A plan with one axis
less is preferred up to :data:`AXIS` of time, and so on.
"""

from __future__ import annotations

import math

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import Candidate
from shardwise.planner.planned import MARGIN
from shardwise.spec.placement import PRESETS

#: Each axis besides data parallelism: another communicator, another thing that can be set wrongly.
AXIS = 0.08

#: The same of ``ep`` over all GPUs of a node, as mixtures are usually run; of a mixture without it, and in between the
#: nearer the more experts a rank has to gather; and of every axis where adapters alone are trained, as the libraries
#: for that (PEFT, TRL, Axolotl) divide data only.
_EXPERTS, _WHOLE_EXPERTS, _ADAPTERS = 0.02, 0.08, 0.3

#: ``cp`` with fewer tokens a rank than this: the ring's kernels are short, and its messages hard to hide.
_MANY_TOKENS, _FEW = 8192, 0.05

#: Schedules that split backwards: none of the published recipes runs them, and in the simulation nothing disturbs them.
_SCHEDULES = {"zb-h1": 0.12, "zb-v": 0.15, "interleaved-1f1b": 0.01}

#: Strategies, against ``ddp``. In a pipeline ``zero1`` is usual, as ``zero3`` keeps units gathered for the whole step.
_STRATEGIES = {"zero3": 0.02, "zero1": 0.02, "hsdp": 0.02, "zero2": 0.05, "shard_grad_op": 0.04}
_STRATEGIES |= {"hybrid_shard_grad_op": 0.05, "ddp": 0.0}
_IN_PIPELINES = {"ddp": 0.0, "zero1": 0.01, "zero3": 0.04, "hsdp": 0.04}

#: Ranks that share parameters in several groups: one more communicator.
_GROUPS = 0.01

#: Updates inside backward: gradients cannot be clipped, and no other library has it in its recipes.
_IN_BACKWARD = 0.05

#: The loss in chunks: it changes rounding alone, but needs torch 2.13 and a head that ``sw.chunk_cross_entropy`` knows.
_CHUNKED = 0.06

#: Ranks of a group over the network up to which its collectives keep their rate, and what each doubling beyond costs.
#: ZeRO-3 on Azure fell from 79 to 36 GB/s a node between 128 and 1,024 GPUs; sharding over 1,024 GPUs made a step of
#: 4.0 s one of 7.2 s, sharding inside nodes one of 4.5 s (planner.md).
WIDE_GROUP, _PER_DOUBLING = 128, 0.1

#: Share of the memory from which on a fuller device is a risk: predicted peaks are wrong by some percent, and an
#: allocator that is almost full frees and asks again, which costs time before it fails.
_FULL, _PER_SHARE = 0.85, 0.5

#: A plan that leaves less free than predictions are wrong by comes first only where it is far faster than others. The
#: risk grows over a hundredth of the memory, so that some MiB decide nothing.
_TIGHT, _RAMP = 0.25, 0.01


def risk(candidate: Candidate, cluster: Cluster, workload: Workload, *, is_mixture: bool = False) -> float:
    """The share of the step time by which a plan may be slower than predicted; memory is not asked."""
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
    """The risk of a device of whose memory this share is taken."""
    return _PER_SHARE * max(0.0, share - _FULL) + _TIGHT * min(max(share - 1 + MARGIN, 0.0) / _RAMP, 1.0)


def order(candidate: Candidate) -> tuple[object, ...]:
    """By which plans of one cost come in one order."""
    layout = candidate.layout
    degrees = layout.pp, layout.tp, layout.cp, layout.ep, layout.dp_replicate
    return (*degrees, candidate.strategy, candidate.schedule, str(candidate.recompute), -candidate.micro_batch)
