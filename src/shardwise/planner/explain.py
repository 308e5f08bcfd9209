"""A plan in words: its title, the limits of its time, use of its free memory, and helpful changes.

Every sentence about a change is based on an estimate of the changed plan, network or batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from shardwise.cost.hardware import GIB, Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.candidate import divisors, kind_of
from shardwise.planner.legal import DATA_PARALLEL_ONLY, support_of
from shardwise.planner.memory import estimate_memory, has_layers, num_microbatches
from shardwise.planner.planned import MARGIN, Made, Planned, fastest_of
from shardwise.spec.granularity import round_up
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Experts, ModelShape

#: Smallest share of a step that gets a sentence.
_NOTABLE = 0.03

#: Relative error of the predicted time that 8 of 10 unseen runs do not exceed, by the regime of the run. Runs are
#: published ones, each predicted by constants that were fitted without its source (``python -m bench.fit --loso``); a
#: test compares the figures with them. Other regimes have fewer than eight published runs.
BANDS = {
    "dense, one node": 0.26,
    "dense, many nodes": 0.16,
    "long context": 0.28,
    "little work per GPU": 0.17,
}

_LONG, _LITTLE = 16384, 2048


def regime(shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload) -> str:
    """The kind of a run, by the properties that determine the error of its prediction.

    Little work is fewer than 2,048 tokens of a microbatch on a GPU, and long context more than 16,384 tokens.
    """
    if workload.lora_rank is not None:
        return "LoRA"
    if any(isinstance(block.feed_forward, Experts) for _, block in shape.stacks):
        return "mixtures of experts"
    if not cluster.device.link_bandwidth:
        return "cards without links"
    if workload.seq_len > _LONG:
        return "long context"
    if workload.seq_len == 1 or workload.micro_batch * workload.seq_len < _LITTLE * plan.cp * plan.tp:
        return "little work per GPU" if workload.seq_len > 1 else "samples that are not sequences"
    return "dense, one node" if cluster.num_gpus <= cluster.gpus_per_node else "dense, many nodes"


def gib(num_bytes: float) -> str:
    """Bytes as text in GiB or MiB: ``61.2 GiB``."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 or not num_bytes else f"{num_bytes / 2**20:.1f} MiB"


def seconds(time_s: float) -> str:
    """A time as text: ``850 ms``, ``9.24 s``, ``142 s``."""
    if time_s < 1:
        return f"{1000 * time_s:.3g} ms"
    return f"{time_s:.3g} s" if time_s < 100 else f"{time_s:,.0f} s"


def title(made: Planned) -> str:
    """A plan in a few words: its strategy and the degrees above 1, such as ``hsdp 4x8 tp2 pp4 zb-v``.

    ``4x8`` means four groups, each sharding parameters over eight ranks of ``dp_shard`` and ``cp``.
    """
    plan = made.plan
    axes = [f"{axis}{getattr(plan, axis)}" for axis in ("tp", "cp", "ep", "pp") if getattr(plan, axis) > 1]
    # Without data parallelism the title omits ddp.
    is_single_gpu = plan.dp_replicate * plan.dp_shard * plan.cp == 1 and plan.strategy == "ddp"
    words = ([] if axes else ["one GPU"]) if is_single_gpu else [str(plan.strategy)]
    if plan.dp_replicate > 1:
        words.append(f"{plan.dp_replicate}x{plan.dp_shard * plan.cp}")
    words += axes
    policy = plan.pipeline_policy
    if policy is not None:
        is_interleaved = policy.schedule == "interleaved-1f1b"
        words.append(f"interleaved-{policy.virtual_stages}" if is_interleaved else policy.schedule)
    if plan.offload is not None:
        words.append("offload" if plan.offload.parameters else "offload-states")
    if plan.activation_offload is not None:
        words.append("offload-activations")
    if has_layers(plan):
        words.append("by-layer")
    if plan.prefetch == (0, 0):
        words.append("no-prefetch")
    if made.workload.in_backward:
        words.append("in-backward")
    if made.workload.chunked_loss:
        words.append("chunked-loss")
    return " ".join(words)


#: Most rows of a table; the slowest plans are left out.
_MOST_ROWS = 12


def table_rows(plans: Sequence[Made]) -> list[Made]:
    """The plans of a table: the recommended one, the fastest, and the best of each kind, in the search's order."""
    fastest = fastest_of(plans)
    seen: set[str] = set()
    rows: list[Made] = []
    for made in plans:
        kind = kind_of(made.plan)
        if kind not in seen or made is fastest:
            rows.append(made)
        seen.add(kind)
    fitting = [made for made in rows if made.fits]
    others = [made for made in rows if not made.fits]
    if fitting:  # of plans that do not fit, only those with data parallelism alone are shown
        others = [made for made in others if kind_of(made.plan) == str(made.plan.strategy)]
    return fitting[:_MOST_ROWS] + others[: max(_MOST_ROWS - len(fitting), _MOST_ROWS // 2)]


def misfits(rows: Sequence[Planned]) -> str:
    """A sentence with the rows of a table that do not fit, and their memory; empty if all fit."""
    sizes = [(title(made), made.memory.device_bytes / GIB) for made in rows if not made.fits]
    shown = [f"{name} {size:,.{size < 100:d}f}" for name, size in sizes]
    return f"Too much for a GPU, with all memory saved, in GiB: {', '.join(shown)}." if shown else ""


def recommendation(plans: Sequence[Planned]) -> str:
    """Why the first plan of a search is recommended, compared with the fastest."""
    first, fastest = plans[0], fastest_of(plans)
    if first is fastest:
        return "Plan 1 is the fastest by prediction."
    faster = first.step_time_s / fastest.step_time_s - 1
    has, needs = _words(first), _words(fastest)
    more, less = ([word for word in one if word not in other] for one, other in ((needs, has), (has, needs)))
    gains = f"would be {faster:.1%} faster by prediction" if faster >= 0.0005 else "would take as long by prediction"
    return (
        f"Plan 1 comes first by time and risk. Plan {plans.index(fastest) + 1} {gains},"
        f" {'with' if more else 'without'} {', '.join(more or less)}."
    )


def _words(made: Planned) -> list[str]:
    """The parts of a plan in words."""
    words = title(made).split()
    if made.plan.dp_replicate > 1:
        words[:2] = [" ".join(words[:2])]
    recompute = made.workload.recompute
    recomputed = "nothing recomputed" if recompute == "none" else f"recompute {recompute}"
    return [*words, recomputed, f"microbatches of {made.workload.micro_batch}"]


#: Names of the categories of a step's time in sentences.
TIME_WORDS = {
    "compute": "computing",
    "exposed gather": "waiting for all-gathers of parameters",
    "exposed reduce": "waiting for reductions of gradients",
    "tp": "collectives of tp",
    "pp bubble": "the pipeline's bubble",
    "cp": "the exchange of keys and values over cp",
    "ep": "the exchange of tokens between experts",
    "optimizer": "the optimizer's update",
    "offload": "copies between host and device",
    "host": "waiting for the host to launch operations",
}


def why(made: Planned) -> list[str]:
    """Sentences on the largest parts of the step time, changes that would shorten it, its error, and free memory."""
    return [
        time_in_words(made),
        *left_out(made),
        *_remedies_of_time(made),
        *odd_sizes(made),
        *_assumed_network(made),
        trust(made),
        *headroom(made),
    ]


def left_out(made: Planned) -> Iterator[str]:
    """Explain missing plans: axes that the engine does not support for the model, or data parallelism alone."""
    batch, gpus = made.workload.global_batch, made.cluster.num_gpus
    if gpus > 1 and support_of(made.shape) is DATA_PARALLEL_ONLY:
        kind = f"{made.shape.family} models" if made.shape.family else "this model"
        yield f"Only data parallelism is known to work for {kind}: tp, pp, cp and ep are not tried."
    if batch > gpus and batch % gpus:
        yield (
            f"{batch:,} sequences cannot be divided over {gpus:,} GPUs, so each plan has another axis than data"
            f" parallelism; {batch // gpus * gpus:,} or {-(-batch // gpus) * gpus:,} can."
        )


def trust(made: Planned) -> str:
    """The expected error of the predicted time, from published runs of the same kind."""
    kind = regime(made.shape, made.plan, made.cluster, made.workload)
    if made.cluster.device.measured is not None:
        return "Times are put together from what `shardwise calibrate` measured on this machine."
    if kind not in BANDS:
        return f"Too few runs of this kind ({kind}) are published to say how far the times may be wrong."
    return f"Of unseen runs of this kind ({kind}) 8 of 10 took within {BANDS[kind]:.0%} of the predicted time."


def _assumed_network(made: Planned) -> Iterator[str]:
    """The assumption about a network that was not given, and the step time with half its bandwidth."""
    cluster = made.cluster
    measured = cluster.device.measured
    if measured is not None and cluster.num_gpus > max(measured.num_ranks, cluster.gpus_per_node):
        yield (
            f"Links were measured between {measured.num_ranks} ranks. A slower network between nodes is not in these"
            " times, and --network does not change them: calibrate on all nodes, by torchrun."
        )
    is_given = measured is not None or cluster.inter_gbits_per_s_per_node is not None
    if is_given or cluster.num_gpus <= cluster.gpus_per_node:
        return
    gbits = cluster.device.node_gbits
    half = made.again(cluster=dataclasses.replace(cluster, inter_gbits_per_s_per_node=gbits / 2))
    yield (
        f"--network was not given: {gbits:,.0f} Gbit/s a node are assumed, as is usual with this GPU; with half of it a"
        f" step takes {seconds(half.step_time_s)}."
    )


def time_in_words(made: Planned) -> str:
    """The largest parts of a step."""
    parts = sorted(made.time.by_category.items(), key=lambda item: -item[1])
    shown = [
        f"{TIME_WORDS.get(name, name)} takes {spent / made.step_time_s:.0%}"
        for name, spent in parts
        if spent >= 0.01 * made.step_time_s
    ]
    return f"Of the {seconds(made.step_time_s)} of a step, {', '.join(shown[:4])}."


def _remedies_of_time(made: Planned) -> Iterator[str]:
    """A change that would shorten the longest wait."""
    waits = {name: spent for name, spent in made.time.by_category.items() if name != "compute"}
    if not waits:
        return
    name, spent = max(waits.items(), key=lambda item: item[1])
    if spent < _NOTABLE * made.step_time_s:
        return
    cluster = made.cluster
    is_network = cluster.num_gpus > cluster.gpus_per_node and cluster.device.measured is None
    if name in {"exposed gather", "exposed reduce", "cp", "ep"} and is_network:
        gbits = 2 * cluster.node_bandwidth * 8 / 1e9
        faster = dataclasses.replace(cluster, inter_gbits_per_s_per_node=gbits)
        other = made.again(cluster=faster)
        if other.step_time_s < (1 - _NOTABLE) * made.step_time_s:
            yield (
                f"Most of the waiting is {TIME_WORDS[name].removeprefix('waiting ')}: the network has"
                f" {cluster.node_bandwidth / 1e9:.0f} GB/s a node; with twice that a step would take"
                f" {seconds(other.step_time_s)}."
            )
    elif name == "host" and may_compile(made.plan) and not made.workload.compile:
        workload = dataclasses.replace(made.workload, compile=True, recompute="none")
        plan = dataclasses.replace(made.plan, compile=True, activation_checkpointing="none")
        other = made.again(workload=workload, plan=plan)
        if other.fits:
            yield (
                "A microbatch is too small for the GPU to be busy while the host launches it; with --compile a step"
                f" would take {seconds(other.step_time_s)}, larger microbatches do more in the same time."
            )
    elif name == "pp bubble":
        larger = dataclasses.replace(made.workload, global_batch=2 * made.workload.global_batch)
        policy, count = made.plan.pipeline_policy, num_microbatches(made.plan, made.workload)
        assert policy is not None
        pipeline = dataclasses.replace(policy, num_microbatches=2 * count)
        plan = dataclasses.replace(made.plan, pipeline=pipeline)
        other = made.again(workload=larger, plan=plan)
        share = other.time.by_category.get(name, 0.0) / other.step_time_s
        yield (
            f"{count} microbatches pass through {made.plan.pp} stages; a global batch of"
            f" {larger.global_batch:,} would lower the bubble from {spent / made.step_time_s:.0%} to {share:.0%}."
        )


def odd_sizes(made: Planned) -> Iterator[str]:
    """Advice if a vocabulary, or a traced layer's width, is not a multiple of 64 on each rank of tp, and costs time.

    There is none for fp32, because its cost has not been measured.
    """
    if made.workload.precision == "fp32":
        return
    multiple = 64 * made.plan.tp
    size, shape = made.shape.padded(multiple)
    other = made.again(shape=shape) if size % multiple else made
    if other.step_time_s > (1 - _NOTABLE) * made.step_time_s:
        return
    padding = f"resize_token_embeddings(pad_to_multiple_of={multiple})"
    whose, advice = (
        ("vocabulary", f"Set model.vocab_size of a preset; of a model of transformers call {padding}, and save it.")
        if made.shape.vocab
        else ("layer's width", f"If that is a vocabulary, {padding} of transformers pads it.")
    )
    yield (
        f"A {whose} of {size:,} is not a multiple of {multiple}, which is slow on a GPU; with"
        f" {round_up(size, multiple):,} a step would take {seconds(other.step_time_s)}. {advice}"
    )


def may_compile(plan: ParallelPlan) -> bool:
    """Whether units may be compiled: no collective is inside them, at which a compiled unit would break."""
    return plan.tp == plan.cp == plan.ep == 1


def headroom(made: Planned) -> Iterator[str]:
    """The memory in use, and the memory that a larger microbatch or a step without recomputation would need."""
    capacity, used = made.cluster.device.memory_bytes, made.memory.device_bytes
    if not made.fits:
        return
    text = f"Memory: {gib(used)} of {gib(capacity)}"
    wanted = _next_steps(made)
    if made.is_tight:
        text += f", less than {MARGIN:.0%} free: no plan leaves more, and the prediction may be wrong by as much"
    shown = [f"{gib(_needed(other))} {what}" for what, other in wanted]
    yield f"{text}; it would take {' and '.join(shown)}." if shown else f"{text}."
    if made.plan.offload is not None and made.plan.pp == 1 and made.workload.optimizer == "adamw":
        yield from _in_8_bit(made)


def _in_8_bit(made: Planned) -> Iterator[str]:
    """Suggest moments in 8 bit and the smallest microbatches instead of offloading to the host."""
    plan = dataclasses.replace(made.plan, offload_policy="none")
    workload = dataclasses.replace(made.workload, optimizer="adamw8bit", micro_batch=1)
    other = made.again(plan=plan, workload=workload)
    if other.fits and not other.is_tight:
        yield (
            f"With --optimizer adamw8bit it would fit without the host's memory, {seconds(other.step_time_s)} a step;"
            " moments in 8 bit are other numbers, so it is not proposed."
        )


def _next_steps(made: Planned) -> list[tuple[str, Planned]]:
    """Plans that need more memory and save time, each with a description."""
    found = []
    workload = made.workload
    samples = workload.global_batch // (made.plan.dp_replicate * made.plan.dp_shard)
    larger = next((micro for micro in divisors(samples) if micro > workload.micro_batch), None)
    if workload.recompute != "none":
        plan = dataclasses.replace(made.plan, activation_checkpointing="none")
        without = dataclasses.replace(made, plan=plan, workload=dataclasses.replace(workload, recompute="none"))
        found.append(("without recomputation", without))
    if larger is not None and made.plan.pp == 1:
        found.append(
            (
                f"for microbatches of {larger}",
                dataclasses.replace(made, workload=dataclasses.replace(workload, micro_batch=larger)),
            )
        )
    return found


def _needed(made: Planned) -> float:
    return estimate_memory(made.shape, made.plan, made.cluster, made.workload).device_bytes
