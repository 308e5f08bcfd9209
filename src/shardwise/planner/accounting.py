"""Memory accounting of other frameworks, where it differs from ours.

The published measurements are other people's: each is predicted with what its framework is known to keep, through the
same function as our own engine (``bench/accounting.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.planner.stage import Divide
from shardwise.planner.states import Parameters, Rules, Runs, States


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """The changes of the prediction for a framework.

    Attributes:
        states: What a rank holds of a stage, as :func:`planner.states.states`, and what the optimizer's step holds
            besides; ``None``: ours, from the engine's footprint.
        is_fused: Element-wise operations are fused, so that autograd keeps what Korthikanti et al. count.
        keeps_scores: Attention is not one kernel: the scores of every pair are kept.
        regathers: With sequence parallelism inputs of products are gathered again in backward, not kept.
        drops_products: Share of the outputs of products that selective recomputation does not keep.
        logit_bytes: Bytes for each logit at the worst moment of the loss; ``None``: ours.
        embedding_blocks: Blocks that the embedding, and the head, count as where stages of a pipeline are divided;
            ``None``: they count as their products do.
        divide: Which blocks each stage of a pipeline has; ``None``: stages are balanced, as ours.
        fragments: Share of the bytes of tensors that the allocator holds besides; ``None``: as ``planner.device`` says.
        unused_logit_bytes: Bytes for each logit that the allocator holds and no tensor of the loss fits in.
        keeps_reduced: Reduced gradients lie in memory of a stream of their own, which activations cannot use.
        bucket_bytes: Buffers that gradients are reduced through.
        source: What says so.
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


#: Our engine.
OURS = Accounting(source="spec.memory.footprint")
