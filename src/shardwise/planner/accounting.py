"""How a framework holds what it trains, where that differs from ours.

The published measurements are other people's: each is predicted with what its framework is known to keep, through the
same function as our own engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.states import Parameters, Rules, Runs, States, Unit, merged_runs
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

    def of(self, row: Placements, ranks: int) -> tuple[float, float, float]:
        """Bytes per parameter on one of ``ranks`` ranks, each part divided where the placements shard it."""
        return (
            self.weight / (ranks if row.shards_parameters else 1),
            self.gradient / (ranks if row.pools_gradients else 1),
            self.optimizer / (ranks if row.shards_optimizer else 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """What of the prediction a framework changes.

    Attributes:
        states: Its model states; ``None``: ours, from the engine's footprint.
        is_fused: Element-wise operations are fused, so that autograd keeps what Korthikanti et al. count.
        keeps_scores: Attention is not one kernel: the scores of every pair are kept.
        regathers: With sequence parallelism inputs of products are gathered again in backward, not kept.
        logit_bytes: Bytes for each logit at the worst moment of the loss; ``None``: ours.
        embedding_blocks: Blocks that the embedding, and the head, count as where stages of a pipeline are divided;
            ``None``: stages are balanced by their products, as ours.
        fragments: Share of the bytes of tensors that the allocator holds besides; ``None``: as ``planner.device`` says.
        bucket_bytes: Buffers that gradients are reduced through.
        source: What says so.
    """

    states: StateBytes | None = None
    is_fused: bool = False
    keeps_scores: bool = False
    regathers: bool = False
    logit_bytes: float | None = None
    embedding_blocks: int | None = None
    bucket_bytes: int = 0
    fragments: float | None = None
    source: str = ""


#: Our engine.
OURS = Accounting(source="spec.memory.footprint")

#: 16-bit weights and gradients, fp32 masters and moments: what ZeRO's paper counts (arXiv 1910.02054, section 3.1).
ZERO = StateBytes(weight=2, gradient=2, optimizer=12)


def framework_states(root: Parameters, runs: Runs, rules: Rules, held: StateBytes) -> States:
    """What a rank holds of a stage where every buffer is allocated once, as :func:`planner.states.states`."""
    merged = merged_runs(root, runs, rules)
    every = root.numel + sum(count * unit.numel for count, _, unit in merged)
    experts = root.experts + sum(count * unit.experts for count, _, unit in merged)
    weight, gradient, optimizer = held.of(rules.row, rules.shard_size)
    expert = held.of(rules.row, max(rules.shard_size // rules.ep, 1))
    footprint = Footprint(
        parameters=int((every - experts) * weight + experts * expert[0]),
        gradients=int((every - experts) * gradient + experts * expert[1]),
        optimizer=int((every - experts) * optimizer + experts * expert[2]),
    )
    return States(footprint, _nothing(1, 0), tuple(_nothing(count, blocks) for count, blocks, _ in merged))


def _nothing(count: int, blocks: int) -> Unit:
    """Units that allocate nothing on their way."""
    return Unit(count, blocks, gathered=0, gradients=0, shard=0, sums=0, inner=0, buffer=0)
