"""The peak of a backward beside what the engine keeps: activations, and gradients that wait for the end of their unit.

Gradients are copied into a flat buffer, and freed, when backward leaves their unit, those of the root at the end of
backward. Meanwhile activations are freed. With a(t) bytes of activations and w(t) bytes of waiting gradients, the peak
is the largest a(t) + w(t).

a(t) is that of the plain model, the same under every strategy: :class:`Activations` holds its peak between one
gradient and the next. w(t) follows from shapes: it grows by each gradient, and falls by those of a whole unit. With L
equal units of w bytes and activations that fall from A in L equal parts, the peak is the larger of A and
A (L - 1) / L + w.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.spec.facts import UnitFacts


@dataclass(frozen=True, slots=True)
class Activations:
    """What forward and backward of the plain model hold besides parameters, each gradient freed once it is complete.

    Attributes:
        arrivals: For each gradient, in the order of backward: the name of its parameter, and the peak of bytes since
            the gradient before, this one included.
        last_bytes: The peak after the last gradient.
    """

    arrivals: tuple[tuple[str, int], ...]
    last_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The peak over the whole backward."""
        return max([self.last_bytes, *(num_bytes for _, num_bytes in self.arrivals)])


def backward_bytes(activations: Activations, units: Iterable[UnitFacts]) -> int:
    """The largest sum of activations and of gradients that wait for the end of their unit, in bytes.

    Gradients of a unit are copied when backward enters a unit that neither encloses it nor lies in it; here that is
    taken to be just before the first gradient of that unit. Parameters in no unit do not wait.

    Args:
        activations: Activations of the plain model.
        units: Units of the parallelized model.
    """
    homes = _homes(units)
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
    """The unit of a parameter, the units around and inside it, and the bytes of its gradient that wait."""

    unit: int
    family: frozenset[int]
    waiting_bytes: int


def _homes(units: Iterable[UnitFacts]) -> Mapping[str, _Home]:
    return {
        param.name: _Home(group.unit, unit.family, group.gather_item_bytes * param.numel)
        for unit in units
        for group in unit.groups
        if group.is_trainable
        for param in group.layout.params
    }
