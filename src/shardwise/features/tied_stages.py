"""Gradients of parameters that several pipeline stages hold: tied embeddings, as a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardwise.comm.base import Comm
from shardwise.engine.attach import mark_of
from shardwise.engine.engine import Engine
from shardwise.engine.view import memory_order


def sum_over_copies(engine: Engine, copies: Mapping[nn.Parameter, Sequence[int]], comm: Comm) -> None:
    """Add up the local gradients of parameters over the ranks that hold a copy, before they are reduced.

    Every copy gets the same sum, in the order of ranks, so that copies stay equal to the last bit.

    Args:
        engine: Of the model.
        copies: The ranks along ``comm`` that hold a copy, ascending, by parameter; in one order on all of them.
        comm: Along ``pp``.

    Collective:
        Between the ranks of each parameter: the whole gradient from each to each.
    """
    for parameter, ranks in copies.items():
        mark = mark_of(parameter)
        group = mark.group if mark is not None else None
        if mark is None or group is None or not group.wants_gradients:
            continue
        views = group.gradient.local_views(mark.index, engine.gradients)
        own = torch.cat([memory_order(view) for view in views])
        unit = f"copies of {group.layout.params[mark.index].name}"
        terms = {peer: own if peer == comm.rank else torch.empty_like(own) for peer in ranks}
        peers = [peer for peer in ranks if peer != comm.rank]
        sends, receives = [(own, peer, unit) for peer in peers], [(terms[peer], peer, unit) for peer in peers]
        comm.exchange(sends, receives).wait()
        total = terms[ranks[0]].clone()
        for peer in ranks[1:]:
            total += terms[peer]
        for view, part in zip(views, total.split([view.numel() for view in views]), strict=True):
            memory_order(view).copy_(part)
