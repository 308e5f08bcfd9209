"""What a candidate needs at least: bounds below the estimates, in closed form, by which the search prunes.

A bound that is too low costs time; one that is too high loses plans. So each counts only what every estimate counts:
the states that a rank holds, and products at the device's best rate.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.cost.hardware import Cluster
from shardwise.cost.kernels import copy_seconds, unit_seconds
from shardwise.cost.links import Link, axis_links, message_seconds
from shardwise.cost.software import find_software
from shardwise.cost.work import UnitWork, item_bytes, model_work
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import Candidate
from shardwise.planner.device import BESIDE
from shardwise.planner.legal import Layout
from shardwise.planner.stage import Chain, stage_blocks
from shardwise.planner.time import HOST_UPDATE
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Experts, ModelShape


class MemoryBound:
    """Bytes that the fullest rank holds at least: those of a rank with the average share of the stages.

    Masters, gradients, optimizer state, parameters in the products' dtype where they are whole for some time, the live
    unit where they are not, and most of what blocks keep for backward, of as many microbatches as a pipeline's first
    rank holds.
    """

    def __init__(self, shape: ModelShape, cluster: Cluster, workload: Workload) -> None:
        self._shape, self._workload = shape, workload
        self._item = item_bytes(workload)
        self._is_gpu = cluster.device.device_type != "cpu"
        self._num_layers = max(shape.num_layers, 1)
        self._work: dict[tuple[object, ...], tuple[float, float]] = {}
        self._held: dict[tuple[object, ...], float] = {}

    def __call__(self, candidate: Candidate) -> float:
        """The bound."""
        block, inputs = self._live(candidate)
        row = PRESETS[candidate.strategy]
        unit = (
            (1 if candidate.gathers_late else 2) * self._item * block
            if row.shards_parameters and not is_whole(candidate)
            else 0.0
        )
        key = (
            *(candidate.layout, candidate.strategy, candidate.accumulation == 1),
            *(candidate.offload, candidate.in_backward, candidate.releases_units),
        )
        states = self._held.get(key)
        if states is None:
            states = self._states(candidate) if self._workload.lora_rank is None else self._frozen(candidate)
            self._held[key] = states
        held = states + unit + inputs
        if not self._is_gpu:
            return held
        return (1 + BESIDE.fragments) * held + BESIDE.workspace + BESIDE.context + BESIDE.communicator

    def _frozen(self, candidate: Candidate) -> float:
        """Bytes of the blocks' frozen parameters, of which adapters train none."""
        layout, row = candidate.layout, PRESETS[candidate.strategy]
        count = self._shape.num_parameters - self._shape.embedding - self._shape.head
        count /= layout.tp * layout.pp * layout.ep
        if is_whole(candidate):
            return count * self._item
        is_held = row.shards_parameters and candidate.offload == "none"
        return count * self._item / (layout.dp_shard * layout.cp) if is_held else 0.0

    def _states(self, candidate: Candidate) -> float:
        row, layout = PRESETS[candidate.strategy], candidate.layout
        experts = expert_parameters(self._shape)
        dense = (self._shape.num_parameters - experts) / (layout.tp * layout.pp)
        routed = experts / (layout.tp * layout.pp * layout.ep)
        shard = layout.dp_shard * layout.cp
        state = 4.0 * (1 + self._workload.matrix_tensors)  # master, moments
        gradient = 0.0 if candidate.in_backward else 4.0
        if candidate.offload != "none":
            state = gradient = 0.0
        has_copy = self._item == 2 or row.shards_parameters or candidate.offload != "none"
        whole = float(self._item) if is_whole(candidate) and has_copy else 0.0
        is_once = candidate.accumulation == 1 and layout.pp == 1  # no sum of gradients outlives a unit's backward
        is_pooled = row.pools_gradients or (is_once and row.shards_optimizer)
        held = 0.0
        for count, ranks in ((dense, shard), (routed, shard / layout.ep)):
            own = ranks if row.shards_optimizer else 1.0
            held += count * (state / own + gradient / (ranks if is_pooled else 1.0) + whole)
        return held

    def _live(self, candidate: Candidate) -> tuple[float, float]:
        """Parameters of the largest block, and bytes that the blocks of a rank keep for backward."""
        layout, recompute = candidate.layout, candidate.recompute
        kind = recompute if isinstance(recompute, str) else "full"
        key = layout.tp, layout.cp, layout.ep, layout.sequence_parallel, candidate.micro_batch, kind
        if key not in self._work:
            workload = dataclasses.replace(self._workload, micro_batch=candidate.micro_batch)
            blocks = model_work(self._shape, degrees_of(layout), workload)[1:-1]
            largest = max((unit.num_parameters for unit in blocks), default=0)
            self._work[key] = largest, sum(unit.count * unit.kept_bytes(kind) for unit in blocks)
        block, kept = self._work[key]
        if candidate.offloads_activations:
            return block, 0.0
        stages = layout.pp * candidate.virtual_stages
        held = candidate.virtual_stages * (self._num_layers // stages) / self._num_layers
        flight = min(layout.pp, candidate.accumulation) if layout.pp > 1 else 1
        return block, _CERTAIN * kept * held * flight


#: Of the bytes that work counts as kept, the part that every way of computing keeps.
_CERTAIN = 0.75


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


class _Spent(NamedTuple):
    """Seconds of one microbatch in one unit or one stage."""

    forward: float
    backward: float
    waited: float  # of both, collectives of tp and ep, beside which nothing is slowed down

    @property
    def whole(self) -> float:
        return self.forward + self.backward


class TimeBound:
    """Seconds that a step takes at least, by what the estimate itself counts for units and collectives.

    What is left out: waiting for gathers and reductions that something else could hide, the host, the device's
    optimizer, copies of offloading. On a calibrated machine the bound is 0.
    """

    def __init__(
        self, shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, object] | None = None
    ) -> None:
        self._shape, self._cluster, self._workload = shape, cluster, workload
        self._reshards = (fixed or {}).get("reshard_after_forward", "auto")
        self._software = find_software("pytorch")  # what an estimate assumes
        self._counts = [unit.count for unit in model_work(shape, ParallelPlan(strategy="ddp"), workload)[1:-1]]
        self._units: dict[tuple[object, ...], tuple[_Spent, ...]] = {}
        self._steps: dict[tuple[object, ...], tuple[float, float]] = {}
        self._collectives: dict[tuple[object, ...], tuple[float, float]] = {}
        self._stages: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}
        self._links: dict[Layout, Mapping[str, Link]] = {}
        self._messages: dict[tuple[int, float], list[float]] = {}

    def __call__(self, candidate: Candidate) -> float:
        """The bound."""
        if self._cluster.device.measured is not None:
            return 0.0
        computed, waited = self._computed(candidate)
        sent = self._communicated(candidate)
        slowed = min(computed - waited, sent - waited if sent < computed else sent)
        return max(computed, sent) + self._slows * max(slowed, 0.0) + self._updated(candidate)

    @property
    def _slows(self) -> float:
        """Seconds by which a second of communication beside computation makes both together longer."""
        return min(self._software.slowdown, 2.0) - 1

    def _updated(self, candidate: Candidate) -> float:
        """Seconds of the update in the host's memory."""
        if candidate.offload == "none" or self._workload.lora_rank is not None:
            return 0.0
        layout = candidate.layout
        experts = expert_parameters(self._shape)
        dense = (self._shape.num_parameters - experts) / (layout.tp * layout.pp)
        shard = layout.dp_shard * layout.cp if PRESETS[candidate.strategy].shards_optimizer else 1
        tensors = 3 + 2 * self._workload.matrix_tensors
        return 4 * tensors * dense / shard / HOST_UPDATE

    def _computed(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds of computing, of collectives inside units, and of the pipeline's fill; and of those collectives."""
        layout = candidate.layout
        key = (
            *(layout.tp, layout.cp, layout.ep, layout.pp, layout.sequence_parallel),
            *(candidate.micro_batch, candidate.accumulation, candidate.recompute),
            *(candidate.schedule, candidate.virtual_stages, self._sums(candidate)),
            layout.pp > 1 and self._once_of_stage(candidate),
        )
        if key not in self._steps:
            embedding, *blocks, head = self._seconds(candidate)
            if layout.pp == 1:
                units = ((1, embedding), (1, head), *zip(self._counts, blocks, strict=True))
                whole = sum(count * unit.whole for count, unit in units)
                waited = sum(count * unit.waited for count, unit in units)
                self._steps[key] = candidate.accumulation * whole, candidate.accumulation * waited
            else:
                whole = self._pipelined(candidate, embedding, blocks, head)
                self._steps[key] = whole, whole  # how much of it is computing is not known
        return self._steps[key]

    def _pipelined(self, candidate: Candidate, embedding: _Spent, blocks: list[_Spent], head: _Spent) -> float:
        """No rank begins before a microbatch has come to it, nor is the step over before the last one is back.

        A rank computes ``m`` times what its stages take; a stage's first forward waits until it is gathered.
        The ranks before it have passed the first microbatch on, and take the last one back. Where backwards are
        split, a rank may put off the gradients of its weights until it has passed the last microbatch back, so
        they take no time beside what the ranks before it still do; and under ``zb-v``, whose last stage is on
        the first rank, nothing has to come back.

        Under ``1f1b`` and ``zb-h1`` at most ``pp - r`` microbatches are on their way from rank ``r`` to the last rank
        and back at the same time, each for as long as the stages and the messages take.
        """
        pp, count = candidate.layout.pp, candidate.accumulation
        stages = self._split(candidate, embedding, blocks, head)
        is_split = candidate.schedule in {"zb-h1", "zb-v"}
        way = [each.forward + each.backward / (2 if is_split else 1) for each in stages]
        if candidate.schedule == "zb-v":
            ranks = [stages[rank].whole + stages[2 * pp - 1 - rank].whole for rank in range(pp)]
        else:
            ranks = [sum(stage.whole for stage in stages[rank::pp]) for rank in range(pp)]
        gathered = self._once_of_stage(candidate)
        late = [max(0.0, gathered - stage.forward) for stage in stages]  # of a stage's first forward
        before = forwards = most = 0.0
        for rank in range(pp):
            own = count * ranks[rank] + late[rank]
            most = max(most, own + (forwards if is_split else before))
            if candidate.schedule == "zb-h1":
                most = max(most, count * way[rank] + late[rank] + before)
            before += way[rank] + late[rank]
            forwards += stages[rank].forward + late[rank]
        if candidate.schedule in {"1f1b", "zb-h1"}:
            back = 0.0
            for rank, message in zip(reversed(range(pp)), [0.0, *reversed(self._message(candidate))], strict=True):
                back += way[rank] + 2 * message
                most = max(most, count * back / (pp - rank))
        return most

    def _once_of_stage(self, candidate: Candidate) -> float:
        """Seconds in which a stage is gathered, which its first forward waits for."""
        if not PRESETS[candidate.strategy].shards_optimizer:
            return 0.0
        return self._once(candidate)[0] / candidate.virtual_stages

    def _split(self, candidate: Candidate, embedding: _Spent, blocks: list[_Spent], head: _Spent) -> list[_Spent]:
        """Seconds of each stage."""
        layout = candidate.layout
        number = layout.pp * candidate.virtual_stages
        key = layout.tp, layout.cp, layout.ep, layout.sequence_parallel, number
        if key not in self._stages:
            chain = Chain(
                counts=tuple(self._counts),
                costs=self._numels(candidate),
                head_cost=self._shape.vocab * self._shape.hidden // layout.tp,
            )
            self._stages[key] = stage_blocks(chain, number)
        made: dict[tuple[int, ...], _Spent] = {}
        for held in set(self._stages[key]):
            forward = sum(map(operator.mul, held, [unit.forward for unit in blocks]))
            backward = sum(map(operator.mul, held, [unit.backward for unit in blocks]))
            made[held] = _Spent(forward, backward, 0.0)
        found = [made[held] for held in self._stages[key]]
        for place, unit in ((0, embedding), (-1, head)):
            whole = found[place]
            found[place] = _Spent(whole.forward + unit.forward, whole.backward + unit.backward, 0.0)
        return found

    def _message(self, candidate: Candidate) -> list[float]:
        """Seconds of a message from each rank of the pipeline to the next."""
        layout, pp = candidate.layout, candidate.layout.pp
        sent = item_bytes(self._workload) * candidate.micro_batch * self._workload.seq_len / layout.cp
        sent *= self._shape.hidden / (layout.tp if layout.sequence_parallel else 1)
        if (pp, sent) not in self._messages:
            self._messages[pp, sent] = [
                message_seconds(sent, (rank, rank + 1), pp, self._cluster, self._software) for rank in range(pp - 1)
            ]
        return self._messages[pp, sent]

    def _numels(self, candidate: Candidate) -> tuple[int, ...]:
        """Parameters of a block of each stack, by which stages are balanced."""
        return tuple(
            unit.num_parameters for unit in model_work(self._shape, degrees_of(candidate.layout), self._workload)[1:-1]
        )

    @staticmethod
    def _sums(candidate: Candidate) -> bool:
        """Whether each microbatch's gradients are added to those of the microbatches before it."""
        return candidate.accumulation > 1 and not PRESETS[candidate.strategy].shards_parameters

    def _seconds(self, candidate: Candidate) -> tuple[_Spent, ...]:
        """Forward and backward of one microbatch: of the embedding, of one block of each stack, of the head."""
        layout = candidate.layout
        key = (
            *(layout.tp, layout.cp, layout.ep, layout.sequence_parallel),
            *(candidate.micro_batch, candidate.recompute, self._sums(candidate)),
        )
        if key not in self._units:
            workload = dataclasses.replace(self._workload, micro_batch=candidate.micro_batch)
            self._units[key] = tuple(
                self._of_unit(unit, candidate, workload)
                for unit in model_work(self._shape, degrees_of(layout), workload)
            )
        return self._units[key]

    def _of_unit(self, unit: UnitWork, candidate: Candidate, workload: Workload) -> _Spent:
        spent = unit_seconds(unit, self._cluster.device, self._software, workload)
        recompute = candidate.recompute if unit.name.startswith("block") else "none"
        share = 1.0 if isinstance(recompute, str) else min(1.0, recompute / self._shape.num_layers)
        again = {"none": 0.0, "selective": spent.elementwise_s}.get(str(recompute), share * spent.forward_s)
        if self._sums(candidate):
            again += copy_seconds(8 * unit.num_trained, self._cluster.device)
        ahead, ring_ahead = self._exchanged(unit, candidate.layout, is_forward=True)
        back, ring_back = self._exchanged(unit, candidate.layout, is_forward=False)
        if recompute == "full":
            back, ring_back = back + ahead, ring_back + ring_ahead
        forward = self._beside(spent.forward_s, ring_ahead) + ahead
        return _Spent(forward, self._beside(spent.backward_s + again, ring_back) + back, ahead + back)

    def _beside(self, computed: float, sent: float) -> float:
        """Seconds in which a unit computes, while blocks of keys and values go round."""
        return max(computed, sent) + self._slows * min(computed, sent)

    def _exchanged(self, unit: UnitWork, layout: Layout, *, is_forward: bool) -> tuple[float, float]:
        """Seconds of the collectives inside a unit: of those for which it waits, and of ``cp``'s beside it."""
        waited = ring = 0.0
        for exchange in unit.exchanges:
            link = self._links_of(layout)[exchange.axis]
            kind = exchange.kind
            if not is_forward:
                kind = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(kind, kind)
            seconds = link.seconds(kind, exchange.num_bytes if is_forward else exchange.backward_bytes)
            if exchange.axis == "cp":
                ring += seconds
            else:
                waited += seconds * (1 - self._software.tp_hidden if exchange.axis == "tp" else 1.0)
        return waited, ring

    def _links_of(self, layout: Layout) -> Mapping[str, Link]:
        if layout not in self._links:
            plan = dataclasses.replace(degrees_of(layout), dp_shard=layout.dp_shard)
            self._links[layout] = axis_links(plan, self._cluster, self._software)
        return self._links[layout]

    def _communicated(self, candidate: Candidate) -> float:
        """Seconds of a step's all-gathers and reductions, on one link; those of one block are left out."""
        row, layout = PRESETS[candidate.strategy], candidate.layout
        is_alone = layout.pp == 1
        gathers = 0.0
        if row.shards_parameters and (is_alone or candidate.releases_units):
            is_kept = row.keeps_gathered or self._reshards not in {"auto", True}
            gathers = candidate.accumulation * (1 if is_kept else 2)
        elif row.shards_optimizer:
            gathers = 1
        reduces = candidate.accumulation if row.pools_gradients and is_alone else 1
        once_gather, once_reduce = self._once(candidate)
        return gathers * once_gather + reduces * once_reduce

    def _once(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds in which the blocks of a rank, all but one, are gathered once, and reduced once."""
        row, layout = PRESETS[candidate.strategy], candidate.layout
        key = row.shards_optimizer, layout
        if key not in self._collectives:
            link = self._links_of(layout)["dp_shard"]
            kind, item = "reduce_scatter" if row.shards_optimizer else "all_reduce", item_bytes(self._workload)
            works = model_work(self._shape, degrees_of(layout), self._workload)[1:-1]
            gather = reduce = 0.0
            for unit in works:
                number = max(0, (unit.count - 1) // layout.pp - 1)
                dense = unit.num_parameters - unit.num_expert_parameters
                gather += number * link.seconds("all_gather", item * dense)
                reduce += number * link.seconds(kind, 2 * dense * unit.num_trained / unit.num_parameters)
            self._collectives[key] = gather, reduce
        return self._collectives[key]
