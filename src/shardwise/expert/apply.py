"""Divides a model's experts: parameters become this rank's parts, mixtures route tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from shardwise.comm.base import Comm
from shardwise.expert.layer import Mixture, RoutedMixture
from shardwise.spec.slice import Cut, Slice, set_slice, slice_of
from shardwise.spec.traffic.rows import local_range


def apply_experts(
    mixtures: Sequence[Mixture], comm: Comm | None, capacity: float | None, *, tp: tuple[int, int] = (0, 1)
) -> str:
    """Leave this rank's experts in the model, in place. Modules, names and classes stay.

    Where each expert is a module, modules of other ranks' experts stay without parameters; stacked weights are cut.

    Args:
        mixtures: The mixtures of the whole model, the same on every rank.
        comm: The axis ``ep``; ``None`` where every rank holds all experts, and only the capacity matters.
        capacity: ``ParallelPlan.expert_capacity``.
        tp: This rank on ``tp``, and the size of ``tp``, which has cut the model before.

    Returns:
        A line for a summary.
    """
    for mixture in mixtures:
        layer = RoutedMixture(mixture, comm, capacity)
        if comm is not None:
            if mixture.is_stacked:
                _cut_stack(mixture, comm, tp)
            else:
                _drop_foreign(mixture, comm, tp)
        layer.install()
    over = "all tokens" if capacity is None else f"up to {capacity:g} times their even share of a rank's tokens"
    if comm is None:
        return f"experts: take {over}"
    start, stop = local_range(mixtures[0].num_experts, comm.size, comm.rank)
    return (
        f"experts: this rank is {comm.rank + 1} of {comm.size} (ep), with experts {start} to {stop - 1} of"
        f" {mixtures[0].num_experts} of {len(mixtures)} mixture{'s' if len(mixtures) > 1 else ''}; they take {over}"
    )


def own_experts(mixtures: Iterable[Mixture], comm: Comm) -> dict[int, slice | None]:
    """The rows of this rank's experts in every expert's parameter, by ``id``: a slice, all (``:``), or ``None``."""
    found: dict[int, slice | None] = {}
    for mixture in mixtures:
        if mixture.is_stacked:
            own = slice(*local_range(mixture.num_experts, comm.size, comm.rank))
            found |= {id(parameter): own for parameter in mixture.module.parameters()}
        else:
            for expert, is_here in mixture.experts(comm.size, comm.rank):
                found |= {id(parameter): slice(None) if is_here else None for parameter in expert.parameters()}
    return found


def _drop_foreign(mixture: Mixture, comm: Comm, tp: tuple[int, int]) -> None:
    for expert, is_here in mixture.experts(comm.size, comm.rank):
        for module in expert.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if is_here:
                    held = slice_of(parameter) or Slice(tuple(parameter.shape), copy=tp[0], copies=tp[1])
                    set_slice(parameter, dataclasses.replace(held, is_expert=True))
                else:
                    parameter.data = parameter.data.new_empty(0)  # no reference to it holds memory
                    module.register_parameter(name, None)


def _cut_stack(mixture: Mixture, comm: Comm, tp: tuple[int, int]) -> None:
    start, stop = local_range(mixture.num_experts, comm.size, comm.rank)
    for parameter in mixture.module.parameters():
        shape = (mixture.num_experts, *parameter.shape[1:])
        held = slice_of(parameter) or Slice(shape, copy=tp[0], copies=tp[1])
        if parameter.shape == shape:  # else it was filled with its part alone
            parameter.data = parameter.data[start:stop].clone()
        cuts = Cut(0, ((start, stop),)), *held.cuts
        set_slice(parameter, dataclasses.replace(held, cuts=cuts, is_expert=True))
    mixture.module.__dict__["num_experts"] = stop - start
