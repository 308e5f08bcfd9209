"""The plans that ``train`` and ``sw.parallelize`` accept for a model on a cluster, without building the model.

The degrees that a model's class supports are a table by family, found by applying plans to models of transformers on
meta tensors; a test repeats that for every family.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.spec.placement import PRESETS
from shardwise.spec.shape import Experts, ModelShape


@dataclass(frozen=True, slots=True)
class Support:
    """The degrees that a family of models supports.

    Attributes:
        tp: Styles of tensor parallelism are known for the layers.
        sequence_parallel: Styles are also known for the modules between these layers.
        cp: Ring attention can compute the attention.
        pp: The blocks are one chain.
        ep: The mixtures of experts are known.
    """

    tp: bool = True
    sequence_parallel: bool = False
    cp: bool = True
    pp: bool = True
    ep: bool = False


#: Support by family. GPT-2 and OPT of transformers have dropout by default, with which ``cp`` is refused; Gemma 2,
#: Gemma 3 and gpt-oss have attention windows in some layers.
SUPPORT: dict[str, Support] = {
    "gpt": Support(sequence_parallel=True, ep=True),
    "gpt2": Support(sequence_parallel=True, cp=False),
    "llama": Support(sequence_parallel=True),
    "mistral": Support(),
    "qwen2": Support(),
    "qwen3": Support(sequence_parallel=True),
    "phi3": Support(),
    "granite": Support(),
    "olmo2": Support(),
    "glm4": Support(),
    "gemma": Support(),
    "gemma2": Support(cp=False),
    "gemma3_text": Support(cp=False),
    "gpt_oss": Support(cp=False),
    "mixtral": Support(sequence_parallel=True, ep=True),
    "qwen2_moe": Support(),
    "qwen3_moe": Support(ep=True),
    "olmoe": Support(),
    "gpt_neox": Support(),
    "opt": Support(tp=False, cp=False),
    "t5": Support(cp=False, pp=False),
    "bert": Support(sequence_parallel=True, cp=False, pp=False),
    "vit": Support(sequence_parallel=True, cp=False, pp=False),
}

#: Support of a traced model, and of a family that is not in the table.
DATA_PARALLEL_ONLY = Support(tp=False, cp=False, pp=False)


def support_of(shape: ModelShape) -> Support:
    """The degrees that the shape's family supports; of a classifier, ``train`` divides neither blocks nor sequences."""
    found = SUPPORT.get(shape.family, DATA_PARALLEL_ONLY)
    return replace(found, cp=False, pp=False) if found.pp and shape.is_pooled else found


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of every axis."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    sequence_parallel: bool

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def tensor_degrees(shape: ModelShape, most: int) -> list[int]:
    """Degrees of ``tp`` up to ``most`` that divide heads and feed-forwards, as ``parallel.tensor`` requires."""
    if not support_of(shape).tp:
        return [1]
    return [t for t in range(1, most + 1) if all(_is_divisible(shape, place, t) for place in range(len(shape.stacks)))]


def _is_divisible(shape: ModelShape, place: int, t: int) -> bool:
    block = shape.stacks[place][1]
    for attention in (block.attention, *((block.cross,) if block.cross is not None else ())):
        kv = attention.kv_heads
        if attention.heads % t or (kv % t and t % kv):
            return False
    forward = block.feed_forward
    mlps = (forward.mlp, forward.shared) if isinstance(forward, Experts) else (forward,)
    widths = [mlp.ffn for mlp in mlps if mlp is not None]
    return not any(width % t for width in widths) and (not shape.vocab or shape.vocab >= t)


def expert_degrees(shape: ModelShape, shard_size: int) -> list[int]:
    """Degrees of ``ep`` that divide every mixture's experts and ``shard_size``, the ranks of a shard group."""
    counts = [block.feed_forward.count for _, block in shape.stacks if isinstance(block.feed_forward, Experts)]
    if not counts or not support_of(shape).ep:
        return [1]
    return [n for n in divisors(shard_size) if not any(count % n for count in counts)]


def has_window(shape: ModelShape) -> bool:
    """Whether a layer's attention is limited to a window."""
    return any(block.attention.window is not None for _, block in shape.stacks)


#: Least tokens of a sequence on a rank of ``cp``, unless ``cp`` is fixed. With fewer, the ring's messages take longer
#: than the attention that could hide them. Published recipes use ``cp`` from 8,192 tokens (Megatron-Bridge).
LEAST_TOKENS = 4096


def context_degrees(shape: ModelShape, world: int, seq_len: int, *, least_tokens: int) -> list[int]:
    """Degrees of ``cp`` that leave each rank ``least_tokens``; the ring needs two, because it has two chunks."""
    if not support_of(shape).cp or has_window(shape):
        return [1]
    return [c for c in divisors(world) if c == 1 or seq_len >= least_tokens * c]


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def stage_degrees(shape: ModelShape, world: int) -> list[int]:
    """Degrees of ``pp`` that leave each rank at least one block."""
    return [p for p in divisors(world) if p == 1 or (support_of(shape).pp and p <= shape.num_layers)]


#: Axes that divide the head or its input, which a loss in chunks does not permit.
_OF_THE_HEAD = ("tp", "pp", "cp")

#: Families that cap or scale logits between the head and the loss.
_SCALED_LOGITS = frozenset({"gemma2", "granite"})


def can_chunk(shape: ModelShape, layout: Layout) -> bool:
    """Whether the loss can be computed in chunks (``sw.chunk_cross_entropy``), which needs an undivided linear head."""
    if not shape.vocab or shape.family in _SCALED_LOGITS or any(getattr(layout, axis) > 1 for axis in _OF_THE_HEAD):
        return False
    return not (shape.is_pooled or shape.head_dense or shape.num_encoder_blocks)


def layouts(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, object]) -> Iterator[Layout]:
    """Every way to divide the cluster's GPUs over the axes.

    A value in ``fixed`` is the only one for its axis. Other axes have limits: ``tp`` and ``ep`` stay inside a node,
    ``cp`` is a power of two and leaves each rank :data:`LEAST_TOKENS`, and ``pp`` is a power of two or divides the
    layers. Parameters are sharded over all data-parallel ranks or, without a pipeline, over 1, 2, 4, ... full nodes.
    """
    if workload.compile or fixed.get("compile"):
        fixed = {"tp": 1, "cp": 1, "ep": 1, **fixed}  # a compiled unit would break at every collective
    if workload.chunked_loss:
        if any(fixed.get(axis, 1) != 1 for axis in _OF_THE_HEAD):
            return
        fixed = {**fixed, **dict.fromkeys(_OF_THE_HEAD, 1)}
    for p, t, c in _model_parallel(shape, cluster, workload.seq_len, fixed):
        data = cluster.num_gpus // (p * t * c)
        if workload.global_batch % data:
            continue
        for replicate in _replicas(cluster, fixed, data, c * t) if p == 1 or _are_groups_fixed(fixed) else (1,):
            shard = data // replicate
            most = shard * c if "ep" in fixed else min(shard * c, max(1, cluster.gpus_per_node // t))
            for e in _chosen(fixed, "ep", [e for e in expert_degrees(shape, shard * c) if e <= most]):
                for divides in _sequence_choices(shape, workload, fixed, t=t, c=c, e=e):
                    yield Layout(replicate, shard, c, t, p, e, divides)


def _are_groups_fixed(fixed: Mapping[str, object]) -> bool:
    """Whether a fixed value concerns groups of data-parallel ranks: their number or size, or a hybrid strategy."""
    strategy = PRESETS.get(str(fixed.get("strategy")))
    return "dp_replicate" in fixed or "dp_shard" in fixed or (strategy is not None and strategy.is_hybrid)


def _replicas(cluster: Cluster, fixed: Mapping[str, object], data: int, ranks: int) -> Iterator[int]:
    """Numbers of groups into which ``data`` data-parallel ranks, of ``ranks`` GPUs each, may be divided."""
    node = min(cluster.gpus_per_node, cluster.num_gpus)
    is_open = not _are_groups_fixed(fixed)
    for replicate in _chosen(fixed, "dp_replicate", divisors(data)):
        nodes, less = divmod(data // replicate * ranks, node)
        if is_open and replicate > 1 and (less or not _is_power(nodes)):
            continue
        if fixed.get("dp_shard", -1) in {-1, data // replicate}:
            yield replicate


def why_none(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, object]) -> list[str]:
    """Reasons, as text, why fixed values are impossible; empty if each value is possible alone."""
    world, support = cluster.num_gpus, support_of(shape)
    possible = {
        "tp": tensor_degrees(shape, world),
        "pp": stage_degrees(shape, world),
        "cp": context_degrees(shape, world, workload.seq_len, least_tokens=2),
        "ep": expert_degrees(shape, world),
    }
    needed = {
        "tp": f"divide the heads, key-value heads and feed-forward of {shape.name}",
        "pp": f"leave each rank one of {shape.name}'s {shape.num_layers} layers",
        "cp": f"leave each rank two of {workload.seq_len:,} tokens",
        "ep": f"divide the experts of {shape.name}",
    }
    found = []
    for axis, values in possible.items():
        if workload.chunked_loss and axis in _OF_THE_HEAD and fixed.get(axis, 1) != 1:
            found.append(f"{axis}={fixed[axis]} does not go with a loss in chunks")
            continue
        wanted = fixed.get(axis, 1)
        if not isinstance(wanted, int) or wanted == 1:
            continue
        if not getattr(support, axis):
            kind = f"{shape.family or 'such'} {'classifiers' if shape.is_pooled else 'models'}"
            found.append(f"{axis}={wanted}: the engine does not divide {kind} by {axis}")
        elif world % wanted:
            found.append(f"{axis}={wanted} does not divide {world} GPUs")
        elif wanted not in values:
            found.append(f"{axis}={wanted} does not {needed[axis]}")
    micro = fixed.get("micro_batch")
    if isinstance(micro, int) and workload.global_batch % micro:
        found.append(f"micro_batch={micro} does not divide a global batch of {workload.global_batch}")
    return found


def _model_parallel(
    shape: ModelShape, cluster: Cluster, seq_len: int, fixed: Mapping[str, object]
) -> Iterator[tuple[int, int, int]]:
    """Triples of ``pp``, ``tp`` and ``cp`` whose product divides the world."""
    world, node = cluster.num_gpus, min(cluster.gpus_per_node, cluster.num_gpus)
    for p in _chosen(fixed, "pp", stage_degrees(shape, world)):
        rest = world // p
        if not _is_power(p) and shape.num_layers % p and "pp" not in fixed:
            continue
        crosses = "tp" in fixed
        for t in _chosen(fixed, "tp", tensor_degrees(shape, rest if crosses else min(node, rest))):
            if rest % t or (node % t and not crosses):
                continue
            least = 2 if "cp" in fixed else LEAST_TOKENS
            for c in _chosen(fixed, "cp", context_degrees(shape, rest // t, seq_len, least_tokens=least)):
                if _is_power(c) or "cp" in fixed:
                    yield p, t, c


def _chosen(fixed: Mapping[str, object], name: str, values: Sequence[int]) -> Sequence[int]:
    if name not in fixed:
        return values
    return [value for value in values if value == fixed[name]]


def _sequence_choices(
    shape: ModelShape, workload: Workload, fixed: Mapping[str, object], *, t: int, c: int, e: int
) -> list[bool]:
    """Values of ``sequence_parallel``: true wherever possible, because it sends no more bytes and needs less memory."""
    can = t > 1 and e == 1 and support_of(shape).sequence_parallel and (c > 1 or workload.seq_len % t == 0)
    wanted = fixed.get("sequence_parallel")
    if wanted is None:
        return [can]
    return [bool(wanted)] if can or not wanted else []


#: Strategies to search, the simplest first. ``data_parallel`` is left out because it is a single process.
STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hybrid_shard_grad_op", "hsdp")


def strategies(layout: Layout, fixed: Mapping[str, object]) -> list[str]:
    """The strategies that differ from each other on a layout, or the fixed one.

    A single rank shards nothing, but with ``zero3`` it can fetch one unit at a time from the host. If ``dp_replicate``
    is above 1, only hybrid strategies shard parameters, and ``ddp``, which needs no groups, is left out.
    """
    wanted = fixed.get("strategy")
    is_single_rank = layout.dp_shard * layout.cp == 1
    is_hybrid, offloads = layout.dp_replicate > 1, fixed.get("offload_policy", "cpu") not in ("none", None)
    found = [n for n in STRATEGIES if PRESETS[n].is_hybrid == is_hybrid]
    if is_single_rank:
        found = ["ddp", "zero3"] if offloads else ["ddp"]
    if is_single_rank and layout.dp_replicate > 1:
        found = []
    elif layout.dp_replicate > 1:
        found += ["zero1", "zero2"]
    if wanted is None:
        # In a pipeline zero3 also keeps units gathered for the step, and zero2 also has full sums of gradients.
        left_out = ("zero2", *(n for n in STRATEGIES if PRESETS[n].keeps_gathered)) if layout.pp > 1 else ()
        return [n for n in STRATEGIES if n in found and n not in left_out]
    is_fixed = "dp_replicate" in fixed or "dp_shard" in fixed or (is_single_rank and layout.dp_replicate == 1)
    return [str(wanted)] if wanted in found or is_fixed else []


def schedules(shape: ModelShape, pp: int, num_microbatches: int, fixed: Mapping[str, object]) -> list[tuple[str, int]]:
    """Schedules that can run ``num_microbatches``, with the stages of each rank.

    ``gpipe`` is left out unless it is fixed, because it is as fast as ``1f1b`` and needs more memory.
    """
    wanted = fixed.get("schedule")
    if pp == 1:
        return [("", 1)] if wanted is None else []
    found = [(name, 1) for name in ("1f1b", "zb-h1", *(["gpipe"] if wanted == "gpipe" else []))]
    if shape.num_layers >= 2 * pp:
        found.append(("zb-v", 2))
    if num_microbatches % pp == 0:
        found += [("interleaved-1f1b", v) for v in (2, 4) if shape.num_layers >= v * pp]
    return [(name, stages) for name, stages in found if wanted in {None, name}]
