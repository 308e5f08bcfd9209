"""What other people's frameworks hold in memory: their model states, activations and what their allocators keep.

Written down from their code and papers before errors were looked at. Changed afterwards, because the code of the
framework says so: nanotron keeps gathered inputs and fills stages in order, Alpa divides optimizer state, the update of
ZeRO over fp16 gradients copies them (BLOOM), MosaicML's loss is one kernel, and all of torchtitan's.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.memory import Accounting
from shardwise.planner.model_states import Parameters, Rules, Runs, States, Unit, merged_runs
from shardwise.planner.stage import Chain
from shardwise.spec.memory.footprint import Footprint
from shardwise.spec.placement import Placements


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter of buffers that a framework allocates once.

    Attributes:
        weight: What the model computes with.
        gradient: Gradients.
        optimizer: Masters and moments.
        update: What the optimizer's step holds besides, for the parameters that a rank updates.
    """

    weight: float
    gradient: float
    optimizer: float
    update: float = 0.0

    def of(self, placements: Placements, ranks: int) -> tuple[float, float, float]:
        """Bytes per parameter on one of ``ranks`` ranks, each part divided where the placements shard it."""
        return (
            self.weight / (ranks if placements.shards_parameters else 1),
            self.gradient / (ranks if placements.pools_gradients else 1),
            self.optimizer / (ranks if placements.shards_optimizer else 1),
        )

    def __call__(self, root: Parameters, runs: Runs, rules: Rules) -> tuple[States, float]:
        """What a rank holds of a stage where every buffer is allocated once, and what an update holds besides."""
        merged = merged_runs(root, runs, rules)
        every = root.numel + sum(count * unit.numel for count, _, unit in merged)
        experts = root.experts + sum(count * unit.experts for count, _, unit in merged)
        dense = self.of(rules.placements, rules.shard_size)
        routed = self.of(rules.placements, max(rules.shard_size // rules.ep, 1))
        num_bytes = [int((every - experts) * a + experts * b) for a, b in zip(dense, routed, strict=True)]
        footprint = Footprint(parameters=num_bytes[0], gradients=num_bytes[1], optimizer=num_bytes[2])
        units = tuple(_nothing(count, blocks) for count, blocks, _ in merged)
        return States(footprint, _nothing(1, 0), units), self.update / self.optimizer * footprint.optimizer


def _nothing(count: int, blocks: int) -> Unit:
    """Units that allocate nothing on their way."""
    return Unit(count, blocks, gathered=0, gradients=0, shard=0, sums=0, inner=0, buffer=0)


#: 16-bit weights and gradients, fp32 masters and moments: what ZeRO's paper counts (arXiv 1910.02054, section 3.1).
ZERO = StateBytes(weight=2, gradient=2, optimizer=12)

#: The one number that is fitted here: the median, over the rows of BigScience's BLOOM chronicles, of what nvidia-smi
#: showed beyond tensors, context and communicators (torch 1.10 to 1.12).
FRAGMENTS_2022 = 0.206

MEGATRON = Accounting(
    states=StateBytes(weight=2, gradient=4, optimizer=12),
    is_fused=True,
    regathers=True,
    logit_bytes=8,
    embedding_blocks=0,
    source="Megatron-LM, distributed optimizer: bf16 weights, fp32 main gradients, fp32 masters and moments sharded;"
    " Transformer Engine's fused layers; the cross entropy's gradient lies where its softmax was",
)


def _filled(chain: Chain, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Blocks by nanotron's rule: a stage takes them until the cost of all so far exceeds its share of the whole."""
    costs = [cost for count, cost in zip(chain.counts, chain.costs, strict=True) for _ in range(count)]
    share = (sum(costs) + chain.head_cost) / num_stages
    counts, done, stage = [0] * num_stages, 0, 0
    for cost in costs:
        counts[stage] += 1
        done += cost
        stage += done > share * (stage + 1)
    return tuple((count,) for count in counts)  # its models have one kind of block


NANOTRON = Accounting(
    states=StateBytes(weight=2, gradient=6, optimizer=12),
    divide=_filled,
    source="nanotron: fp32 gradient accumulator beside 16-bit gradients, ZeRO-1; inputs of products are gathered over"
    " tensor-parallel ranks by an autograd function whose output the product saves (tp_linear_async_communication off)",
)
BLOOM_FP16 = Accounting(
    states=StateBytes(weight=2, gradient=2, optimizer=12, update=6),
    is_fused=True,
    keeps_scores=True,
    embedding_blocks=0,
    bucket_bytes=2 * 500_000_000,
    fragments=FRAGMENTS_2022,
    source="Megatron-DeepSpeed, ZeRO-1 over fp16 gradients, reduced in buckets of 5e8 elements; the step flattens a"
    " rank's part of the gradients and copies it to fp32",
)
BLOOM_BF16 = Accounting(
    states=StateBytes(weight=2, gradient=6, optimizer=12),
    is_fused=True,
    keeps_scores=True,
    embedding_blocks=1,
    fragments=FRAGMENTS_2022,
    source="Megatron-DeepSpeed, BF16_Optimizer: 16-bit gradients and an fp32 sum of them, neither sharded",
)
NO_ZERO = Accounting(
    states=StateBytes(weight=2, gradient=2, optimizer=12),
    is_fused=True,
    keeps_scores=True,
    embedding_blocks=0,
    fragments=FRAGMENTS_2022,
    source="mixed precision of ZeRO's paper, section 3.1: 16 bytes per parameter",
)
TORCHTITAN = Accounting(
    drops_products=0.45,  # of the bytes of Llama's seven products: keys, attention's output, up
    unused_logit_bytes=2,
    keeps_reduced=True,
    source="torchtitan 2024: selective checkpointing keeps every second product (activation_checkpoint.py); FSDP2 makes"
    " reduced gradients on a stream of their own; 16-bit logits leave a gap in which no fp32 tensor of the loss fits",
)
MOSAIC = Accounting(
    logit_bytes=4,
    source="llm-foundry: the loss is one kernel (fused_crossentropy, its default) over 16-bit logits, which makes a"
    " gradient of the same size",
)
