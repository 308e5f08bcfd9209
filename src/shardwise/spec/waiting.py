"""The most that a backward holds beside what the engine keeps: activations, and gradients that wait.

A gradient of at least ``eager_numel`` elements is moved into the flat buffer, and freed, as soon as it is there.
Smaller ones wait, as autograd made them, until backward leaves their unit, those of the root until its end. Meanwhile
activations become fewer. So neither the activations' own peak nor the sum of both maxima is the peak: with a(t) bytes
of activations and w(t) bytes that wait, it is the largest a(t) + w(t).

a(t) is that of the plain model, which every strategy runs alike: :class:`Activations` has its peak between one
gradient and the next. w(t) follows from shapes: it grows by each small gradient and falls by a whole unit's. (Where L
equal units of w bytes are all there is, a falls from A in L equal parts: the larger of A and A (L - 1) / L + w.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.spec.trace import UnitShape


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


def backward_bytes(activations: Activations, units: Iterable[UnitShape], *, eager_numel: int) -> int:
    """The largest sum of activations and of gradients that wait for the end of their unit.

    A unit's gradients are moved when backward enters a unit that is neither above nor below it: just before that
    unit's first gradient, as far as can be told from gradients. Parameters in no unit do not wait.

    Args:
        activations: Of the plain model.
        units: Of the parallelized one.
        eager_numel: Elements of the smallest gradient that does not wait.
    """
    homes = _homes(units, eager_numel)
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


def _homes(units: Iterable[UnitShape], eager_numel: int) -> Mapping[str, _Home]:
    return {
        param.name: _Home(
            group.unit, unit.family, group.gather_item_bytes * param.numel if param.numel < eager_numel else 0
        )
        for unit in units
        for group in unit.groups
        if group.is_trainable
        for param in group.layout.params
    }
