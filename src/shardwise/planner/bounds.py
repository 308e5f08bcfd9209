"""What a candidate needs at least: bounds below the estimates, in closed form, by which the search prunes.

A bound that is too low costs time; one that is too high loses plans. So each counts only what every estimate counts:
the states that a rank holds, and products at the device's best rate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping

from shardwise.cost.hardware import Cluster
from shardwise.cost.kernels import unit_seconds
from shardwise.cost.links import axis_links
from shardwise.cost.software import find_software
from shardwise.cost.work import UnitWork, item_bytes, model_work
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import Candidate
from shardwise.planner.legal import Layout
from shardwise.planner.stage import Chain, stage_blocks
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Experts, ModelShape


class MemoryBound:
    """Bytes that the fullest rank holds at least: those of a rank with the average share of the stages.

    Masters, gradients, optimizer state, parameters in the products' dtype where they are whole for some time, the live
    unit where they are not, and most of what blocks keep for backward, of as many microbatches as a pipeline's first
    rank holds.
    """

    def __init__(self, shape: ModelShape, workload: Workload) -> None:
        self._shape, self._workload = shape, workload
        self._item = item_bytes(workload)
        self._work: dict[tuple[object, ...], tuple[float, float]] = {}

    def __call__(self, candidate: Candidate) -> float:
        """The bound."""
        block, inputs = self._live(candidate)
        row = PRESETS[candidate.strategy]
        unit = 2 * self._item * block if row.shards_parameters and not is_whole(candidate) else 0.0
        if self._workload.lora_rank is not None:
            return inputs
        return self._states(candidate) + unit + inputs

    def _states(self, candidate: Candidate) -> float:
        row, layout = PRESETS[candidate.strategy], candidate.layout
        experts = expert_parameters(self._shape)
        dense = (self._shape.num_parameters - experts) / (layout.tp * layout.pp)
        routed = experts / (layout.tp * layout.pp * layout.ep)
        shard = layout.dp_shard * layout.cp
        state = 4.0 if self._workload.optimizer == "sgd" else 12.0  # master, two moments
        gradient = 0.0 if candidate.in_backward else 4.0
        if candidate.offload != "none":
            state = gradient = 0.0
        has_copy = self._item == 2 or row.shards_parameters or candidate.offload != "none"
        whole = float(self._item) if is_whole(candidate) and has_copy else 0.0
        held = 0.0
        for count, ranks in ((dense, shard), (routed, shard / layout.ep)):
            own = ranks if row.shards_optimizer else 1.0
            held += count * (state / own + gradient / (ranks if row.pools_gradients else 1.0) + whole)
        return held

    def _live(self, candidate: Candidate) -> tuple[float, float]:
        """Parameters of the largest block, and bytes that the blocks of a rank keep for backward."""
        layout, recompute = candidate.layout, candidate.recompute
        kind = recompute if isinstance(recompute, str) else "full"
        key = layout.tp, layout.cp, layout.ep, layout.sequence_parallel, candidate.micro_batch, kind
        if key not in self._work:
            workload = dataclasses.replace(self._workload, micro_batch=candidate.micro_batch)
            blocks = model_work(self._shape, degrees_of(layout), workload)[1:-1]
            largest = max(unit.num_parameters for unit in blocks)
            self._work[key] = largest, sum(unit.count * unit.kept_bytes(kind) for unit in blocks)
        block, kept = self._work[key]
        stages = layout.pp * candidate.virtual_stages
        held = candidate.virtual_stages * (self._shape.num_layers // stages) / self._shape.num_layers
        flight = min(layout.pp, candidate.accumulation) if layout.pp > 1 else 1
        return block, _CERTAIN * kept * held * flight


#: Of the bytes that work counts as kept, the part that every way of computing keeps.
_CERTAIN = 0.75


#: Of a stage's forward and backward, the forward takes so much at least; without the gradients of weights, both do.
_FORWARD, _WITHOUT_WEIGHTS = 1 / 4, 5 / 8


def is_whole(candidate: Candidate) -> bool:
    """Whether all parameters of a rank's stages are gathered at some time."""
    row = PRESETS[candidate.strategy]
    stays = candidate.layout.pp > 1 and not candidate.releases_units
    return row.keeps_gathered or not row.shards_parameters or stays


def degrees_of(layout: Layout) -> ParallelPlan:
    """A plan with the degrees that say what a unit of one rank computes."""
    return ParallelPlan(
        strategy="ddp",
        dp_shard=max(1, layout.ep // layout.cp),
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
    )


@functools.lru_cache(maxsize=64)
def expert_parameters(shape: ModelShape) -> int:
    """Parameters of all routed experts."""
    return sum(
        count * block.feed_forward.expert_parameters(shape.hidden)
        for count, block in shape.stacks
        if isinstance(block.feed_forward, Experts)
    )


class TimeBound:
    """Seconds that a step takes at least, by what the estimate itself counts for units and collectives.

    What is left out: waiting for gathers and reductions that something else could hide, slow-down of computation beside
    communication, the host, the optimizer, offloading. On a calibrated machine the bound is 0.
    """

    def __init__(
        self, shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, object] | None = None
    ) -> None:
        self._shape, self._cluster, self._workload = shape, cluster, workload
        self._reshards = (fixed or {}).get("reshard_after_forward", "auto")
        self._software = find_software("pytorch")  # what an estimate assumes
        self._units: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._steps: dict[tuple[object, ...], float] = {}
        self._collectives: dict[tuple[object, ...], tuple[float, float]] = {}

    def __call__(self, candidate: Candidate) -> float:
        """The bound."""
        if self._cluster.device.measured is not None:
            return 0.0
        return max(self._computed(candidate), self._communicated(candidate)) + self._updated(candidate)

    def _updated(self, candidate: Candidate) -> float:
        """Seconds of the update in the host's memory."""
        if candidate.offload == "none" or self._workload.lora_rank is not None:
            return 0.0
        layout = candidate.layout
        experts = expert_parameters(self._shape)
        dense = (self._shape.num_parameters - experts) / (layout.tp * layout.pp)
        shard = layout.dp_shard * layout.cp if PRESETS[candidate.strategy].shards_optimizer else 1
        tensors = 5 if self._workload.optimizer == "sgd" else 7
        return 4 * tensors * dense / shard / _HOST_UPDATE

    def _computed(self, candidate: Candidate) -> float:
        """Seconds of computing, of collectives inside units, and of the pipeline's fill."""
        layout = candidate.layout
        key = (
            *(layout.tp, layout.cp, layout.ep, layout.pp, layout.sequence_parallel),
            *(candidate.micro_batch, candidate.accumulation, candidate.recompute),
            *(candidate.schedule, candidate.virtual_stages),
        )
        if key not in self._steps:
            embedding, *blocks, head = self._seconds(candidate)
            counts = [count for count, _ in self._shape.stacks]
            if layout.pp == 1:
                whole = embedding + head + sum(map(operator.mul, counts, blocks))
                self._steps[key] = candidate.accumulation * whole
            else:
                self._steps[key] = self._pipelined(candidate, embedding, blocks, head)
        return self._steps[key]

    def _pipelined(self, candidate: Candidate, embedding: float, blocks: list[float], head: float) -> float:
        """No rank begins before a microbatch has come to it, nor is the step over before the last one is back.

        A rank computes ``m`` times what its stages take. The ranks before it have passed the first microbatch on, and
        take the last one back. Where backwards are split, a rank may put off the gradients of its weights until it has
        passed the last microbatch back, so they take no time beside what the ranks before it still do; and under
        ``zb-v``, whose last stage is on the first rank, nothing has to come back.
        """
        pp, virtual = candidate.layout.pp, candidate.virtual_stages
        chain = Chain(
            counts=tuple(count for count, _ in self._shape.stacks),
            costs=self._numels(candidate),
            head_cost=self._shape.vocab * self._shape.hidden // candidate.layout.tp,
        )
        stages: list[float] = [sum(map(operator.mul, held, blocks)) for held in stage_blocks(chain, pp * virtual)]
        stages[0] += embedding
        stages[-1] += head
        if candidate.schedule == "zb-v":
            ranks = [stages[rank] + stages[2 * pp - 1 - rank] for rank in range(pp)]
        else:
            ranks = [sum(stages[rank::pp]) for rank in range(pp)]
        before, most = 0.0, 0.0
        for rank in range(pp):
            own = candidate.accumulation * ranks[rank]
            if candidate.schedule in {"zb-h1", "zb-v"}:
                most = max(most, own + _FORWARD * before)
                if candidate.schedule == "zb-h1":
                    most = max(most, _WITHOUT_WEIGHTS * (own + before))
            else:
                most = max(most, own + before)
            before += stages[rank]
        return most

    def _numels(self, candidate: Candidate) -> tuple[int, ...]:
        """Parameters of a block of each stack, by which stages are balanced."""
        return tuple(
            unit.num_parameters for unit in model_work(self._shape, degrees_of(candidate.layout), self._workload)[1:-1]
        )

    def _seconds(self, candidate: Candidate) -> tuple[float, ...]:
        """Forward and backward of one microbatch: of the embedding, of one block of each stack, of the head."""
        layout = candidate.layout
        key = layout.tp, layout.cp, layout.ep, layout.sequence_parallel, candidate.micro_batch, candidate.recompute
        if key not in self._units:
            workload = dataclasses.replace(self._workload, micro_batch=candidate.micro_batch)
            self._units[key] = tuple(
                self._of_unit(unit, candidate, workload)
                for unit in model_work(self._shape, degrees_of(layout), workload)
            )
        return self._units[key]

    def _of_unit(self, unit: UnitWork, candidate: Candidate, workload: Workload) -> float:
        spent = unit_seconds(unit, self._cluster.device, self._software, workload)
        recompute = candidate.recompute if unit.name.startswith("block") else "none"
        share = 1.0 if isinstance(recompute, str) else min(1.0, recompute / self._shape.num_layers)
        again = {"none": 0.0, "selective": spent.elementwise_s}.get(str(recompute), share * spent.forward_s)
        waited = self._waited(unit, candidate.layout, recomputes=recompute == "full")
        return spent.forward_s + spent.backward_s + again + waited

    def _waited(self, unit: UnitWork, layout: Layout, *, recomputes: bool) -> float:
        """Seconds of the collectives inside a unit for which it waits: those of ``tp`` and ``ep``."""
        links = axis_links(degrees_of(layout), self._cluster, self._software)
        waited = 0.0
        for exchange in unit.exchanges:
            if exchange.axis == "cp":
                continue
            link = links[exchange.axis]
            forward = link.seconds(exchange.kind, exchange.num_bytes)
            backward = link.seconds(exchange.kind, exchange.backward_bytes)
            shown = 1 - self._software.tp_hidden if exchange.axis == "tp" else 1.0
            waited += shown * (forward * (2 if recomputes else 1) + backward)
        return waited

    def _communicated(self, candidate: Candidate) -> float:
        """Seconds of a step's all-gathers or reductions, whichever take longer; those of one block are left out."""
        row, layout = PRESETS[candidate.strategy], candidate.layout
        is_alone = layout.pp == 1
        gathers = 0.0
        if row.shards_parameters and is_alone:
            is_kept = row.keeps_gathered or self._reshards not in {"auto", True}
            gathers = candidate.accumulation * (1 if is_kept else 2)
        elif row.shards_optimizer:
            gathers = 1
        reduces = candidate.accumulation if row.pools_gradients and is_alone else 1
        once_gather, once_reduce = self._once(candidate)
        return max(gathers * once_gather, reduces * once_reduce)

    def _once(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds in which the blocks of a rank, all but one, are gathered once, and reduced once."""
        row, layout = PRESETS[candidate.strategy], candidate.layout
        key = row.shards_optimizer, layout
        if key not in self._collectives:
            plan = dataclasses.replace(degrees_of(layout), dp_shard=layout.dp_shard)
            link = axis_links(plan, self._cluster, self._software)["dp_shard"]
            kind, item = "reduce_scatter" if row.shards_optimizer else "all_reduce", item_bytes(self._workload)
            works = model_work(self._shape, degrees_of(layout), self._workload)[1:-1]
            gather = reduce = 0.0
            for (count, _), unit in zip(self._shape.stacks, works, strict=True):
                number = max(0, (count - 1) // layout.pp - 1)
                dense = unit.num_parameters - unit.num_expert_parameters
                gather += number * link.seconds("all_gather", item * dense)
                reduce += number * link.seconds(kind, 2 * dense)
            self._collectives[key] = gather, reduce
        return self._collectives[key]


#: Bytes per second with which the host updates, at most.
_HOST_UPDATE = 20e9


def order(candidate: Candidate) -> tuple[object, ...]:
    """How plain a candidate is; of two that take equally long the plainer is proposed."""
    layout = candidate.layout
    return (
        sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.ep)),
        candidate.offload != "none",
        candidate.in_backward,
        str(candidate.recompute) != "none",
        layout.pp,
        layout.tp,
        layout.cp,
        -candidate.micro_batch if math.isfinite(candidate.micro_batch) else 0,
        layout.dp_replicate,
    )
