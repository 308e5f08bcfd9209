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

    Saved are the inputs of both norms and their outputs, queries, keys and values, the output of attention, the outputs
    of the projections up and what the activation makes of them.

    Args:
        unit: The block's work.
        workload: What is trained.
        recompute: ``"none"``, ``"selective"`` or ``"full"``.
    """
    item = item_bytes(workload)
    projections = unit.products[: 2 * len(unit.attention)]
    attention = sum(item * p.rows * p.columns for p in projections[::2]) + sum(
        item * p.rows * p.inner for p in projections[1::2]
    )
    whole = 4 * unit.stream_bytes + attention + 2 * unit.inner_bytes
    kept = {
        "none": whole,
        "selective": 2 * unit.stream_bytes + attention + unit.inner_bytes,
        "full": unit.stream_bytes,
    }[recompute]
    return Saved(kept=kept, whole=whole, passing=2 * unit.stream_bytes + unit.inner_bytes)


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
