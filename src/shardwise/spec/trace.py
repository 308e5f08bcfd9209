"""The collectives of one training step, predicted from layouts and order alone: kind, unit, bytes, sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.spec.footprint import GroupShape


class Collective(NamedTuple):
    """One predicted collective: what it is, for which unit, and the bytes that this rank sends."""

    kind: str
    unit: str
    sent_bytes: int


def gather_bytes(group: GroupShape) -> int:
    """Bytes that a rank sends in the all-gather of a group: its slice, to every other rank."""
    return (group.layout.size - 1) * group.layout.shard_numel * group.item_bytes


def reduction_bytes(group: GroupShape, rank: int) -> int:
    """Bytes that a rank sends to reduce a group: every slice but its own; an all-reduce also spreads its own."""
    layout = group.reduce_layout
    size, numel = group.layout.size, layout.numel
    own = (rank + 1) * numel // size - rank * numel // size
    sent = numel - own
    if not group.row.shards_optimizer:
        sent += own * (size - 1)
    return sent * group.item_bytes


def step_trace(
    units: Mapping[int, tuple[str, frozenset[int], Sequence[GroupShape]]],
    *,
    rank: int,
    forward_order: Sequence[int],
    backward_order: Sequence[int],
    is_synchronising: bool = True,
    is_first_of_window: bool = True,
) -> list[Collective]:
    """What one forward and backward issue on ``rank``, in order, once the order is recorded.

    Forward gathers every unit in its order, each once; a prefetch does not change the sequence. Backward gathers what
    was released, one unit ahead, and reduces a unit when it enters one that is neither above nor below it.

    Args:
        units: By number: name, the numbers of its family (ancestors, descendants, itself), groups.
        rank: Coordinate on the data-parallel axis.
        forward_order: Unit numbers in the order of their forward calls.
        backward_order: Unit numbers as backward enters them.
        is_synchronising: Gradients are reduced; false inside ``gradient_sync(model, False)`` where sums stay local.
        is_first_of_window: Replicated parameters are brought up to date; false for the later microbatches of an
            accumulation.
    """
    trace: list[Collective] = []
    resident: set[int] = set()

    def gather(unit: int) -> None:
        name, _, groups = units[unit]
        for group in groups:
            row = group.row
            if row.shards_optimizer and (row.shards_parameters or (is_first_of_window and unit not in resident)):
                trace.append(Collective("all_gather", name, gather_bytes(group)))
        resident.add(unit)

    def reduce(unit: int) -> None:
        name, _, groups = units[unit]
        for group in groups:
            if group.is_trainable and is_synchronising:
                kind = group.row.gradient_move
                trace.append(Collective(kind, name, reduction_bytes(group, rank)))

    def is_kept(unit: int) -> bool:
        groups = units[unit][2]
        released = any(group.row.shards_parameters and group.reshards for group in groups)
        return not released or unit == forward_order[-1]

    for place, unit in enumerate(forward_order):
        if unit not in resident:
            gather(unit)
        if not (is_kept(unit) and (unit != forward_order[-1] or place == len(forward_order) - 1)):
            resident.discard(unit)

    entered: list[int] = []
    for place, unit in enumerate(backward_order):
        for other in [other for other in entered if other not in units[unit][1]]:
            if other in backward_order[place + 1 :]:
                continue
            entered.remove(other)
            reduce(other)
            resident.discard(other)
        if unit not in resident:
            gather(unit)
        if unit not in entered:
            entered.append(unit)
        upcoming = backward_order[place + 1] if place + 1 < len(backward_order) else None
        if upcoming is not None and upcoming not in resident:
            gather(upcoming)
    for unit in reversed(entered):
        reduce(unit)
    return trace
