"""A plan in words: what it is called, what bounds its time, what its memory leaves, and what would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardwise.planner.estimate import Estimate, estimate
from shardwise.planner.search import kind_of

GIB = 1 << 30


def gib(num_bytes: float) -> str:
    """Bytes as GPUs' memories are labelled: ``61.2 GiB``."""
    return f"{num_bytes / GIB:.1f} GiB"


def seconds(time_s: float) -> str:
    """A time for people: ``850 ms``, ``9.24 s``, ``142 s``."""
    if time_s < 1:
        return f"{1000 * time_s:.3g} ms"
    return f"{time_s:.3g} s" if time_s < 100 else f"{time_s:,.0f} s"


def title(made: Estimate) -> str:
    """A plan in a few words: its strategy and the degrees above 1."""
    plan = made.plan
    words = [str(plan.strategy)]
    if plan.dp_replicate > 1:
        words.append(f"{plan.dp_replicate} groups of {plan.dp_shard}")
    words += [f"{axis} {getattr(plan, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(plan, axis) > 1]
    policy = plan.pipeline_policy
    if policy is not None:
        stages = f" x{policy.virtual_stages}" if policy.schedule == "interleaved-1f1b" else ""
        words.append(policy.schedule + stages)
    if plan.offload is not None:
        words.append("states on the host" if plan.offload.parameters is False else "offload cpu")
    if made.workload.in_backward:
        words.append("update in backward")
    return ", ".join(words)


def table_rows(plans: Sequence[Estimate], most: int = 12) -> list[Estimate]:
    """The plans of a table: of data parallelism alone the best of every strategy, of other kinds the best of each.

    Args:
        plans: The result of a search.
        most: Rows at most; the last ones go first, plans that do not fit before the others.
    """
    seen: set[tuple[str, ...]] = set()
    rows = []
    for made in plans:
        kind = kind_of(made)
        key = kind if len(kind) == 1 else kind[1:]
        if key not in seen and (made.fits or len(kind) == 1):
            rows.append(made)
        seen.add(key)
    return rows[:most]


#: How the categories of a step's time are called in a sentence, as a subject.
TIME_WORDS = {
    "compute": "computing takes",
    "exposed gather": "waiting for all-gathers takes",
    "exposed reduce": "waiting for the reduction of gradients takes",
    "tp": "the collectives of tp take",
    "pp bubble": "the pipeline's bubble takes",
    "cp": "the exchange of keys and values between cp's ranks takes",
    "ep": "the exchange of tokens between experts takes",
    "optimizer": "the optimizer takes",
    "offload": "moving states between host and device takes",
    "host": "launching operations from the host takes",
}


def why(made: Estimate) -> list[str]:
    """What bounds the plan's time, and what its memory leaves room for: sentences."""
    lines = [time_in_words(made)]
    lines += [line for line in (what_helps(made), headroom(made)) if line]
    return lines


def time_in_words(made: Estimate) -> str:
    """The largest part of a step, and the largest that is not computing."""
    parts = sorted(made.time.by_category.items(), key=lambda item: -item[1])
    shown = [f"{TIME_WORDS.get(name, name)} {spent / made.step_time_s:.0%}" for name, spent in parts if spent > 0][:3]
    return f"Of a step of {seconds(made.step_time_s)}, " + ", ".join(shown) + "."


def what_helps(made: Estimate) -> str:
    """What a faster network would bring, where communication between nodes is what waits."""
    cluster = made.cluster
    exposed = sum(made.time.by_category.get(name, 0.0) for name in ("exposed gather", "exposed reduce"))
    if cluster.num_gpus <= cluster.gpus_per_node or exposed < 0.05 * made.step_time_s:
        return ""
    faster = dataclasses.replace(cluster, inter_gbits_per_s_per_node=2 * cluster.node_bandwidth * 8 / 1e9)
    other = estimate(made.shape, made.plan, faster, made.workload)
    return (
        f"A node's network sends {cluster.node_bandwidth / 1e9:.0f} GB/s; with twice that a step would take"
        f" {seconds(other.step_time_s)}."
    )


def headroom(made: Estimate) -> str:
    """What the memory that is left would be enough for, by trying it."""
    capacity, used = made.cluster.device.memory_bytes, made.memory.device_bytes
    return f"Memory: {gib(used)} of {gib(capacity)}, {gib(capacity - used)} free."
