"""The most that a backward holds beside what the engine keeps: activations, and gradients that wait.

A gradient of at least :func:`eager_numel` elements is moved into the flat buffer, and freed, as soon as it is there.
Smaller ones wait, as autograd made them, until backward leaves their unit, those of the root until its end. Meanwhile
activations become fewer. So neither the activations' own peak nor the sum of both maxima is the peak: with a(t) bytes
of activations and w(t) bytes that wait, it is the largest a(t) + w(t).

a(t) is that of the plain model, which every strategy runs alike: :class:`Activations` has its peak between one
gradient and the next. w(t) follows from shapes: it grows by each small gradient and falls by a whole unit's. (Where L
equal units of w bytes are all there is, a falls from A in L equal parts: the larger of A and A (L - 1) / L + w.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.spec.memory.footprint import UnitShape


def eager_numel(device_type: str, *, keeps_buffers: bool = True) -> int:
    """Elements of the smallest gradient that is moved as soon as it is there.

    A hook takes the host tens of microseconds; smaller gradients are moved together, by one foreach call at the end of
    their unit. On the CPU a copy of 512 x 512 elements takes longer than the hook, on a GPU one of 8,192 x 8,192. Where
    buffers are not kept all are moved together: the first would bring the buffer for its whole unit into memory.
    """
    if not keeps_buffers:
        return sys.maxsize
    return 1 << 18 if device_type == "cpu" else 1 << 26


@dataclass(frozen=True, slots=True)
class Activations:
    """What forward and backward of the plain model hold besides parameters, each gradient freed once it is complete.

    Attributes:
        arrivals: For each gradient, as they come: the name of its parameter, and the most bytes that were held since
            the one before, this one included.
        last_bytes: The most that was held after the last one.
    """

    arrivals: tuple[tuple[str, int], ...]
    last_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        return max([self.last_bytes, *(num_bytes for _, num_bytes in self.arrivals)])


def backward_bytes(activations: Activations, units: Iterable[UnitShape], *, least_numel: int) -> int:
    """The largest sum of activations and of gradients that wait for the end of their unit.

    A unit's gradients are moved when backward enters a unit that is neither above nor below it: just before that
    unit's first gradient, as far as can be told from gradients. Parameters in no unit do not wait.

    Args:
        activations: Of the plain model.
        units: Of the parallelized one.
        least_numel: Elements of the smallest gradient that does not wait (:func:`eager_numel`).
    """
    homes = _homes(units, least_numel)
    waiting: dict[int, int] = {}
    peak = 0
    for name, num_bytes in activations.arrivals:
        home = homes.get(name)
        if home is not None:
            waiting = {unit: held for unit, held in waiting.items() if unit in home.family}
        peak = max(peak, num_bytes + sum(waiting.values()))
        if home is not None:
            waiting[home.unit] = waiting.get(home.unit, 0) + home.waiting_bytes
    return max(peak, activations.last_bytes + sum(waiting.values()))


@dataclass(frozen=True, slots=True)
class _Home:
    """Where the gradient of a parameter belongs: the unit, those above and below it, and the bytes of it that wait."""

    unit: int
    family: frozenset[int]
    waiting_bytes: int


def _homes(units: Iterable[UnitShape], least_numel: int) -> Mapping[str, _Home]:
    return {
        param.name: _Home(
            group.unit, unit.family, group.gather_item_bytes * param.numel if param.numel < least_numel else 0
        )
        for unit in units
        for group in unit.groups
        if group.is_trainable
        for param in group.layout.params
    }
