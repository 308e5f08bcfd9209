"""How a shard is held, and how it becomes the gathered buffer: in int8, on the host, kept over a few ranks."""

from __future__ import annotations

from shardwise.engine.build import Kind
from shardwise.engine.group import Form
from shardwise.forms.host import OnHost
from shardwise.forms.inner import Inner
from shardwise.forms.packed import Frozen, Packed
from shardwise.spec.placement import Placements
from shardwise.spec.policies import OffloadPolicy
from shardwise.spec.quantize import Quantization


def form_of(
    row: Placements,
    kind: Kind,
    quantization: Quantization,
    *,
    offload: OffloadPolicy | None = None,
    inner_size: int | None = None,
) -> Form:
    """The form of a group.

    Args:
        row: Placements in force for the group.
        kind: What the parameters have in common.
        quantization: What the plan says of packed forms.
        offload: What is kept on the host of the group's unit; ``None``: nothing.
        inner_size: Ranks over which the unit stays sharded between forward and backward; ``None``: it does not.
    """
    form = Form()
    if kind.frozen_as != "none":
        form = Frozen(kind.frozen_as, kind.dtypes[1])
    elif kind.dtypes[0].is_floating_point and (quantization.gather, quantization.reduce) != ("none", "none"):
        is_sent_packed = row.shards_optimizer and quantization.gather != "none"
        form = Packed(
            quantization.gather if is_sent_packed else None,
            quantization.reduce if quantization.reduce != "none" else None,
        )
    if offload is not None and offload.covers(row, is_trainable=kind.is_trainable):
        form = OnHost(form, offload)
    return form if inner_size is None else Inner(form, inner_size)
