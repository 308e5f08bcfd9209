"""The agreed orders of a model, one for each way into it, and the lists of layers that they know of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardwise.engine.unit import Unit
from shardwise.spec.order import AgreedOrder, LayerList

#: Where a forward comes in: a unit's number, and the path of the module in it that was called ("": the unit's own).
Entry = tuple[int, str]
ROOT_ENTRY: Entry = (0, "")
#: Of the passes through one pipeline stage of a model: ``(_STAGES, "2")``, no unit's.
_STAGES = -1


def stage_entry(stage: int) -> Entry:
    """Of the passes through a pipeline stage: they all take one path, in which no layer is left out."""
    return _STAGES, str(stage)


class Orders(dict[Entry, AgreedOrder]):
    """One order for each entry: the module through which a forward comes in, or came in that is now run backward.

    Args:
        make: Makes the order of an entry that comes for the first time.
    """

    def __init__(self, make: Callable[[Entry], AgreedOrder]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, entry: Entry) -> AgreedOrder:
        """A new order."""
        self[entry] = order = self._make(entry)
        return order

    def known(self) -> list[list[Any]]:
        """Entry and recorded order of each, as JSON holds them."""
        return [[*entry, list(order.units)] for entry, order in self.items() if order.is_recorded]

    def take(self, known: Sequence[list[Any]]) -> None:
        """Take over what :meth:`known` gave on another rank."""
        for index, path, units in known:
            self[index, path].take(units)


class Paths:
    """All agreed orders of a model, and those in force.

    Attributes:
        forward: Of gathers in forwards that train.
        evaluation: Of gathers in others; only to prefetch.
        backward: Of the units that backward enters.
        entry: The way in of the newest outermost forward.
        gathers: In force in it.
        entries: In force in the newest backward.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.forward = Orders(lambda entry: AgreedOrder(_layer_lists(units, entry)))
        self.evaluation = Orders(lambda _entry: AgreedOrder())
        self.backward = Orders(
            lambda entry: AgreedOrder(
                [layers.reversed() for layers in _layer_lists(units, entry)], lambda index: units[index].calls.has_run
            )
        )
        self.entry = ROOT_ENTRY
        self.gathers = self.forward[ROOT_ENTRY]
        self.entries = self.backward[ROOT_ENTRY]

    @property
    def all(self) -> tuple[Orders, ...]:
        """Those of forwards, evaluations and backwards."""
        return self.forward, self.evaluation, self.backward

    def enter(self, entry: Entry, *, trains: bool) -> None:
        """An outermost forward begins."""
        self.entry = entry
        self.gathers = (self.forward if trains else self.evaluation)[entry]

    def enter_backward(self, entry: Entry) -> None:
        """The backward of such a forward begins."""
        self.entries = self.backward[entry]
        self.entries.start()

    def has_backward(self, index: int) -> bool:
        """Whether backward has entered the unit of this number in some step."""
        return any(index in order for order in self.backward.values())


def units_in(orders: Orders) -> tuple[int, ...]:
    """The units of an order through the whole model, or one stage after the other; empty before the first step."""
    stages = [order.units for (index, _), order in orders.items() if index == _STAGES]
    return tuple(dict.fromkeys(unit for units in stages for unit in units)) or orders[ROOT_ENTRY].units


def _layer_lists(units: Sequence[Unit], entry: Entry) -> list[LayerList]:
    index, path = entry
    return [] if index == _STAGES else find_layer_lists(units, path or units[index].path)


def find_layer_lists(units: Sequence[Unit], path: str = "") -> list[LayerList]:
    """The lists of layers that were made units, at ``path`` and below, those of inner modules first.

    ``units[0]`` is the root.

    One is what a module holds in one ``nn.ModuleList``, lists in that list included: the module calls its members in
    the order of registration. Members of an ``nn.ModuleDict`` are alternatives, and those of an ``nn.Sequential`` are
    never left out.
    """
    root = units[0].members[0].module()
    assert root is not None
    found: dict[tuple[str, str], list[int]] = {}
    for index, unit in enumerate(units[1:], 1):
        places = {_list_of(root, member.path) for member in unit.members}
        place = places.pop() if len(places) == 1 else None  # sw.fully_shard of a list takes modules from anywhere
        if place is not None and f"{place[0]}.".startswith(f"{path}." if path else ""):
            found.setdefault(place, []).append(index)
    inner_first = sorted(found, key=lambda place: -len(place[0]))
    return [
        _layer_list(units, place[0], found[place]) for place in inner_first if _num_modules(units, found[place]) > 1
    ]


def _num_modules(units: Sequence[Unit], indices: Sequence[int]) -> int:
    return sum(len(units[index].members) for index in indices)


def _list_of(root: nn.Module, name: str) -> tuple[str, str] | None:
    """The module that calls the unit at ``name``, and the attribute of it that lists the unit."""
    scope, _, child = name.rpartition(".")
    is_listed = False
    while scope and not is_called(holder := root.get_submodule(scope)):
        if isinstance(holder, nn.ModuleDict):
            return None
        is_listed = True
        scope, _, child = scope.rpartition(".")
    return (scope, child) if is_listed else None


def _layer_list(units: Sequence[Unit], scope: str, indices: Sequence[int]) -> LayerList:
    def inside(path: str) -> list[int]:
        return [index for index, unit in enumerate(units) if index and unit.path.startswith(path)]

    members = tuple((index, *inside(f"{units[index].path}.")) for index in indices)
    return LayerList(members, frozenset(inside(f"{scope}." if scope else "")))


#: Modules whose forward is never called: they only hold others.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_called(module: nn.Module) -> bool:
    """Whether the module can be called at all: containers, and classes without a ``forward``, only hold others."""
    return not isinstance(module, CONTAINERS) and type(module).forward is not nn.Module.forward
