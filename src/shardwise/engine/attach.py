"""Attachments of an engine: observers, guards, objects of other packages, and the order of a step's passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardwise.spec.order import EntryPoint

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group
    from shardwise.engine.unit import Unit

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Any)


class Observer:
    """Base class of observers: the engine calls the methods that a subclass overrides at the moments of a step.

    An observer may raise, communicate (the same on all ranks) and change ``.grad``. It must not gather or release, nor
    keep a strong reference to the engine for longer than a step.

    Attributes:
        updates_in_backward: Whether the observer lets optimizers step when a group's gradients are reduced.
        is_stepping: Whether one of these optimizers is stepping now.
        num_ranks_with_data: Number of ranks over which gradients are averaged; ``None``: all that share the model.
    """

    updates_in_backward = False
    is_stepping = False
    num_ranks_with_data: int | None = None

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:
        """Called before an outermost forward begins through ``entry``; ``engine.forward.trains`` is set."""

    def forward_ended(self, engine: Engine) -> None:
        """Called when the outermost forward has ended, by return or exception."""

    def before_gather(self, engine: Engine, unit: Unit, group: Group, *, is_kept: bool) -> None:
        """Called before the all-gather of a group; ``is_kept``: from shards kept over few ranks (``Form.keep``)."""

    def backward_begins(self, engine: Engine) -> None:
        """Called when backward has reached its first unit."""

    def before_reduce(self, engine: Engine, unit: Unit) -> None:
        """Called when the gradients of a unit are collected, before their reductions are issued."""

    def reduced(self, engine: Engine, unit: Unit, group: Group) -> None:
        """Called when a reduction of a group has been waited for; after the last of a step, ``.grad`` is set."""

    def backward_ended(self, engine: Engine) -> None:
        """Called when a backward has ended. If it synchronized, every unit's gradients are on their shards."""


class Extras:
    """Objects that other packages attach to an engine: at most one of each class.

    The engine calls observers among them at the moments of a step. For each moment there is a tuple of the methods to
    call. An empty one costs nothing.

    Attributes:
        observers: The observers among the objects, in the order in which they are called.
        guards: Functions that are called before a call of the user (``"a forward"``, ``"sw.save()"``, ...) uses the
            parameters' values; they may refuse it.
        before_step: Functions that are called with an optimizer that is about to step, outside of backward.
        before_state: Functions that are called before the state of the whole model is read. They make buffers that
            should be equal on all ranks equal.
        host_waits: Functions that make the host wait for copies from and to its memory, and for optimizer updates that
            run there in parallel with a backward.
    """

    def __init__(self) -> None:
        self.guards: list[Callable[[Engine, str], None]] = []
        self.before_step: list[Callable[[Engine, torch.optim.Optimizer], None]] = []
        self.before_state: list[Callable[[], object]] = []
        self.host_waits: list[Callable[[], None]] = []
        self._by_class: dict[type, Any] = {}
        self.observers: tuple[Observer, ...] = ()
        self._paused: tuple[Observer, ...] = ()
        self._sort()

    def add(self, extra: object, *, is_first: bool = False) -> None:
        """Add an object; an observer is called after the other observers, or with ``is_first`` before them."""
        self._by_class[type(extra)] = extra
        if isinstance(extra, Observer):
            self.observers = (extra, *self.observers) if is_first else (*self.observers, extra)
            self._sort()

    def remove(self, extra: object) -> None:
        """Undo :meth:`add`."""
        self._by_class.pop(type(extra), None)
        self.observers = tuple(other for other in self.observers if other is not extra)
        self._sort()

    def find(self, kind: type[_T]) -> _T | None:
        """Return the object of a class, or ``None``."""
        return self._by_class.get(kind)

    def get_or_make(self, kind: type[_T]) -> _T:
        """Return the object of a class; the first call makes it."""
        if kind not in self._by_class:
            self.add(kind())
        return self._by_class[kind]

    def pause(self, observer: Observer) -> None:
        """Stop calling an observer until :meth:`resume_all`, because steps repeat."""
        self._paused += (observer,)
        self._sort()

    def resume_all(self) -> None:
        """Undo every :meth:`pause`: this step differs from earlier ones (a new entry into the model, another path)."""
        if self._paused:
            self._paused = ()
            self._sort()

    def _sort(self) -> None:
        self._active = [each for each in self.observers if not any(each is paused for paused in self._paused)]
        self.forward_begins = self._overridden(lambda each: each.forward_begins)
        self.forward_ended = self._overridden(lambda each: each.forward_ended)
        self.before_gather = self._overridden(lambda each: each.before_gather)
        self.backward_begins = self._overridden(lambda each: each.backward_begins)
        self.before_reduce = self._overridden(lambda each: each.before_reduce)
        self.reduced = self._overridden(lambda each: each.reduced)
        self.backward_ended = self._overridden(lambda each: each.backward_ended)

    def _overridden(self, method_of: Callable[[Observer], _F]) -> tuple[_F, ...]:
        """The methods of the observers whose class overrides the method of a moment."""
        return tuple(
            method
            for method in map(method_of, self._active)
            if getattr(type(method.__self__), method.__name__) is not getattr(Observer, method.__name__)
        )


class Step:
    """The order of forwards and backwards between two updates of the parameters: here one of each.

    Attributes:
        skips_hooks: Whether hooks return at once, because all units are gathered and stay so until the step ends.
        keeps_units: Whether units with :meth:`is_kept` stay gathered, and modules keep the full parameters.
        entry: The entry into the model of the next forward; ``None``: the module that is called.
        ends_with_backward: Whether the end of a backward waits for all reductions.
    """

    skips_hooks = False
    keeps_units = False
    entry: EntryPoint | None = None
    ends_with_backward = True

    def is_kept(self, unit: Unit) -> bool:  # noqa: ARG002
        """Whether a unit stays gathered while no call of it runs."""
        return False

    def after_collect(self, engine: Engine, unit: Unit) -> None:
        """Called when a backward that does not synchronize has left ``unit`` and collected its gradients."""

    def refuse(self, what: str) -> None:
        """Refuse the call ``what`` if it must not happen inside the step."""

    def refuse_grad(self) -> None:
        """Refuse a forward with grad while hooks are skipped."""


class Window:
    """The state between two updates of the parameters.

    Attributes:
        mode: How gradients of several backwards are added up: the plan's accumulation mode.
        syncs: Whether the next backward is the last one of the window, so that gradients are reduced.
        is_open: Whether the parameters are unchanged since the forward before, so that gathered buffers stay up to
            date: a backward that was not the last one has ended, or a step of several forwards is under way.
        step: The order of forwards and backwards.
        evaluates: Whether all ranks make forwards without grad together, so that each may take a different path.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.syncs = True
        self.is_open = self.evaluates = False
        self.step = Step()

    def sync(self, *, is_last: bool, mode: str | None = None) -> None:
        """Set whether backwards from now on reduce gradients, and the mode in which those before the last are added."""
        self.syncs = is_last
        self.mode = mode or self.mode

    @contextlib.contextmanager
    def override(self, **fields: Any) -> Iterator[None]:
        """Give attributes of the window different values inside the context."""
        before = {name: getattr(self, name) for name in fields}
        vars(self).update(fields)
        try:
            yield
        finally:
            vars(self).update(before)

    def close(self) -> None:
        """Close the window because the parameters change: gathered buffers are then out of date."""
        self.is_open = False
