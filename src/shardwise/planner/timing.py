"""Seconds of a step: units' work at the speed of kernels and links, with order and overlap from a simulation.

Only a few of many equal blocks are simulated, because each additional block between the first and the last adds the
same time. So does each microbatch of a pipeline after the first ``2 pp``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from shardwise.cost.hardware import Cluster
from shardwise.cost.kernels import UnitSeconds, copy_seconds, product_seconds, unit_seconds
from shardwise.cost.links import Link, axis_links, message_seconds
from shardwise.cost.software import Software
from shardwise.cost.work import Product, UnitWork, hidden_matrices, item_bytes, model_work
from shardwise.cost.workload import Workload
from shardwise.planner.memory import accumulation_of, num_microbatches
from shardwise.planner.stage import Chain, stage_blocks
from shardwise.sim.pipeline import SimulatedPipeline, StageSeconds, simulate_pipeline, stage_seconds
from shardwise.sim.step import SimulatedStep, StepUnit, Transfer, simulate_step
from shardwise.sim.streams import Slowdown, add_up
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.precision import item_bytes as item_size
from shardwise.spec.schedule.actions import folded_ranks, looped_ranks
from shardwise.spec.shape import ModelShape
from shardwise.spec.traffic.matrices import NS_STEPS, exchanged_bytes

#: Categories of time by their names in the simulation, with their names for users.
CATEGORIES = {"gather": "exposed gather", "reduce": "exposed reduce"}

#: Streams that share a rank's link to data-parallel peers.
_ON_LINK = frozenset({"gather", "reduce", "replicate"})

#: Bytes per second at which the host updates a rank's offloaded state. An assumption: the 100 to 400 GB/s of a server's
#: DDR4 or DDR5, shared by the eight ranks of a node.
HOST_UPDATE = 20e9

#: The host's time for a unit's forward and for its backward, relative to forward without recomputation. With
#: recomputation torch's checkpoint packs and unpacks every saved tensor in Python (16 blocks of Llama on an H100 that
#: waits for its host: 36 and 54 ms, recomputed 51 and 99, selectively 62 and 99; bench/results/2026-11-27-gpu-3.md).
_LAUNCHES, _LAUNCHES_RECOMPUTED = (1.0, 2.0), (1.5, 3.5)

#: Number of blocks of a long run that are simulated.
_SIMULATED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """The parts of a step's time, on the rank that takes longest.

    Attributes:
        step_time_s: Seconds of a step, except the first.
        by_category: Seconds by ``compute``, ``exposed gather``, ``exposed reduce``, ``tp``, ``pp bubble``, ``cp``,
            ``ep``, ``optimizer``, ``offload``, ``host``; their sum is ``step_time_s``.
        model_flops: FLOPs that the model needs for a step on all GPUs: three times the forward's, with masked pairs of
            attention and the head, without recomputation.
        sent_bytes: Bytes that a rank sends in a step, by axis.
    """

    step_time_s: float
    by_category: Mapping[str, float]
    model_flops: float
    sent_bytes: Mapping[str, float]


def model_flops(shape: ModelShape, workload: Workload) -> float:
    """FLOPs that the model needs for one step, full attention and the head included.

    Backward needs twice as many as forward; for frozen weights, which have no gradient, as many as forward.
    """
    units = model_work(shape, ParallelPlan(strategy="ddp"), workload)
    return sum(unit.count * unit.step_flops for unit in units) * workload.global_batch / workload.micro_batch


@dataclass(frozen=True)
class Timing:
    """The step of a plan.

    Attributes:
        shape: The model.
        plan: The plan, with every degree filled in.
        cluster: The GPUs and their links.
        workload: The batch and settings of a step.
        software: Speed of kernels and overlap.
        adds_gradients: Adding a microbatch's gradients to earlier ones takes additional time.
    """

    shape: ModelShape
    plan: ParallelPlan
    cluster: Cluster
    workload: Workload
    software: Software
    adds_gradients: ClassVar[bool] = True

    @functools.cached_property
    def links(self) -> Mapping[str, Link]:
        """The link of every axis."""
        return axis_links(self.plan, self.cluster, self.software)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step on each data-parallel rank."""
        return num_microbatches(self.plan, self.workload)

    @functools.cached_property
    def works(self) -> tuple[UnitWork, ...]:
        """The model's units on one rank."""
        workload = self.workload
        if self.software.is_fused and not workload.compile:
            workload = dataclasses.replace(workload, compile=True)
        return model_work(self.shape, self.plan, workload)

    def estimate(self) -> TimeEstimate:
        """Estimate the step's time, FLOPs and bytes."""
        seconds = self._pipeline() if self.plan.pp > 1 else self._data_parallel()
        found = add_up((CATEGORIES.get(category, category), spent) for category, spent in seconds.items())
        return TimeEstimate(
            step_time_s=sum(found.values()),
            by_category=found,
            model_flops=model_flops(self.shape, self.workload),
            sent_bytes=self._sent_bytes(),
        )

    # -- units

    @property
    def is_waited_for(self) -> bool:
        """Whether gathers and reductions follow the computation instead of overlapping it."""
        return not self.software.overlaps_reductions and not self.plan.placements.shards_parameters

    @functools.cached_property
    def _gradient_bytes(self) -> int:
        """Bytes of an element of a reduced gradient: by the plan's policy or, without one, by the software."""
        if self.workload.precision == "fp32":
            return 4
        if self.plan.mp_policy is None:
            return self.software.gradient_bytes
        return item_size(self.plan.precision.reduce_dtype or "fp32")

    def _seconds(self, work: UnitWork) -> UnitSeconds:
        return unit_seconds(work, self.cluster.device, self.software, self.workload)

    def step_unit(self, work: UnitWork, *, recomputes: str = "none") -> StepUnit:
        """A unit for the simulation; ``recomputes`` is ``"none"``, ``"selective"`` or ``"full"``."""
        spent = self._seconds(work)
        selective = spent.elementwise_s + self.software.selective_products * spent.products_s
        again = {"none": 0.0, "selective": selective, "full": spent.forward_s}[recomputes]
        if self.num_microbatches > 1 and self.adds_gradients:  # sums over microbatches are read and written in fp32
            sum_bytes = 8 * self._numel(work, is_sharded=accumulation_of(self.plan) == "sharded")
            again += copy_seconds(sum_bytes, self.cluster.device)
        ahead = self._exchanges(work, is_forward=True)
        back = self._exchanges(work, is_forward=False)
        gather, reduce, replicate = ((), (), ()) if self.is_waited_for else self._transfers(work)
        kept = self._kept_gathers(work) if self.plan.inner_size is not None else ()
        ahead_launches, back_launches = _LAUNCHES if recomputes == "none" else _LAUNCHES_RECOMPUTED
        offload = self._offload(work)
        return StepUnit(
            work.name,
            forward_s=spent.forward_s,
            backward_s=spent.backward_s + again,
            gather=gather,
            kept_gather=kept,
            reduce=reduce,
            replicate=replicate,
            forward_exchanges=ahead,
            backward_exchanges=back + (ahead if recomputes == "full" else ()),
            host_forward_s=spent.launch_s * ahead_launches,
            host_backward_s=spent.launch_s * back_launches,
            up_s=offload,
            down_s=offload,
            away_s=self._away_s(work, recomputes),
            update_s=self.optimizer_s(work) if self.workload.in_backward else 0.0,
            updates_on_host=self.plan.offload is not None,
            is_trained=work.num_trained > 0,
        )

    def _transfers(self, work: UnitWork) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...], tuple[Transfer, ...]]:
        """All-gathers and reductions on ``dp_shard``, and the sums on ``dp_replicate`` that follow."""
        placements, item = self.plan.placements, item_bytes(self.workload)
        grad = self._gradient_bytes
        shard, replicate = self.links["dp_shard"], self.links["dp_replicate"]
        gathers, reduces, sums = [], [], []
        for numel, trained, link in self._groups(work, shard):
            if link.kind_size > 1 and placements.shards_optimizer:
                gathers.append(Transfer(link.seconds("all_gather", item * numel)))
            kind = "reduce_scatter" if placements.shards_optimizer else "all_reduce"
            if trained and link.kind_size > 1:
                reduces.append(Transfer(link.seconds(kind, grad * trained)))
            if trained and replicate.kind_size > 1:
                share = trained / link.kind_size if placements.shards_optimizer else trained
                sums.append(Transfer(replicate.seconds("all_reduce", grad * share)))
        return tuple(gathers), tuple(reduces), tuple(sums)

    def _kept_gathers(self, work: UnitWork) -> tuple[Transfer, ...]:
        """All-gathers in backward from the inner group of ranks that keeps a unit after its forward."""
        inner, item = self.links["inner"], item_bytes(self.workload)
        return tuple(Transfer(inner.seconds("all_gather", item * n)) for n, _, _ in self._groups(work, inner))

    def _groups(self, work: UnitWork, shard: Link) -> list[tuple[float, float, Link]]:
        """Elements, trained elements and link of each gathered group; under ``ep`` routed experts are separate."""
        experts = work.num_expert_parameters if self.plan.ep > 1 else 0
        trained = work.num_trained / work.num_parameters if work.num_parameters else 0.0
        dense = work.num_parameters - experts
        found = [(float(dense), dense * trained, shard)] if dense else []
        if experts:
            size = shard.kind_size // self.plan.ep
            found.append((float(experts), experts * trained, dataclasses.replace(shard, kind_size=size)))
        return found

    def _exchanges(self, work: UnitWork, *, is_forward: bool) -> tuple[Transfer, ...]:
        made = []
        for each in work.exchanges:
            num_bytes = each.num_bytes if is_forward else each.backward_bytes
            kind = each.kind
            if not is_forward:
                kind = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(kind, kind)
            seconds = self.links[each.axis].seconds(kind, num_bytes)
            if each.axis == "tp":
                seconds *= 1 - self.software.tp_hidden
            if seconds:
                made.append(Transfer(seconds, stream=each.axis, is_beside=each.axis == "cp"))
        return tuple(made)

    def _offload(self, work: UnitWork) -> float:
        """Seconds of the copy of a unit's master, or of its gradients, between host and device."""
        if self.plan.offload is None:
            return 0.0
        return 4 * self._numel(work, is_sharded=True) / self.cluster.device.host_bandwidth

    def _away_s(self, work: UnitWork, recomputes: str) -> float:
        """Seconds of the copy of a block's activations to the host, or back."""
        policy = self.plan.activation_offload
        if policy is None or work in {self.works[0], self.works[-1]}:
            return 0.0
        return work.kept_bytes(recomputes) / policy.every / self.cluster.device.host_bandwidth

    def _numel(self, work: UnitWork, *, is_sharded: bool) -> float:
        """Trained parameters of a unit on a rank."""
        groups = self._groups(work, self.links["dp_shard"])
        return sum(trained / (link.kind_size if is_sharded else 1) for _, trained, link in groups)

    def optimizer_s(self, work: UnitWork) -> float:
        """Seconds of the optimizer's step on a rank's part of a unit: reads and writes masters, states, gradients."""
        numel = self._numel(work, is_sharded=self.plan.placements.shards_optimizer)
        tensors = 3 + 2 * self.workload.optimizer_tensors  # gradient and master, and each state read and written
        if self.workload.optimizer == "muon" and work not in {self.works[0], self.works[-1]}:
            tensors -= 1  # matrices have one state less, and exchanged copies in 16 bit are written and read
        if self.plan.offload is not None:
            return 4 * tensors * numel / HOST_UPDATE
        return copy_seconds(4 * tensors * numel, self.cluster.device)

    @functools.cached_property
    def _exchanged_bytes(self) -> tuple[float, float]:
        """Bytes that a rank sends with Muon: matrices to be orthogonalized, and results."""
        if self.workload.optimizer != "muon":
            return 0.0, 0.0
        shard = self.plan.dp_shard * self.plan.cp
        here = sum(work.count * self._num_weights(work) for work in self.works[1:-1]) / self.plan.pp
        is_cut = self.plan.placements.shards_optimizer
        parts = self.plan.tp * (shard if is_cut else 1)
        replicas = self.plan.dp_replicate * (1 if is_cut else shard)
        return exchanged_bytes(here / (shard if is_cut else 1), parts, replicas)

    @functools.cached_property
    def _matrices_s(self) -> float:
        """Seconds of the exchange of matrices with Muon, and of the orthogonalization of a rank's share."""
        if self.workload.optimizer != "muon":
            return 0.0
        whole = model_work(self.shape, ParallelPlan(strategy="ddp"), self.workload)[1:-1]
        each = [
            (unit.count * product.count * product.parts, self._orthogonalization_s(product))
            for unit in whole
            for product in hidden_matrices(self.shape, unit)
        ]
        ranks = self.plan.dp_replicate * self.plan.dp_shard * self.plan.cp * self.plan.tp
        total, longest = sum(count * spent for count, spent in each), max((spent for _, spent in each), default=0.0)
        return self._exchange_s() + max(total / self.plan.pp / ranks, longest)

    def _exchange_s(self) -> float:
        """Seconds of the exchange of matrices before orthogonalization, and of results after it."""
        joined = [self.links[axis] for axis in ("tp", "dp_shard", "dp_replicate") if self.links[axis].kind_size > 1]
        slowest = min(joined, key=lambda link: link.bandwidth, default=None)
        return sum(self._exchanged_bytes) / slowest.bandwidth + 2 * slowest.latency_s if slowest is not None else 0.0

    def _num_weights(self, work: UnitWork) -> float:
        """Elements of a block's matrices."""
        return sum(product.num_weights for product in hidden_matrices(self.shape, work))

    def _orthogonalization_s(self, product: Product) -> float:
        """Seconds of Newton-Schulz on one of a weight's matrices."""
        short, long = sorted((product.inner, product.columns / product.parts))
        sizes = ((short, long, short), (short, short, short), (short, short, long))
        return NS_STEPS * sum(self._product_s(*size) for size in sizes)

    def _product_s(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of a product for the optimizer."""
        return product_seconds(Product(rows, inner, columns), self.cluster.device, self.software, "bf16")[0]

    @property
    def _last_update_s(self) -> float:
        """The optimizer's step after the last backward."""
        if self.workload.in_backward:
            return 0.0
        return sum(work.count * self.optimizer_s(work) for work in self.works) / self.plan.pp + self._matrices_s

    def _recomputes(self, blocks: Sequence[UnitWork]) -> list[str]:
        """The recomputation of each block."""
        wanted = self.workload.recompute
        if wanted == "none" and self.plan.activation_checkpointing in {"full", "selective"}:
            wanted = str(self.plan.activation_checkpointing)
        if isinstance(wanted, str):
            return [wanted] * len(blocks)
        return ["full" if place < wanted else "none" for place in range(len(blocks))]

    # -- the step

    @property
    def _slowdown(self) -> Slowdown:
        return Slowdown(self.software.slowdown, self.software.slowdown, divides_link=_ON_LINK)

    def _root(self) -> StepUnit:
        first, last = self.step_unit(self.works[0]), self.step_unit(self.works[-1])
        return StepUnit(
            "root",
            forward_s=first.forward_s,
            forward_end_s=last.forward_s,
            backward_s=last.backward_s,
            backward_end_s=first.backward_s,
            forward_end_exchanges=last.forward_exchanges,
            backward_exchanges=last.backward_exchanges,
            gather=first.gather + last.gather,
            reduce=first.reduce + last.reduce,
            replicate=first.replicate + last.replicate,
            forward_exchanges=first.forward_exchanges,
            up_s=first.up_s + last.up_s,
            down_s=first.down_s + last.down_s,
            update_s=first.update_s + last.update_s,
            updates_on_host=first.updates_on_host,
            host_forward_s=first.host_forward_s,
            host_backward_s=last.host_backward_s,
            is_trained=first.is_trained or last.is_trained,
        )

    def _data_parallel(self) -> dict[str, float]:
        blocks = [work for work in self.works[1:-1] for _ in range(work.count)]
        recomputes = self._recomputes(blocks)
        made: dict[tuple[int, str], StepUnit] = {}
        units = []
        for work, again in zip(blocks, recomputes, strict=True):
            key = id(work), again
            if key not in made:
                made[key] = self.step_unit(work, recomputes=again)
            units.append(made[key])
        root = self._root()
        if len(made) == 1 and len(units) > _SIMULATED + 2:
            short, longer = (self._simulated([root, *units[:n]]).by_category for n in (_SIMULATED, _SIMULATED + 2))
            more = (len(units) - _SIMULATED) / 2
            found = {
                name: max(short.get(name, 0.0) + more * (longer.get(name, 0.0) - short.get(name, 0.0)), 0.0)
                for name in short | longer
            }
        else:
            found = dict(self._simulated([root, *units]).by_category)
        return self._with_waits(found)

    def _simulated(self, units: Sequence[StepUnit]) -> SimulatedStep:
        return simulate_step(
            units,
            self.plan.placements,
            reshards_after_forward=False if self.plan.reshard_after_forward is False else None,
            num_microbatches=self.num_microbatches,
            accumulation=accumulation_of(self.plan),
            prefetch=self.plan.prefetch,
            num_gradient_buffers=self.plan.gradient_buffers,
            slowdown=self._slowdown,
        )

    def step(self) -> SimulatedStep:
        """The step of a plan without ``pp``, with every block simulated, for a drawing."""
        blocks = [work for work in self.works[1:-1] for _ in range(work.count)]
        chain = zip(blocks, self._recomputes(blocks), strict=True)
        units = [self.step_unit(work, recomputes=again) for work, again in chain]
        return dataclasses.replace(self._simulated([self._root(), *units]), optimizer_s=self._last_update_s)

    def _with_waits(self, found: dict[str, float]) -> dict[str, float]:
        """Add the optimizer's step, and reductions and gathers if they follow the backward."""
        parts = [*found.items(), ("optimizer", self._last_update_s)]
        for work in self.works if self.is_waited_for else ():
            gather, reduce, replicate = self._transfers(work)
            for name, transfers in (("gather", gather), ("reduce", reduce + replicate)):
                parts.append((name, work.count * sum(each.seconds for each in transfers) / self.plan.pp))
        return add_up(parts)

    # -- pipelines

    def _pipeline(self) -> dict[str, float]:
        step, count = self._simulated_pipeline(2 * self.plan.pp), self.num_microbatches
        found = dict(step.by_category)
        more = count - step.schedule.num_microbatches
        if more:
            fullest = [step.stages[stage] for stage in step.schedule.stages(step.fullest_rank)]
            whole = sum(each.forward_s + each.backward_input_s + each.backward_weight_s for each in fullest)
            waits = [(name, more * spent) for each in fullest for name, spent in each.exposed.items()]
            computed = more * whole - sum(spent for _, spent in waits)
            found = add_up([*found.items(), *waits, ("compute", computed)])
        # The simulation lets messages overlap each other; on a real link each waits for the previous one.
        ranks = map(step.schedule.stages, range(self.plan.pp))
        wire = max(sum(step.stages[stage].message_s for stage in stages) for stages in ranks)
        found["pp bubble"] += max(count * wire - sum(found.values()), 0.0)
        return self._with_waits(found)

    def pipeline(self, most_microbatches: int) -> SimulatedPipeline:
        """The step of a plan with ``pp`` and no more than ``most_microbatches``, for a drawing."""
        return dataclasses.replace(self._simulated_pipeline(most_microbatches), optimizer_s=self._last_update_s)

    def _simulated_pipeline(self, most_microbatches: int) -> SimulatedPipeline:
        """The simulated step without the optimizer's step."""
        policy, pp, count = self.plan.pipeline_policy, self.plan.pp, self.num_microbatches
        assert policy is not None
        if count > most_microbatches:
            count = max(pp, most_microbatches // pp * pp)
        stages = self._stages(self._split(pp * policy.virtual_stages))
        return simulate_pipeline(policy.schedule, pp, count, stages, num_virtual_stages=policy.virtual_stages)

    def _split(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        blocks = self.works[1:-1]
        counts = tuple(work.count for work in blocks)
        if self.software.divides_evenly and len(counts) == 1:
            each, more = divmod(counts[0], num_stages)
            first = num_stages // 2 - more // 2  # the middle stages have one block more
            return tuple((each + (first <= place < first + more),) for place in range(num_stages))
        chain = Chain(
            counts=counts,
            costs=tuple(work.num_parameters for work in blocks),
            head_cost=self.shape.vocab * self.shape.hidden // self.plan.tp,
        )
        return stage_blocks(chain, num_stages)

    def _stages(self, split: Sequence[tuple[int, ...]]) -> list[StageSeconds]:
        """Seconds of each stage; equal stages are simulated once."""
        last = len(split) - 1
        made: dict[tuple[tuple[int, ...], bool, bool], StageSeconds] = {}
        found = []
        messages = self._messages(len(split))
        for place, blocks in enumerate(split):
            key = (blocks, place == 0, place == last)
            if key not in made:
                made[key] = self._stage(blocks, is_first=place == 0, is_last=place == last)
            before, after = messages[place - 1] if place else 0.0, messages[place]
            found.append(self._with_messages(made[key], before, after))
        return found

    def _with_messages(self, stage: StageSeconds, before: float, after: float) -> StageSeconds:
        """Add the times of messages from the previous stage and to the next stage."""
        if not self.software.p2p_blocks:
            return dataclasses.replace(stage, message_s=after)
        # A stage sends to one neighbour and receives from the other at the same time, in forward and in backward.
        waited = max(before, after)
        return dataclasses.replace(
            stage, forward_s=stage.forward_s + waited, backward_input_s=stage.backward_input_s + waited
        )

    def _stage(self, blocks: tuple[int, ...], *, is_first: bool, is_last: bool) -> StageSeconds:
        works = [work for count, work in zip(blocks, self.works[1:-1], strict=True) for _ in range(count)]
        units = [
            self.step_unit(work, recomputes=again)
            for work, again in zip(works, self._stage_recomputes(works), strict=True)
        ]
        if is_first:
            units.insert(0, self.step_unit(self.works[0]))
        if is_last:
            units.append(self.step_unit(self.works[-1]))
        releases = self.plan.reshard_after_forward is True
        return stage_seconds(units, self.plan.placements, releases=releases, slowdown=self._slowdown)

    def _stage_recomputes(self, works: Sequence[UnitWork]) -> list[str]:
        wanted = self._recomputes([*works])
        if isinstance(self.workload.recompute, int):  # a number of the model's blocks: each stage has a share
            share = round(self.workload.recompute * len(works) / max(self.shape.num_layers, 1))
            return ["full" if place < share else "none" for place in range(len(works))]
        return wanted

    def _messages(self, num_stages: int) -> list[float]:
        """Seconds of the message from each stage to the next; 0 for the last."""
        policy, pp = self.plan.pipeline_policy, self.plan.pp
        assert policy is not None
        assert num_stages == pp * policy.virtual_stages
        tokens = self.workload.micro_batch * self.workload.seq_len / self.plan.cp
        sent = item_bytes(self.workload) * tokens * self.shape.hidden
        if self.plan.sequence_parallel or self.software.scatters_messages:
            sent /= self.plan.tp
        ranks = folded_ranks(pp) if policy.schedule == "zb-v" else looped_ranks(pp, policy.virtual_stages)
        made = {pair: message_seconds(sent, pair, pp, self.cluster, self.software) for pair in pairwise(ranks)}
        return [*(made[pair] for pair in pairwise(ranks)), 0.0]

    # -- bytes

    def _sent_bytes(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by axis (planner.md, *Traffic*)."""
        placements, m, item = self.plan.placements, self.num_microbatches, item_bytes(self.workload)
        shard, replicate = self.links["dp_shard"].kind_size, self.links["dp_replicate"].kind_size
        numel = sum(work.count * work.num_parameters for work in self.works) / self.plan.pp
        trained = sum(work.count * work.num_trained for work in self.works) / self.plan.pp
        grad = self._gradient_bytes
        part = (shard - 1) / shard
        gathers = 0.0
        if placements.shards_parameters:
            gathers = item * numel * self._times_gathered(part)
        elif placements.shards_optimizer:
            gathers = item * numel * part
        reductions = 1 if accumulation_of(self.plan) == "unsharded" else m
        reduces = grad * trained * part * reductions * (1 if placements.shards_optimizer else 2)
        sent = {"dp_shard": gathers + reduces}
        if replicate > 1:
            own = trained / shard if placements.shards_optimizer else trained
            sums = m if accumulation_of(self.plan) == "sharded" else 1
            sent["dp_replicate"] = 2 * grad * own * (replicate - 1) / replicate * sums
        if sum(self._exchanged_bytes):
            sent["world"] = sum(self._exchanged_bytes)
        for work in self.works:
            for each in work.exchanges:
                size = self.links[each.axis].kind_size
                turns = {"all_reduce": 2 * (size - 1) / size, "ring": size - 1.0}.get(each.kind, (size - 1) / size)
                moved = turns * (each.num_bytes + each.backward_bytes) * work.count / self.plan.pp * m
                sent[each.axis] = sent.get(each.axis, 0.0) + moved
        policy = self.plan.pipeline_policy
        if policy is not None and self.plan.pp > 1:
            tokens = self.workload.micro_batch * self.workload.seq_len / self.plan.cp
            split = self.plan.tp if self.plan.sequence_parallel else 1
            sent["pp"] = 2 * m * policy.virtual_stages * item * tokens * self.shape.hidden / split
        return sent

    def _times_gathered(self, part: float) -> float:
        """The number of gathers of all parameters in a step, times ``part``, the share that ranks send in each."""
        m, reshards = self.num_microbatches, self.plan.reshard_after_forward
        if self.plan.pp > 1 and reshards is not True:
            return part  # gathered units stay gathered for the step
        if reshards is False or (reshards == "auto" and self.plan.placements.keeps_gathered):
            return m * part
        inner = self.plan.inner_size
        return m * (2 * part if inner is None else part + (inner - 1) / inner)
