"""Lists of layers: units that one module calls one after another, and of which a rank may leave out some."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerList:
    """Units that follow one another, of which a rank may leave out some.

    Attributes:
        members: By member, its number and the numbers of the units inside it, in the order in which they are reached.
        scope: All units inside the module that calls the members.
    """

    members: tuple[tuple[int, ...], ...]
    scope: frozenset[int]

    def reversed(self) -> LayerList:
        """The same, as backward goes through it: each member before the units inside it, as in forward."""
        members = tuple((head, *reversed(inner)) for head, *inner in reversed(self.members))
        return LayerList(members, self.scope)

    def place_of(self, unit: int | None) -> int | None:
        """Of the member that ``unit`` is, or is inside of."""
        return next((place for place, member in enumerate(self.members) if unit in member), None)

    def places(self, reached: Collection[int]) -> list[int]:
        """Of the members that were reached."""
        return [place for place, (head, *_) in enumerate(self.members) if head in reached]

    def missing(self, unit: int | None, reached: Collection[int], first_place: int | None) -> Sequence[tuple[int, ...]]:
        """The members behind those that were reached that a peer may run before ``unit`` (``None``: before the end).

        All of them where the list has been left. Another list of the same module comes after this one where it begins
        while this one is further on (``first_place``: where it begins); else the two take turns.
        """
        places = self.places(reached)
        last = places[-1] if places else -1
        place = self.place_of(unit)
        if place is not None:
            return self.members[last + 1 : place]
        is_left = unit not in self.scope or (first_place is not None and first_place < last)
        return self.members[last + 1 :] if places and is_left else ()
