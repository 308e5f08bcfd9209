"""Bytes that a unit's forward leaves for backward, and what passes by while it computes, for one microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.work import UnitWork, item_bytes
from shardwise.cost.workload import Workload


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of one unit and one microbatch.

    Attributes:
        kept: From its forward to its backward.
        whole: From its forward to its backward where nothing is recomputed; while it is recomputed it has these.
        passing: What its backward adds at its beginning, when everything that was saved is still there.
    """

    kept: float
    whole: float
    passing: float


def block_saved(unit: UnitWork, workload: Workload, recompute: str) -> Saved:
    """A block: norms, projections, attention and feed-forward, as autograd saves their inputs.

    What autograd keeps is the table of ``cost.part``, with attention as one kernel.

    Args:
        unit: The block's work.
        workload: What is trained.
        recompute: ``"none"``, ``"selective"`` or ``"full"``.
    """
    del workload
    return Saved(
        kept=unit.kept_bytes(recompute), whole=unit.saved_bytes, passing=2 * unit.stream_bytes + unit.inner_bytes
    )


@dataclass(frozen=True, slots=True)
class HeadSaved:
    """Bytes of the head and the loss.

    Attributes:
        kept: Inputs of the last norm and of the head.
        forward: Logits while the loss is computed.
        backward: Logits and their gradients while the loss's backward runs.
        logits_gradient: The gradient of the logits, in the dtype of the products.
    """

    kept: float
    forward: float
    backward: float
    logits_gradient: float


def head_saved(unit: UnitWork, workload: Workload) -> HeadSaved:
    """The head: logits in the products' dtype, then in fp32, and what the cross entropy keeps of them in fp32."""
    item = item_bytes(workload)
    logits = unit.inner_bytes / item
    wide = 0 if item == 4 else 4
    return HeadSaved(
        kept=2 * unit.stream_bytes,
        forward=(item + wide + 4) * logits,
        backward=12 * logits,
        logits_gradient=(item + 4) * logits,
    )
