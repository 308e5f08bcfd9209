"""Bytes that the fullest rank holds, by category, over the timeline of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.cost.hardware import Cluster
from shardwise.cost.work import UnitWork, model_work
from shardwise.cost.workload import Workload
from shardwise.planner.activations import HeadSaved, Saved, block_saved, head_saved
from shardwise.planner.device import BESIDE
from shardwise.planner.stage import Chain, Stage, stages
from shardwise.planner.states import Parameters, Rules, States, Unit, states
from shardwise.spec.facts import keeps_buffers
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape

#: What bytes are counted as, in the order in which they are shown.
CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "reduce", "activations", "logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the fullest rank at the peak of a step.

    Attributes:
        allocated_bytes: Tensors.
        reserved_bytes: What torch's allocator holds: tensors, workspaces, rounding and fragments.
        device_bytes: What the device shows as used: reserved, the context, communicators.
        by_category: Allocated bytes at the peak by what they are: ``parameters``, ``gradients``, ``optimizer``,
            ``gathered``, ``reduce``, ``activations``, ``logits``; they add up to ``allocated_bytes``.
        host_bytes: Bytes of host memory that offloading takes for this rank.
        timeline: Moments of a step in order, each with its bytes by category.
        first_step_bytes: Allocated bytes at the peak of the first step, before whose end there is no optimizer state.
        peak: The moment of the peak.
        stage: Coordinate on ``pp`` of the fullest rank.
        microbatches_held: Microbatches whose activations that rank holds at once.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    by_category: Mapping[str, int]
    host_bytes: int = 0
    timeline: tuple[tuple[str, Mapping[str, int]], ...] = field(default=())
    first_step_bytes: int = 0
    peak: str = ""
    stage: int = 0
    microbatches_held: float = 1.0


def estimate_memory(shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload) -> MemoryEstimate:
    """Bytes of the fullest rank of a resolved plan.

    Args:
        shape: The model.
        plan: The plan, with every degree filled in.
        cluster: Where it runs.
        workload: What it trains.
    """
    units = _work(shape, plan, workload)
    rules = _rules(plan, workload)
    fullest = max(
        (_on_rank(stage, shape, plan, workload, units, rules) for stage in _ranks(shape, plan, workload, units)),
        key=lambda held: held.allocated,
    )
    return fullest.estimate(cluster, plan)


def _work(shape: ModelShape, plan: ParallelPlan, workload: Workload) -> tuple[UnitWork, ...]:
    return model_work(shape, plan, workload)


def _rules(plan: ParallelPlan, workload: Workload) -> Rules:
    compute = "fp32" if workload.precision == "fp32" else "fp16" if workload.precision == "fp16" else "bf16"
    policy = plan.precision if plan.mp_policy is not None else None
    reduce_dtype = "fp32" if policy is None or policy.reduce_dtype is None else policy.reduce_dtype
    stays = plan.pp > 1 and plan.reshard_after_forward == "auto"
    default = not plan.placements.keeps_gathered
    reshard = False if stays else plan.reshard_after_forward
    return Rules(
        row=plan.placements,
        shard_size=plan.dp_shard * plan.cp,
        num_replicas=plan.dp_replicate,
        is_replicated=plan.is_replicated,
        ep=plan.ep,
        frozen_dtype=compute,
        compute_dtype=compute,
        reduce_dtype=reduce_dtype,
        reshards=default if isinstance(reshard, str) else bool(reshard),
        inner_size=plan.inner_size or 0,
        in_backward=workload.in_backward,
        offload=plan.offload,
        optimizer_tensors={"sgd": 0}.get(workload.optimizer, 2),
        num_gradient_buffers=plan.gradient_buffers,
        accumulation=_accumulation(plan, workload),
        merge_limit=plan.merge_limit,
    )


def num_microbatches(plan: ParallelPlan, workload: Workload) -> int:
    """Microbatches of a step on each data-parallel rank."""
    return max(1, workload.global_batch // (workload.micro_batch * plan.dp_replicate * plan.dp_shard))


def _accumulation(plan: ParallelPlan, workload: Workload) -> str | None:
    if num_microbatches(plan, workload) == 1 and plan.pp == 1:
        return None
    if plan.accumulation != "auto":
        return plan.accumulation
    return "sharded" if plan.placements.pools_gradients and plan.pp == 1 else "unsharded"


def _ranks(shape: ModelShape, plan: ParallelPlan, workload: Workload, units: tuple[UnitWork, ...]) -> tuple[Stage, ...]:
    """The pipeline ranks of which one holds most: the first, the second, and the last."""
    blocks = units[1:-1]
    chain = Chain(
        counts=tuple(unit.count for unit in blocks),
        costs=tuple(unit.num_parameters for unit in blocks),
        head_cost=shape.vocab * shape.hidden // plan.tp,
    )
    every = stages(chain, plan.pp, plan.pipeline_policy, num_microbatches(plan, workload))
    return every if len(every) < 4 else (every[0], every[1], every[-1])


@dataclass(frozen=True, slots=True)
class _Part:
    """Equal units of a rank that come one after another, with what one microbatch leaves in each."""

    unit: Unit
    count: int
    saved: Saved
    recompute: str


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank holds."""

    stage: Stage
    states: States
    moments: tuple[tuple[str, dict[str, float]], ...]

    @property
    def allocated(self) -> float:
        return max(sum(held.values()) for _, held in self.moments)

    def estimate(self, cluster: Cluster, plan: ParallelPlan) -> MemoryEstimate:
        del cluster
        peak, held = max(self.moments, key=lambda moment: sum(moment[1].values()))
        by_category = {name: int(held.get(name, 0)) for name in CATEGORIES}
        allocated = sum(by_category.values())
        first = max(
            sum(held.values()) - (held["optimizer"] if name != "optimizer" else 0) for name, held in self.moments
        )
        reserved = int((1 + BESIDE.fragments) * allocated) + BESIDE.workspace
        axes = sum(size > 1 for size in (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp, plan.ep)) + 1
        return MemoryEstimate(
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            device_bytes=reserved + BESIDE.context + axes * BESIDE.communicator,
            by_category=by_category,
            host_bytes=self.states.footprint.host,
            timeline=tuple((name, {key: int(value) for key, value in held.items()}) for name, held in self.moments),
            first_step_bytes=int(first),
            peak=peak,
            stage=self.stage.rank,
            microbatches_held=self.stage.held,
        )


def _parameters(unit: UnitWork, workload: Workload) -> Parameters:
    if workload.lora_rank is None:
        experts = unit.num_expert_parameters
        return Parameters(unit.num_parameters - experts, experts)
    return Parameters(unit.num_trained, frozen=unit.num_parameters - unit.num_trained)


def _on_rank(  # noqa: PLR0917 - all that is asked
    stage: Stage, shape: ModelShape, plan: ParallelPlan, workload: Workload, units: tuple[UnitWork, ...], rules: Rules
) -> _Held:
    embedding, *blocks, head = units
    root = _parameters(embedding, workload) if stage.has_embedding else Parameters(0)
    if stage.has_head:
        end = _parameters(head, workload)
        again = shape.vocab * shape.hidden // plan.tp if shape.is_tied and not stage.has_embedding else 0
        root = Parameters(root.trained + end.trained + again, 0, root.frozen + end.frozen)
    runs = tuple(
        (count, _parameters(unit, workload)) for unit, count in zip(blocks, stage.blocks, strict=True) if count
    )
    found = states(root, runs, rules)
    parts = list(_parts(stage, found, blocks, workload, plan.pp))
    ending = head_saved(head, workload) if stage.has_head else None
    kept = keeps_buffers(rules.device_type, wanted=plan.keep_buffers)
    return _Held(stage, found, tuple(_moments(stage, found, parts, ending, keeps=kept, rules=rules)))


def _parts(stage: Stage, found: States, blocks: list[UnitWork], workload: Workload, pp: int) -> Iterator[_Part]:
    """The rank's units, those that are recomputed apart from those that are not."""
    held = [(unit, count) for unit, count in zip(blocks, stage.blocks, strict=True) if count]
    recomputed = workload.recompute if isinstance(workload.recompute, int) else None
    left = None if recomputed is None else -(-recomputed // pp)
    units = iter(found.units)
    for work, count in held:
        done = 0
        while done < count:
            unit = next(units)
            blocks_here = unit.count * unit.blocks
            done += blocks_here
            if left is None:
                recompute = str(workload.recompute)
                yield _Part(unit, unit.count, _times(block_saved(work, workload, recompute), unit.blocks), recompute)
                continue
            full = min(left, blocks_here) // unit.blocks
            left -= full * unit.blocks
            for number, recompute in ((full, "full"), (unit.count - full, "none")):
                if number:
                    yield _Part(unit, number, _times(block_saved(work, workload, recompute), unit.blocks), recompute)


def _times(saved: Saved, blocks: int) -> Saved:
    """Of a merged unit; one block of it computes at a time."""
    return Saved(saved.kept * blocks, saved.whole + (blocks - 1) * saved.kept, saved.passing)


def _moments(
    stage: Stage, found: States, parts: list[_Part], head: HeadSaved | None, *, keeps: bool, rules: Rules
) -> Iterator[tuple[str, dict[str, float]]]:
    """What is held at the moments of a step of which one is its peak."""
    held, root = found.footprint, found.root
    saved = sum(part.count * part.saved.kept for part in parts) + (head.kept if head else 0)
    others = (stage.held - 1) * saved if stage.held > 1 else 0.0
    shards = rules.reshards
    fixed = {"parameters": float(held.parameters), "optimizer": float(held.optimizer)}
    accumulates = rules.accumulation is not None

    def moment(
        *, gathered: float, gradients: float, reduce: float, activations: float, logits: float = 0.0
    ) -> dict[str, float]:
        if keeps:
            gathered, reduce = held.gathered, held.reduce
            gradients = held.gradients + max(gradients - held.gradients, 0.0)
        return {
            **fixed,
            "gradients": gradients,
            "gathered": min(gathered, held.gathered) if not keeps else gathered,
            "reduce": reduce,
            "activations": activations + others,
            "logits": logits,
        }

    every = sum(part.count * part.unit.gathered for part in parts)
    kept_all = root.kept + sum(part.count * part.unit.kept for part in parts)
    buffers = root.buffer + sum(part.count * part.unit.buffer for part in parts)
    # Sums of earlier microbatches are there from the beginning of the last one on.
    early = kept_all if accumulates else 0.0
    pooled = buffers if rules.accumulation == "unsharded" else 0.0
    last = parts[-1].unit if parts else root
    live = root.gathered + (last.gathered if shards else every)
    yield (
        "forward",
        moment(
            gathered=live, gradients=early, reduce=pooled, activations=saved + (parts[-1].saved.passing if parts else 0)
        ),
    )
    waiting = 0.0
    if head is not None:
        yield (
            "loss",
            moment(
                gathered=live,
                gradients=early,
                reduce=pooled,
                activations=saved,
                logits=max(head.forward, head.backward),
            ),
        )
        waiting = root.gradients / (2 if stage.has_embedding else 1)
    done, ahead = early, 0.0
    below = saved - (head.kept if head else 0)
    for place in range(len(parts) - 1, -1, -1):
        part = parts[place]
        for index in sorted({part.count - 1, 0}, reverse=True):
            number = part.count - index  # units of this part whose backward has begun
            rest = below - (number - 1) * part.saved.kept
            before = done + (0.0 if accumulates else (number - 1) * part.unit.kept)
            is_first = place == len(parts) - 1 and index == part.count - 1
            under_way = 0.0 if is_first else part.unit.buffer
            next_unit = part.unit if index else (parts[place - 1].unit if place else None)
            prefetched = next_unit.gathered if next_unit is not None and shards else 0.0
            working = rest - part.saved.kept + part.saved.whole + part.saved.passing
            here = part.unit.gathered if shards else every
            name = f"backward of block {index}"
            yield (
                name,
                moment(
                    gathered=root.gathered + here + prefetched,
                    gradients=before + waiting,
                    reduce=pooled or under_way,
                    activations=working,
                ),
            )
            yield (
                f"{name}, collected",
                moment(
                    gathered=root.gathered + (prefetched if shards else every),
                    gradients=before + waiting + part.unit.gradients + (0.0 if accumulates else part.unit.kept),
                    reduce=pooled or under_way + part.unit.buffer,
                    activations=rest - part.saved.kept + 0.1 * part.saved.passing,
                ),
            )
        below -= part.count * part.saved.kept
        done += 0.0 if accumulates else part.count * part.unit.kept
        ahead = part.unit.buffer
    yield (
        "backward of the root",
        moment(
            gathered=root.gathered,
            gradients=done + root.gradients + (0.0 if accumulates else root.kept),
            reduce=pooled or root.buffer + ahead,
            activations=0.0,
        ),
    )
    yield (
        "optimizer",
        {
            **fixed,
            "gradients": float(max(kept_all, held.gradients if keeps else 0)),
            "gathered": 0.0,
            "reduce": 0.0,
            "activations": 0.0,
            "logits": 0.0,
        },
    )
