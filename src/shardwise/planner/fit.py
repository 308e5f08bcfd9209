"""Changes that make a model fit, and the largest model that fits; both are found by trial, not by rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardwise.cost.hardware import Cluster, gpus
from shardwise.cost.workload import Workload
from shardwise.planner.bounds import MemoryBound
from shardwise.planner.candidate import Candidate, bases, candidates, check_fixed, savings
from shardwise.planner.estimate import Estimate, estimate
from shardwise.planner.memory import estimate_memory
from shardwise.planner.planned import Largest, Remedy, needed_bytes, usable_bytes
from shardwise.spec.shape import Attention, Block, Experts, Mlp, ModelShape

#: Most GPUs to try: twice the number of the largest published run (Llama 3, 16,384).
MOST_GPUS = 1 << 15

#: Layouts to try before a cluster is considered too small.
_MOST_TRIED = 400


def first_fit(
    shape: ModelShape,
    cluster: Cluster,
    workload: Workload,
    fixed: Mapping[str, Any],
    needed: dict[Candidate, float] | None = None,
) -> Estimate | None:
    """A plan that fits and is not tight, or ``None``.

    The smallest candidates are tried first, with all memory savings. ``needed`` caches their bytes for later calls that
    differ only in the GPU.
    """
    needed = {} if needed is None else needed
    settings, capacity = check_fixed(fixed), usable_bytes(cluster)
    least_bytes = MemoryBound(shape, cluster, workload, settings)
    found = []
    for base in bases(shape, cluster, workload, settings):
        choices = savings(base, workload, settings)
        if choices and (states := least_bytes(choices[-1])) <= capacity:
            found.append((base.micro_batch, states, base))
    for _, _, base in sorted(found, key=lambda item: item[:2])[:_MOST_TRIED]:
        every = savings(base, workload, settings)
        on_device = [choice for choice in every if choice.offload == "none"]
        for choice in [choices[-1] for choices in (on_device, every) if choices]:
            if choice not in needed:
                plan, chosen = choice.plan(workload, settings), choice.workload(workload)
                needed[choice] = needed_bytes(estimate_memory(shape, plan, cluster, chosen), cluster)
            if needed[choice] <= capacity:
                return estimate(shape, choice.plan(workload, settings), cluster, choice.workload(workload))
    return None


def remedies(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]) -> list[Remedy]:
    """Find single changes after which a model fits that did not fit.

    Changes are: each fixed value left open (recomputation, offloading, ``tp``, the microbatch), moments in 8 bit, more
    GPUs, GPUs with more memory, and shorter sequences.
    """
    found = []
    for name, value in fixed.items():
        others = {key: value for key, value in fixed.items() if key != name}
        made = first_fit(shape, cluster, workload, others)
        if made is not None:
            found.append(Remedy(f"leave {name} open, which is fixed to {value}", made))
    if workload.optimizer in {"adam", "adamw"}:
        made = first_fit(shape, cluster, dataclasses.replace(workload, optimizer="adamw8bit"), fixed)
        if made is not None:
            found.append(Remedy("--optimizer adamw8bit: moments in 8 bit, other numbers", made))
    others = [change(shape, cluster, workload, fixed) for change in (_more_gpus, _other_gpus, _shorter)]
    return found + [each for each in others if each is not None]


def _more_gpus(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]) -> Remedy | None:
    """The least multiple of the cluster's GPUs with which a plan fits, for an equal multiple of the global batch."""

    def attempt(times: int) -> Estimate | None:
        larger = dataclasses.replace(cluster, num_gpus=times * cluster.num_gpus)
        batch = dataclasses.replace(workload, global_batch=times * workload.global_batch)
        return first_fit(shape, larger, batch, fixed)

    times, made = 1, None
    while made is None:
        times *= 2
        if times * cluster.num_gpus > MOST_GPUS:
            return None
        made = attempt(times)
    few, enough = times // 2, times
    while enough - few > 1:
        middle = (few + enough) // 2
        tried = attempt(middle)
        few, enough, made = (few, middle, tried) if tried is not None else (middle, enough, made)
    return Remedy(f"{enough * cluster.num_gpus} GPUs instead of {cluster.num_gpus}", made)


def _other_gpus(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]) -> Remedy | None:
    """The GPU of the table with the least memory that is sufficient."""
    larger = [gpu for gpu in gpus().values() if gpu.memory_bytes > cluster.device.memory_bytes]
    needed: dict[Candidate, float] = {}
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes):
        made = first_fit(shape, dataclasses.replace(cluster, gpu=gpu.name), workload, fixed, needed)
        if made is not None:
            return Remedy(f"{cluster.num_gpus} x {gpu.name}", made)
    return None


def _shorter(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]) -> Remedy | None:
    """The longest of a half, a quarter, ... of the sequence with which a plan fits."""
    tokens = workload.seq_len // 2
    while tokens >= 128:
        made = first_fit(shape, cluster, dataclasses.replace(workload, seq_len=tokens), fixed)
        if made is not None:
            return Remedy(f"sequences of {tokens:,} tokens instead of {workload.seq_len:,}", made)
        tokens //= 2
    return None


# -- the largest model


def scaled(shape: ModelShape, width: int) -> ModelShape:
    """A model with ``width`` heads of the same size; layers and widths grow by the same factor as heads."""
    ((_, block), *_) = shape.stacks
    heads = block.attention.heads
    grow = width / heads
    head_dim = block.attention.head_dim
    hidden = _multiple(shape.hidden * grow, head_dim)
    layers = max(1, round(shape.num_layers * grow))

    def attention(block: Attention) -> Attention:
        kv = width if block.kv_heads == block.heads else min(block.kv_heads, width)
        while width % kv:
            kv -= 1
        return dataclasses.replace(block, heads=width, kv_heads=kv)

    def mlp(block: Mlp) -> Mlp:
        return dataclasses.replace(block, ffn=_multiple(block.ffn * grow, head_dim))

    def feed_forward(block: Mlp | Experts) -> Mlp | Experts:
        if isinstance(block, Mlp):
            return mlp(block)
        shared = None if block.shared is None else mlp(block.shared)
        return dataclasses.replace(block, mlp=mlp(block.mlp), shared=shared)

    one: Block = dataclasses.replace(
        block,
        attention=attention(block.attention),
        cross=None if block.cross is None else attention(block.cross),
        feed_forward=feed_forward(block.feed_forward),
    )
    wider = hidden / shape.hidden
    return dataclasses.replace(
        shape,
        name=f"{shape.name} x {grow:.3g}",
        hidden=hidden,
        stacks=((layers, one),),
        embedding=int(shape.embedding * wider),
        head=int(shape.head * wider),
        num_encoder_blocks=0,
    )


def _multiple(value: float, unit: int) -> int:
    return max(unit, round(value / unit) * unit)


#: Named limits of memory saving, each a predicate of the permitted candidates.
SAVINGS: dict[str, Callable[[Candidate], bool]] = {
    "nothing recomputed": lambda c: c.recompute == "none" and c.offload == "none" and not c.in_backward,
    "recomputed": lambda c: c.offload == "none" and not c.in_backward,
    "recomputed, states on the host": lambda c: not c.in_backward,
}


def largest(
    shape: ModelShape, cluster: Cluster, workload: Workload, strategies: tuple[str, ...], fixed: Mapping[str, Any]
) -> Iterator[Largest]:
    """For each strategy and each entry of ``SAVINGS``, the largest model of the shape's proportions that fits.

    Plans have data parallelism alone, unless other degrees are fixed.
    """
    alone = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "micro_batch": 1, **check_fixed(fixed)}
    for strategy in strategies:
        for saving, allows in SAVINGS.items():
            settings = {**alone, "strategy": strategy}
            yield Largest(strategy, saving, _largest(shape, cluster, workload, settings, allows))


def _largest(
    shape: ModelShape,
    cluster: Cluster,
    workload: Workload,
    fixed: Mapping[str, Any],
    allows: Callable[[Candidate], bool],
) -> Estimate | None:
    def attempt(width: int) -> Candidate | None:
        model = scaled(shape, width)
        choices = [c for c in candidates(model, cluster, workload, fixed) if allows(c)]
        for choice in reversed(choices):
            plan, chosen = choice.plan(workload, fixed), choice.workload(workload)
            if needed_bytes(estimate_memory(model, plan, cluster, chosen), cluster) <= usable_bytes(cluster):
                return choice
        return None

    few, many = 0, 1
    while many < 1 << 12 and attempt(many) is not None:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if attempt(middle) is not None else (few, middle)
    choice = attempt(few) if few else None
    if choice is None:
        return None
    return estimate(scaled(shape, few), choice.plan(workload, fixed), cluster, choice.workload(workload))
