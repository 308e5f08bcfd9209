"""How the engine is to work: what a plan says, in the form in which the engine takes it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.granularity import ELEMENT, Granularity
from shardwise.spec.placement import Placements
from shardwise.spec.policies import FULL_PRECISION, OffloadPolicy, PrecisionPolicy, RecomputePolicy
from shardwise.spec.quantize import NO_QUANTIZATION, Quantization


@dataclass(frozen=True)
class EngineOptions:
    """All that is chosen for a model besides the placements.

    Attributes:
        policy: In which dtypes to compute and reduce.
        quantization: What is held or sent in fewer bytes.
        reshard_after_forward: ``"auto"``: as the row says, and the root stays gathered from forward to backward. A
            number: kept sharded over so many ranks, for which the Comms have an inner one.
        granularity: What a cut never divides.
        accumulates_sharded: Reduce every backward, also inside ``gradient_sync(model, False)``. ``None``: as the row
            says (ddp and zero1 keep local sums, the others reduce every time).
        defers_replicate: Reduce every backward inside its group of ``dp_shard``; inside ``gradient_sync(model, False)``
            not over ``dp_replicate``.
        num_gradient_buffers: Full-size gradient buffers per size class: two let a reduction run while the next unit's
            gradients are collected.
        keeps_buffers: Slots, gradient buffers and what ``.grad`` lives in stay allocated from step to step.
        recompute: What is computed again in backward; ``None``: nothing.
        merge_limit: Small units are merged up to this many bytes of parameters; ``None``: as ``spec.merge`` says.
        offload: What is kept on the host; ``None``: nothing.
    """

    policy: PrecisionPolicy = FULL_PRECISION
    quantization: Quantization = NO_QUANTIZATION
    reshard_after_forward: str | bool | int = "auto"
    granularity: Granularity = ELEMENT
    accumulates_sharded: bool | None = None
    defers_replicate: bool = False
    num_gradient_buffers: int = 2
    keeps_buffers: bool = True
    recompute: RecomputePolicy | None = None
    merge_limit: int | None = 0
    offload: OffloadPolicy | None = None

    def reshards(self, *, default: bool) -> tuple[bool, int | None]:
        """Whether a unit is released after its forward, and over how many ranks it then stays sharded."""
        value = self.reshard_after_forward
        if isinstance(value, str):
            return default, None
        return (value, None) if isinstance(value, bool) else (True, value)

    def accumulation(self, row: Placements) -> str:
        """How microbatches are added up, in the plan's words."""
        if self.defers_replicate:
            return "defer_replicate"
        is_sharded = row.pools_gradients if self.accumulates_sharded is None else self.accumulates_sharded
        return "sharded" if is_sharded else "unsharded"
