"""Seconds of a step on a machine that ``shardwise calibrate`` has measured.

Every part of a unit is looked up in the measured tables: linear layers by their three sizes, attention, norms and
element-wise work by their elements, the optimizer's step, collectives by their bytes. The engine's own copies are those
of gradients into flat buffers, and of slices into gathered buffers. ``sim`` puts them in order.

On a CPU a rank computes and sends with the same core. ``Measured.shared`` says how far: while n of a rank's streams are
busy each takes ``1 + shared (n - 1)`` times as long. What a collective costs includes the sums that the rank makes at
its wait, as the measured collectives did. On a GPU what was measured begins with the kernel, so that the host's time to
launch it comes from ``cost.software``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.cost.hardware import Cluster
from shardwise.cost.kernels import launch_seconds
from shardwise.cost.measured import Measured
from shardwise.cost.part import Part
from shardwise.cost.software import PYTORCH
from shardwise.cost.work import Exchange, UnitWork, hidden_matrices, item_bytes, model_work
from shardwise.cost.workload import Workload
from shardwise.planner.memory import num_microbatches
from shardwise.planner.stage import Chain, stage_blocks
from shardwise.sim.pipeline import SimulatedPipeline, simulate_pipeline, stage_seconds
from shardwise.sim.step import SimulatedStep, StepUnit, Transfer, simulate_step
from shardwise.sim.streams import NO_SLOWDOWN, Slowdown
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule.actions import folded_ranks, looped_ranks
from shardwise.spec.shape import ModelShape
from shardwise.spec.traffic.matrices import NS_STEPS, exchanged_bytes

#: Names of ``TimeEstimate.by_category`` for those of ``sim``.
CATEGORIES = {"gather": "exposed gather", "reduce": "exposed reduce"}
#: Parts that the measured attention and the measured linear layers, which have biases, include.
_MEASURED = {"attention", "gradients", "biases"}
#: The measured operation that a part is; others are additions.
_OPERATIONS = {"norm": "norm", "loss": "loss"} | dict.fromkeys(("gelu", "gelu_new", "silu", "relu"), "activation")
#: What an exchange inside a unit is in the table of links; an exchange of tokens sends as an all-gather does.
_LINKS = {"all_reduce": "all_reduce_out", "ring": "message", "all_to_all": "all_gather"}


def calibrated_seconds(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload
) -> tuple[float, dict[str, float]]:
    """Seconds of a step of a resolved plan, and the same by category.

    Raises:
        ConfigError: The file has no times of this dtype, or of a collective that the plan needs.
    """
    step = calibrated_step(shape, plan, cluster, workload)
    return step.seconds, _named(step.by_category)


def calibrated_step(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload
) -> SimulatedStep | SimulatedPipeline:
    """The simulated step of :func:`calibrated_seconds`."""
    measured = cluster.device.measured
    assert measured is not None
    costs = _Costs(shape, measured, plan, workload, is_launched=cluster.device.device_type != "cpu")
    units = model_work(shape, plan, workload)
    slowdown = Slowdown(shared=measured.shared) if measured.shared else NO_SLOWDOWN
    m = num_microbatches(plan, workload)
    if plan.pp == 1:
        embedding, *blocks, head = units
        chain = [costs.root(embedding, head), *(costs.unit(unit) for unit in _each(blocks))]
        return simulate_step(
            chain,
            plan.placements,
            reshards_after_forward=plan.reshard_after_forward if isinstance(plan.reshard_after_forward, bool) else None,
            num_microbatches=m,
            accumulation=costs.accumulation,
            num_gradient_buffers=plan.gradient_buffers,
            optimizer_s=costs.update_s(units),
            slowdown=slowdown,
        )
    policy = plan.pipeline_policy
    assert policy is not None
    stages = _stages(shape, plan, units, plan.pp * policy.virtual_stages)
    ranks = folded_ranks(plan.pp) if policy.schedule == "zb-v" else looped_ranks(plan.pp, policy.virtual_stages)
    tokens = workload.micro_batch * workload.seq_len / plan.cp
    message_s = measured.link_s("message", 2, item_bytes(workload) * tokens * shape.hidden)
    return simulate_pipeline(
        policy.schedule,
        plan.pp,
        m,
        [
            stage_seconds(
                [costs.unit(unit) for unit in _each(stage)],
                plan.placements,
                message_s=message_s,
                releases=plan.reshard_after_forward is True,
                slowdown=slowdown,
            )
            for stage in stages
        ],
        num_virtual_stages=policy.virtual_stages,
        optimizer_s=max(
            costs.update_s([unit for stage, at in zip(stages, ranks, strict=True) if at == rank for unit in stage])
            for rank in range(plan.pp)
        ),
    )


def _named(found: Mapping[str, float]) -> dict[str, float]:
    return {CATEGORIES.get(category, category): seconds for category, seconds in found.items()}


def _each(units: Sequence[UnitWork]) -> Iterator[UnitWork]:
    """Every unit by itself."""
    for unit in units:
        for _ in range(unit.count):
            yield unit


def _stages(shape: ModelShape, plan: ParallelPlan, units: Sequence[UnitWork], num_stages: int) -> list[list[UnitWork]]:
    embedding, *blocks, head = units
    chain = Chain(
        counts=tuple(unit.count for unit in blocks),
        costs=tuple(unit.num_parameters for unit in blocks),
        head_cost=shape.vocab * shape.hidden // plan.tp,
    )
    stages = [
        [replace(unit, count=count) for unit, count in zip(blocks, counts, strict=True)]
        for counts in stage_blocks(chain, num_stages)
    ]
    stages[0].insert(0, embedding)
    stages[-1].append(head)
    return stages


@dataclass(frozen=True)
class _Costs:
    """Seconds of units on one rank."""

    shape: ModelShape
    measured: Measured
    plan: ParallelPlan
    workload: Workload
    is_launched: bool

    @property
    def accumulation(self) -> str:
        if self.plan.accumulation != "auto":
            return self.plan.accumulation
        return "sharded" if self.plan.placements.pools_gradients else "unsharded"

    @property
    def shard(self) -> int:
        return self.plan.dp_shard * self.plan.cp

    @property
    def dtype(self) -> str:
        return self.workload.precision

    @property
    def item(self) -> int:
        return item_bytes(self.workload)

    def unit(self, unit: UnitWork) -> StepUnit:
        """One unit."""
        forward_s, backward_s = self._computation(unit)
        return replace(
            self._moves(unit.name, (unit,)),
            forward_s=forward_s,
            backward_s=backward_s,
            host_forward_s=self._launch_s(unit),
            host_backward_s=self._launch_s(unit) * (2 + (self.workload.recompute == "full")),
        )

    def _launch_s(self, unit: UnitWork) -> float:
        return launch_seconds(unit, PYTORCH, self.workload) if self.is_launched else 0.0

    def root(self, embedding: UnitWork, head: UnitWork) -> StepUnit:
        """The root: the embedding before all blocks, the last norm and the head after them."""
        first, last = self._computation(embedding), self._computation(head)
        return replace(
            self._moves("root", (embedding, head)),
            forward_s=first[0],
            forward_end_s=last[0],
            backward_s=last[1],
            backward_end_s=first[1],
            host_forward_s=self._launch_s(embedding),
            host_backward_s=2 * self._launch_s(head),
        )

    def update_s(self, units: Sequence[UnitWork]) -> float:
        """The optimizer's step on this rank's part, parameter by parameter: the weights of products, and the rest."""
        share = self.shard if self.plan.placements.shards_optimizer else 1
        optimizer = self.workload.optimizer if self.workload.optimizer in self.measured.optimizers else "adamw"
        total = 0.0
        for unit in units:
            weights = [(p.inner * p.columns, p.count) for p in unit.products if p.is_trained]
            rest = max(unit.num_trained - sum(numel * count for numel, count in weights), 0.0)
            for numel, count in [*weights, (rest, 1)]:
                if numel:
                    total += unit.count * count * self.measured.update_s(optimizer, numel / share)
        return total + (self._matrices_s(units) if self.workload.optimizer == "muon" else 0.0)

    def _matrices_s(self, units: Sequence[UnitWork]) -> float:
        """The share of one rank in orthogonalizing the blocks' matrices, and the exchange of them before and after."""
        plan, dtypes = self.plan, {row.dtype for row in self.measured.products}
        dtype = "bf16" if "bf16" in dtypes else self.dtype
        is_cut = plan.placements.shards_optimizer
        parts, copies = plan.tp * (self.shard if is_cut else 1), plan.dp_replicate * (1 if is_cut else self.shard)
        blocks = [unit for unit in units if unit.name not in {"embedding", "head"}]
        found = [(unit.count, each) for unit in blocks for each in hidden_matrices(self.shape, unit)]
        held = sum(count * each.num_weights for count, each in found) / (self.shard if is_cut else 1)
        ranks, total, longest = parts * copies, 0.0, 0.0
        for count, each in found:
            short, long = sorted((each.inner, each.columns / each.parts))
            sizes = ((short, long, short), (short, short, short), (short, short, long))
            spent = NS_STEPS * sum(self.measured.product_s(*size, dtype)[0] for size in sizes)
            total, longest = total + count * each.count * each.parts * spent, max(longest, spent)
        whole = [num_bytes * ranks / max(ranks - 1, 1) for num_bytes in exchanged_bytes(held, parts, copies)]
        sent = sum(self.measured.link_s("all_gather", ranks, num_bytes) for num_bytes in whole)
        return sent + max(total * plan.tp / ranks, longest)

    def _computation(self, unit: UnitWork) -> tuple[float, float]:
        forward = backward = 0.0
        products = 0.0
        for product in unit.products:
            there, back = self.measured.product_s(product.rows, product.inner, product.columns, self.dtype)
            products += there * product.count
            backward += back * product.count * (1.0 if product.is_trained else 0.5)
        attended = 0.0
        for work in unit.attention:
            there, back = self.measured.attention_s(work.queries, work.keys, work.heads, work.width, self.dtype)
            attended, backward = attended + there, backward + back
        for part in unit.parts:
            there, back = self._part(part)
            forward, backward = forward + there, backward + back
        recomputed = {"none": 0.0, "selective": forward, "full": forward + products + attended}
        if unit.name.startswith("block"):
            kind = self.workload.recompute
            share = 1.0
            if not isinstance(kind, str):
                share, kind = min(kind / unit.count, 1.0), "full"
            backward += share * recomputed[kind]
        backward += self.measured.operation_s("copy", unit.num_trained, self._copied)[0]
        return forward + products + attended, backward

    @property
    def _copied(self) -> str:
        return "fp32" if any(row.dtype == "fp32" for row in self.measured.operations.get("copy", ())) else self.dtype

    def _part(self, part: Part) -> tuple[float, float]:
        """An element-wise part: by the operation that it is, over as many elements as its bytes are passes."""
        e = self.item
        if part.name in _MEASURED:
            return 0.0, 0.0
        if part.name == "gated":
            there, back = self.measured.operation_s("activation", part.forward_bytes / (5 * e), self.dtype)
            product, _ = self.measured.operation_s("add", part.forward_bytes / (5 * e), self.dtype)
            return there + product, back + 2 * product
        kind = _OPERATIONS.get(part.name)
        if kind is not None:
            elements = part.saved_bytes / 4 if kind == "loss" else part.forward_bytes / (2 * e)
            return self.measured.operation_s(kind, elements, self.dtype)
        is_copied = part.name == "lookup"
        moved, passes, dtype = ("copy", 2, self._copied) if is_copied else ("add", 3, self.dtype)

        def seconds(num_bytes: float) -> float:
            return self.measured.operation_s(moved, num_bytes / (passes * e), dtype)[0] if num_bytes else 0.0

        return seconds(part.forward_bytes), seconds(part.backward_bytes)

    # -- what is sent

    def _moves(self, name: str, units: Sequence[UnitWork]) -> StepUnit:
        row, n = self.plan.placements, self.shard
        dense = sum(unit.num_parameters - unit.num_expert_parameters for unit in units)
        experts = sum(unit.num_expert_parameters for unit in units)
        trained = sum(min(unit.num_trained, unit.num_parameters - unit.num_expert_parameters) for unit in units)
        parts = [(dense, trained, n)] + ([(experts, experts, n // self.plan.ep)] if experts else [])
        gather: tuple[Transfer, ...] = ()
        reduce: tuple[Transfer, ...] = ()
        replicate: tuple[Transfer, ...] = ()
        for held, summed, size in parts:
            if row.shards_optimizer:
                copied_s = self.measured.operation_s("copy", held / size, self._copied)[0] * row.shards_parameters
                gather += (Transfer(copied_s + self.measured.link_s("all_gather", size, self.item * held)),)
            kind = "reduce_scatter" if row.shards_optimizer else "all_reduce"
            reduce += (Transfer(self.measured.link_s(kind, size, 4 * summed)),)
            if self.plan.dp_replicate > 1:
                slice_bytes = 4 * summed / (size if row.shards_optimizer else 1)
                replicate += (Transfer(self.measured.link_s("all_reduce", self.plan.dp_replicate, slice_bytes)),)
        there = [exchange for unit in units for exchange in unit.exchanges]
        return StepUnit(
            name,
            0.0,
            0.0,
            gather=gather,
            reduce=reduce,
            replicate=replicate,
            forward_exchanges=tuple(self._exchange(e, e.num_bytes) for e in there if e.num_bytes),
            backward_exchanges=tuple(self._exchange(e, e.backward_bytes) for e in there if e.backward_bytes),
            is_trained=trained + experts > 0,
        )

    def _exchange(self, exchange: Exchange, num_bytes: float) -> Transfer:
        size = {"tp": self.plan.tp, "cp": self.plan.cp, "ep": self.plan.ep}[exchange.axis]
        if exchange.kind == "ring":  # a rank sends its keys and values n - 1 times, beside the computation
            seconds = (size - 1) * self.measured.link_s("message", 2, num_bytes)
            return Transfer(seconds, stream=exchange.axis, is_beside=True)
        seconds = self.measured.link_s(_LINKS.get(exchange.kind, exchange.kind), size, num_bytes)
        return Transfer(seconds, stream=exchange.axis)
