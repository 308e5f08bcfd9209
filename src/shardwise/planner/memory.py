"""Memory of the fullest rank, by category, over the timeline of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardwise.cost.hardware import Cluster
from shardwise.cost.work import UnitWork, hidden_matrices, item_bytes, model_work
from shardwise.cost.workload import Workload
from shardwise.planner.activations import Around, Saved, block_saved, head_saved, weight_terms
from shardwise.planner.memory_timeline import CATEGORIES, Bytes, Part, Rank
from shardwise.planner.model_states import Parameters, Rules, Runs, States, Unit, owned_matrices, states
from shardwise.planner.stage import Chain, Divide, Stage, stages
from shardwise.spec import precision
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import WrapByClass
from shardwise.spec.shape import Block, Mlp, ModelShape

_MIB = 1 << 20

#: The CUDA context with the kernels of torch, cuBLAS and NCCL. For a process with an empty torch context and loaded
#: kernels nvidia-smi shows 0.5 GiB (A100, H100), and more with NCCL's and cuBLAS's kernels; planner.md gives 0.5 to 1.6
#: GiB.
CONTEXT = 800 * _MIB

#: One NCCL communicator: 16 to 32 channels with buffers of 4 MiB in each direction (NCCL_BUFFSIZE,
#: docs.nvidia.com/deeplearning/nccl, environment variables).
COMMUNICATOR = 200 * _MIB

#: cuBLAS workspaces, inside torch's allocator: 32 MiB on Hopper and 8 MiB elsewhere for each handle and stream
#: (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG); two streams compute.
WORKSPACE = 64 * _MIB

#: Bytes that torch's allocator reserves in addition to allocated bytes, as a share of these: the median of the nanotron
#: rows of bench/data/published.csv (reserved over allocated is 1.01 to 1.07).
FRAGMENTS = 0.016


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Memory rules of another framework, by which its published measurements are predicted (``bench/accounting.py``).

    Attributes:
        states: Function that returns a stage's memory on a rank, like :func:`planner.model_states.states`, and
            additional bytes of the optimizer's step; ``None``: our engine's footprint.
        is_fused: Element-wise operations are fused, so that autograd saves the tensors that Korthikanti et al. count.
        keeps_scores: Attention is not one kernel: the scores of every pair are saved.
        regathers: With sequence parallelism inputs of products are gathered again in backward instead of saved.
        drops_products: Share of the outputs of products that selective recomputation does not save.
        logit_bytes: Bytes for each logit at the peak of the loss; ``None``: as in our engine.
        embedding_blocks: Number of blocks as which the embedding, and the head, are counted when stages of a pipeline
            are divided; ``None``: they are counted by their products.
        divide: Function that assigns blocks to the stages of a pipeline; ``None``: stages are balanced, as in our
            engine.
        fragments: Additional share of allocated bytes that the allocator reserves; ``None``: :data:`FRAGMENTS`.
        unused_logit_bytes: Bytes for each logit that the allocator reserves, but no tensor of the loss can use.
        keeps_reduced: Reduced gradients are in memory of a separate stream, which activations cannot use.
        bucket_bytes: Bytes of the buffers in which gradients are reduced.
        source: Reference for these rules.
    """

    states: Callable[[Parameters, Runs, Rules], tuple[States, float]] | None = None
    is_fused: bool = False
    keeps_scores: bool = False
    regathers: bool = False
    drops_products: float = 0.0
    logit_bytes: float | None = None
    embedding_blocks: int | None = None
    divide: Divide | None = None
    bucket_bytes: int = 0
    fragments: float | None = None
    unused_logit_bytes: int = 0
    keeps_reduced: bool = False
    source: str = ""


#: The rules of our engine.
OURS = Accounting(source="spec.memory.footprint")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the fullest rank at the peak of a step.

    Attributes:
        allocated_bytes: Bytes of tensors.
        reserved_bytes: Bytes that torch's allocator reserves: tensors, workspaces, rounding and fragments.
        device_bytes: Used memory of the device: reserved bytes, the context, communicators.
        by_category: Allocated bytes at the peak by category: ``parameters``, ``gradients``, ``optimizer``,
            ``gathered``, ``reduce``, ``activations``, ``logits``, and of a traced model with buffers ``buffers``; their
            sum is ``allocated_bytes``.
        host_bytes: Bytes of host memory that offloading needs for this rank.
        timeline: Moments of a step in order, each with its bytes by category.
        first_step_bytes: Allocated bytes at the peak of the first step. Optimizer state exists only at its end.
        peak: Name of the moment of the peak.
        stage: Coordinate on ``pp`` of the fullest rank.
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


def estimate_memory(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload, *, accounting: Accounting = OURS
) -> MemoryEstimate:
    """Memory of the fullest rank under a plan with every degree filled in, by the rules of ``accounting``."""
    return memory_on(cluster.device.device_type, shape, plan, workload, accounting=accounting)


def memory_on(
    device_type: str, shape: ModelShape, plan: ParallelPlan, workload: Workload, *, accounting: Accounting = OURS
) -> MemoryEstimate:
    """The same as :func:`estimate_memory`, from the device's type, the only relevant property of the cluster."""
    if accounting.is_fused:
        workload = replace(workload, compile=True)
    inputs = _Inputs(shape, plan, workload, accounting, _rules(plan, workload, device_type))
    units = model_work(shape, plan, workload)
    ranks = [_on_rank(stage, units, inputs) for stage in _stages(inputs, units)]
    found = [(rank, list(rank.moments())) for rank in ranks]
    rank, moments = max(found, key=lambda item: max(sum(by_category.values()) for _, by_category in item[1]))
    num_logits = units[-1].inner_bytes / item_bytes(workload) if rank.stage.has_head else 0.0
    return _estimate(rank, moments, inputs, num_logits)


class _Inputs(NamedTuple):
    shape: ModelShape
    plan: ParallelPlan
    workload: Workload
    accounting: Accounting
    rules: Rules


def _rules(plan: ParallelPlan, workload: Workload, device_type: str) -> Rules:
    compute = "fp32" if workload.precision == "fp32" else "fp16" if workload.precision == "fp16" else "bf16"
    policy = plan.precision if plan.mp_policy is not None else None
    reduce_dtype = "fp32" if policy is None or policy.reduce_dtype is None else policy.reduce_dtype
    stays = plan.pp > 1 and plan.reshard_after_forward == "auto"
    default = not plan.placements.keeps_gathered
    reshard = False if stays else plan.reshard_after_forward
    return Rules(
        placements=plan.placements,
        shard_size=plan.dp_shard * plan.cp,
        num_replicas=plan.dp_replicate,
        is_replicated=plan.is_replicated,
        ep=plan.ep,
        compute_dtype=compute,
        reduce_dtype=reduce_dtype,
        reshards=default if isinstance(reshard, str) else bool(reshard),
        inner_size=plan.inner_size or 0,
        in_backward=workload.in_backward,
        offload=plan.offload,
        quantization=plan.quantization,
        optimizer_tensors=workload.optimizer_tensors,
        prefetch=plan.prefetch,
        num_gradient_buffers=plan.gradient_buffers,
        accumulation=None if num_microbatches(plan, workload) == plan.pp == 1 else accumulation_of(plan),
        is_pipeline=plan.pp > 1,
        merge_limit=plan.merge_limit,
        device_type=device_type,
    )


def num_microbatches(plan: ParallelPlan, workload: Workload) -> int:
    """Microbatches of a step on each data-parallel rank."""
    return max(1, -(-workload.global_batch // (workload.micro_batch * plan.dp_replicate * plan.dp_shard)))


def accumulation_of(plan: ParallelPlan) -> str:
    """``ParallelPlan.accumulation``, with ``"auto"`` resolved."""
    if plan.accumulation != "auto":
        return plan.accumulation
    return "sharded" if plan.placements.pools_gradients and plan.pp == 1 else "unsharded"


def _stages(inputs: _Inputs, units: tuple[UnitWork, ...]) -> tuple[Stage, ...]:
    """The pipeline ranks that may be the fullest."""
    shape, plan, workload, accounting, _ = inputs
    blocks = units[1:-1]
    costs = tuple(unit.num_parameters for unit in blocks)
    head_cost = shape.vocab * shape.hidden // plan.tp
    embedding_cost = 0
    if accounting.embedding_blocks is not None:
        head_cost = embedding_cost = accounting.embedding_blocks * max(costs)
    chain = Chain(tuple(unit.count for unit in blocks), costs, head_cost, embedding_cost)
    return stages(chain, plan.pp, plan.pipeline_policy, num_microbatches(plan, workload), accounting.divide)


def _parameters(unit: UnitWork, workload: Workload, *, block_of: ModelShape | None = None) -> Parameters:
    matrices = expert_matrices = 0
    if block_of is not None and workload.optimizer == "muon":
        trained = hidden_matrices(block_of, unit)
        expert_matrices = int(sum(product.num_weights for product in trained if product.is_batched))
        matrices = int(sum(product.num_weights for product in trained if not product.is_batched))
    if workload.lora_rank is None:
        experts = unit.num_expert_parameters
        dense = unit.num_parameters - experts
        return Parameters(dense, experts, matrices=min(matrices, dense), expert_matrices=min(expert_matrices, experts))
    frozen = unit.num_parameters - unit.num_trained
    experts = unit.num_expert_parameters
    packed = 0 if unit.name == "embedding" else frozen - experts  # stacks are not linear layers
    matrices = min(matrices, unit.num_trained)
    return Parameters(unit.num_trained, frozen=frozen, packed=packed, frozen_experts=experts, matrices=matrices)


def _on_rank(stage: Stage, units: tuple[UnitWork, ...], inputs: _Inputs) -> Rank:
    shape, plan, workload, accounting, rules = inputs
    embedding, *blocks, head = units
    root = _parameters(embedding, workload) if stage.has_embedding else Parameters(0)
    if stage.has_head:
        end = _parameters(head, workload)
        again = shape.vocab * shape.hidden // plan.tp if shape.is_tied and not stage.has_embedding else 0
        root = Parameters(root.trained + end.trained + again, 0, root.frozen + end.frozen, root.packed + end.packed)
    runs = tuple(
        (count, _parameters(unit, workload, block_of=shape))
        for unit, count in zip(blocks, stage.blocks, strict=True)
        if count
    )
    if accounting.states is None:
        found = states(root, runs, rules)
        update = _MUON_BYTES * sum(count * owned_matrices(unit, rules) for count, unit in runs)
    else:
        found, update = accounting.states(root, runs, rules)
    around = Around(shape, plan, workload)
    ending = head_saved(head, around) if stage.has_head else None
    if ending is not None and accounting.logit_bytes is not None:
        most = accounting.logit_bytes * head.inner_bytes / around.item
        ending = replace(ending, most=most)
    return Rank(
        stage=stage,
        states=found,
        parts=tuple(_parts(stage, found, blocks, inputs, around)),
        heads=(*(None for _ in stage.shares[1:]), ending),
        rules=rules,
        is_tied=shape.is_tied,
        is_constant=accounting.states is not None,
        update_bytes=update,
        before_bytes=embedding.saved_bytes,
        mask_bytes=_mask_bytes(shape, workload),
        # When backward reaches the largest tensor, it and two gradients of its size exist.
        passing_bytes=max(embedding.largest_bytes, 3 * embedding.largest_bytes - embedding.saved_bytes),
    )


def _mask_bytes(shape: ModelShape, workload: Workload) -> float:
    """Bytes of the masks that a forward makes for attention without a fused kernel: one, and one for each window."""
    if workload.recompute in {"none", 0}:
        return 0.0
    layers = [block.attention for _, block in shape.stacks]
    masks = {layer.window for layer in layers if layer.plain}
    return len(masks) * item_bytes(workload) * workload.micro_batch * workload.seq_len**2


#: Peak bytes of ``sw.Muon``'s step for each element of a matrix that a rank updates: the rounded update, the send and
#: receive buffers, and the assembled matrix, in 16 bit each.
_MUON_BYTES = 8


#: Classes of linear layers. If a plan makes them units, a block is gathered and reduced layer by layer.
_LAYERS = frozenset({"Linear", "Conv1D"})


def has_layers(plan: ParallelPlan) -> bool:
    """Whether single linear layers are units."""
    policy = plan.auto_wrap_policy
    classes = policy.classes if isinstance(policy, WrapByClass) else ()
    return not _LAYERS.isdisjoint(each if isinstance(each, str) else each.__name__ for each in classes)


def _by_layer(unit: Unit, work: UnitWork, inputs: _Inputs) -> Unit:
    """A block's unit with the bytes of its largest layer, if linear layers are units and are released."""
    rules = inputs.rules
    if not (rules.reshards and has_layers(inputs.plan)):
        return unit
    share = max(each.num_weights / each.num_kernels for each in work.products) / (work.num_parameters * unit.blocks)
    pooled = unit.buffer if rules.accumulation == "unsharded" else int(share * unit.buffer)
    return replace(unit, gathered=int(share * unit.gathered), gradients=int(share * unit.gradients), buffer=pooled)


def _parts(
    stage: Stage, found: States, works: Sequence[UnitWork], inputs: _Inputs, around: Around
) -> Iterator[tuple[Part, ...]]:
    """The units of each stage of the rank; recomputed or offloaded units are in different parts than others."""
    recompute, offload = inputs.workload.recompute, inputs.plan.activation_offload
    every = 0 if offload is None else offload.every
    left = -(-recompute // inputs.plan.pp) if isinstance(recompute, int) else 0
    pending = deque(found.units)
    blocks = [block for _, block in inputs.shape.stacks] or [None] * len(works)  # a traced model has no blocks
    for share in stage.shares:
        parts = []
        for block, work, count in zip(blocks, works, share, strict=True):
            for each in _taken(pending, count):
                unit = each if block is None else _by_layer(each, work, inputs)
                if isinstance(recompute, str):
                    ways = [(unit.count, recompute)]
                else:
                    full = min(left // unit.blocks, unit.count)
                    left -= full * unit.blocks
                    ways = [(full, "full"), (unit.count - full, "none")]
                for number, how in ways:
                    saved = _merged(_saved(work, block, around, how, inputs), unit.blocks)
                    parts += [Part(unit, n, saved, is_away) for n, is_away in _away(number, every) if n]
        yield tuple(parts)


def _away(number: int, every: int) -> Iterator[tuple[int, bool]]:
    """Numbers of consecutive units, and whether their activations are kept on the host: the first of ``every``."""
    if every < 2:
        yield number, every == 1
        return
    for first in range(0, number, every):
        yield 1, True
        yield min(every, number - first) - 1, False


def _taken(pending: deque[Unit], num_blocks: int) -> Iterator[Unit]:
    """Take units with that number of blocks. A merged unit of two stages goes to the first."""
    while num_blocks > 0 and pending:
        unit = pending.popleft()
        count = min(unit.count, -(-num_blocks // unit.blocks))
        if count < unit.count:
            pending.appendleft(replace(unit, count=unit.count - count))
        num_blocks -= count * unit.blocks
        yield replace(unit, count=count)


def _saved(unit: UnitWork, block: Block | None, around: Around, recompute: str, inputs: _Inputs) -> Saved:
    saved, accounting = block_saved(unit, block, around, recompute), inputs.accounting
    more = (unit.scores_bytes if accounting.keeps_scores else 0.0) - unit.regathered_bytes * accounting.regathers
    kept = saved.kept + (more if recompute == "none" else 0.0)
    if recompute == "selective" and accounting.drops_products:
        outputs = sum(product.rows * product.columns * product.count for product in unit.products)
        kept -= accounting.drops_products * around.item * outputs
    policy = inputs.plan.pipeline_policy
    if policy is None or not policy.is_split:
        weight = sum(last.inner * last.columns for last in unit.products[-1:] if last.is_trained)
        passing = saved.passing + around.stream(unit)
        if not has_layers(inputs.plan):  # the gradient of a weight waits for the unit's others
            passing = max(saved.passing + around.item * weight, around.stream(unit) + unit.late_bytes)
        return replace(saved, kept=kept, whole=saved.whole + more, passing=passing)
    is_plain = block is not None and isinstance(block.feed_forward, Mlp) and not block.feed_forward.is_gated
    passing = saved.passing + unit.inner_bytes / (1 if is_plain else 2)  # with the last layer's input
    weights = sum(product.num_weights for product in unit.products if product.is_trained)  # their gradients come later
    passing = max(passing, around.stream(unit) + unit.late_bytes - around.item * weights)
    terms = weight_terms(unit, around)
    return replace(saved, kept=kept, whole=saved.whole + more, passing=passing, terms=terms)


def _merged(saved: Saved, blocks: int) -> Saved:
    """The saved bytes of a merged unit, whose blocks compute one after another."""
    if blocks == 1:
        return saved
    whole = saved.whole + (blocks - 1) * max(saved.kept, saved.terms)
    return replace(saved, kept=saved.kept * blocks, whole=whole, terms=saved.terms * blocks)


def _buffer_bytes(shape: Any, plan: ParallelPlan) -> int:
    """Bytes of a traced model's buffers under the plan; 0 for a ``ModelShape``."""
    num_bytes, dtype = getattr(shape, "buffer_bytes", 0), plan.precision.buffer_dtype
    if not num_bytes or dtype is None:
        return num_bytes
    numel, stored_bytes = shape.castable_buffers
    return num_bytes - stored_bytes + numel * precision.item_bytes(dtype)


def _estimate(rank: Rank, moments: list[tuple[str, Bytes]], inputs: _Inputs, num_logits: float) -> MemoryEstimate:
    plan, accounting = inputs.plan, inputs.accounting
    if num_bytes := _buffer_bytes(inputs.shape, plan):
        moments = [(name, {**bytes_, "buffers": num_bytes}) for name, bytes_ in moments]
    peak, at_peak = max(moments, key=lambda moment: sum(moment[1].values()))
    by_category = {name: int(at_peak[name]) for name in (*CATEGORIES, "buffers") if name in at_peak}
    by_category["reduce"] += accounting.bucket_bytes
    allocated = sum(by_category.values())
    first = max(sum(bytes_.values()) - (bytes_["optimizer"] if name != "optimizer" else 0) for name, bytes_ in moments)
    reserved, device = allocated, allocated
    if rank.rules.device_type != "cpu":
        unused = accounting.unused_logit_bytes * num_logits
        if accounting.keeps_reduced:
            unused += max(rank.states.footprint.gradients - by_category["gradients"], 0)
        fragments = FRAGMENTS if accounting.fragments is None else accounting.fragments
        reserved = int((1 + fragments) * allocated + unused) + WORKSPACE
        axes = sum(size > 1 for size in (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp, plan.ep)) + 1
        device = reserved + CONTEXT + axes * COMMUNICATOR
    return MemoryEstimate(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device,
        by_category=by_category,
        host_bytes=rank.states.footprint.host + int(rank.offloaded_bytes),
        timeline=tuple((name, {key: int(value) for key, value in bytes_.items()}) for name, bytes_ in moments),
        first_step_bytes=int(first),
        peak=peak,
        stage=rank.stage.rank,
    )
