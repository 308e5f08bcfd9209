"""How plain a plan is, by which the search recommends one of several that are about equally fast.

The step times of two plans that differ by less than the planner's own error say nothing about which is faster. Of such
plans the plainest is recommended: it has the fewest things that can be set wrongly, and is the easiest to debug.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.planner.candidate import Candidate

#: A plan that takes up to this much longer than the fastest counts as equally fast. About the median error of predicted
#: step times on published rows that nothing was fitted on (`make validate`): nobody can tell such plans apart by the
#: prediction.
EQUALLY_FAST = 0.10

#: Strategies that shard, the best known first, where data parallelism is alone or has axes inside a layer beside it.
_KNOWN = ("ddp", "zero3", "hsdp", "zero1", "zero2", "shard_grad_op", "hybrid_shard_grad_op")

#: The same in a pipeline, whose stages keep what they gathered for the whole step, so that zero3 saves little there.
_KNOWN_IN_PIPELINES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "shard_grad_op", "hybrid_shard_grad_op")

_OFFLOADS = ("none", "optimizer", "cpu")
_RECOMPUTES = ("none", "selective", "full")
_SCHEDULES = ("", "1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")


def plainness(candidate: Candidate) -> tuple[int, ...]:
    """How plain a plan is: of two the one whose tuple is smaller is plainer.

    What comes first counts most: the number of axes of model parallelism; what is offloaded; updates inside backward;
    which axes (tp or ep, cp, pp); how well the strategy is known; how much is recomputed; how well a pipeline's
    schedule is known.
    """
    layout, is_pipeline, recompute = candidate.layout, candidate.layout.pp > 1, candidate.recompute
    return (
        sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.ep)),
        _OFFLOADS.index(candidate.offload),
        int(candidate.offloads_activations),
        int(candidate.gathers_late),
        int(candidate.in_backward),
        2 * is_pipeline + (layout.cp > 1),
        _place(candidate.strategy, _KNOWN_IN_PIPELINES if is_pipeline else _KNOWN),
        _RECOMPUTES.index(recompute) if isinstance(recompute, str) else len(_RECOMPUTES) - 1,
        _SCHEDULES.index(candidate.schedule),
    )


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def order(candidate: Candidate) -> tuple[int, ...]:
    """As :func:`plainness`, with degrees and the microbatch, so that equally fast plans always come in one order."""
    layout = candidate.layout
    degrees = layout.pp, layout.tp, layout.cp, layout.ep, layout.dp_replicate
    return (*plainness(candidate), *degrees, -candidate.micro_batch, candidate.virtual_stages)
