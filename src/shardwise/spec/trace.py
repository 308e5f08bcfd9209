"""The collectives of one training step, predicted from layouts and order alone: kind, unit, bytes, sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.spec.footprint import GroupShape, summed_numel


class Collective(NamedTuple):
    """One predicted collective: what it is, for which unit, and the bytes that this rank sends."""

    kind: str
    unit: str
    sent_bytes: int


@dataclass(frozen=True)
class UnitShape:
    """A unit as the arithmetic sees it.

    Attributes:
        name: As in the events that are recorded.
        family: Numbers of its ancestors, its descendants and itself.
        groups: Its groups.
    """

    name: str
    family: frozenset[int]
    groups: Sequence[GroupShape]

    @property
    def is_released(self) -> bool:
        """Its parameters are released between forward and backward."""
        return any(group.row.shards_parameters and group.reshards for group in self.groups)


def gather_bytes(group: GroupShape, rank: int) -> int:
    """Bytes that a rank sends in the all-gather of a group: its slice, to every other rank."""
    return (group.layout.size - 1) * group.layout.slice_numel(rank) * group.gather_item_bytes


def reduction_bytes(group: GroupShape, rank: int) -> int:
    """Bytes that a rank sends to reduce a group: every slice but its own; an all-reduce also spreads its own."""
    own = summed_numel(group, rank)
    sent = group.reduce_layout.numel - own
    if not group.row.shards_optimizer:
        sent += own * (group.layout.size - 1)
    return sent * group.reduce_item_bytes


def step_trace(
    units: Mapping[int, UnitShape],
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
        units: By number.
        rank: Coordinate on the data-parallel axis.
        forward_order: Unit numbers in the order of their forward calls.
        backward_order: Unit numbers as backward enters them.
        is_synchronising: Gradients are reduced; false inside ``gradient_sync(model, False)`` where sums stay local.
        is_first_of_window: Replicated parameters are brought up to date; false for the later microbatches of an
            accumulation.
    """
    step = _Step(units, rank, is_synchronising=is_synchronising, is_first_of_window=is_first_of_window)
    step.forward(forward_order)
    step.backward(backward_order)
    return step.trace


class _Step:
    """Walks through one step. ``resident``: units whose gathered buffer is up to date."""

    def __init__(
        self, units: Mapping[int, UnitShape], rank: int, *, is_synchronising: bool, is_first_of_window: bool
    ) -> None:
        self.trace: list[Collective] = []
        self._units = units
        self._rank = rank
        self._reduces = is_synchronising
        self._refreshes = is_first_of_window
        self._resident: set[int] = set()
        self._entered: list[int] = []

    def forward(self, order: Sequence[int]) -> None:
        for place, unit in enumerate(order):
            self._need(unit)
            is_last = place == len(order) - 1
            if self._units[unit].is_released and not is_last:
                self._resident.discard(unit)

    def backward(self, order: Sequence[int]) -> None:
        for place, unit in enumerate(order):
            later = order[place + 1 :]
            for other in [other for other in self._entered if other not in self._units[unit].family]:
                if other not in later:
                    self._leave(other)
            self._need(unit)
            if unit not in self._entered:
                self._entered.append(unit)
            if later:
                self._need(later[0])
        for unit in reversed(self._entered.copy()):
            self._leave(unit)

    def _need(self, unit: int) -> None:
        if unit in self._resident:
            return
        self._resident.add(unit)
        shape = self._units[unit]
        for group in shape.groups:
            if group.row.shards_optimizer and (group.row.shards_parameters or self._refreshes):
                self.trace.append(Collective("all_gather", shape.name, gather_bytes(group, self._rank)))

    def _leave(self, unit: int) -> None:
        self._entered.remove(unit)
        shape = self._units[unit]
        for group in shape.groups:
            if group.is_trainable and self._reduces:
                sent = reduction_bytes(group, self._rank)
                self.trace.append(Collective(group.row.gradient_move, shape.name, sent))
        if any(group.row.shards_parameters for group in shape.groups):
            self._resident.discard(unit)
