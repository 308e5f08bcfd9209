"""Attachments of an engine: observers, guards, objects that other packages keep with it, ways through a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardwise.spec.order import Entry

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group
    from shardwise.engine.unit import Unit

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Any)


class Observer:
    """Is told of the moments of a step that its class overrides.

    An observer may raise, communicate (on all ranks alike) and change ``.grad``; it must not gather or release. It must
    not hold the engine by a strong reference for longer than a step.

    Attributes:
        updates_in_backward: It lets optimizers step when a group's gradients are reduced.
        is_stepping: One of these steps right now.
        num_ranks_with_data: Ranks over which means are taken, where it knows better.
    """

    updates_in_backward = False
    is_stepping = False
    num_ranks_with_data: int | None = None

    def forward_begins(self, engine: Engine, entry: Entry) -> None:
        """An outermost forward is about to begin, through ``entry``. ``engine.forward.trains`` is known."""

    def forward_ended(self, engine: Engine) -> None:
        """The outermost forward has ended, by return or exception."""

    def before_gather(self, engine: Engine, unit: Unit, group: Group, *, is_kept: bool) -> None:
        """The all-gather of a group is about to be issued; ``is_kept``: of what was kept over a few neighbours."""

    def backward_begins(self, engine: Engine) -> None:
        """Backward has reached its first unit."""

    def before_reduce(self, engine: Engine, unit: Unit) -> None:
        """The gradients of a unit are collected; their reductions are about to be issued."""

    def reduced(self, engine: Engine, unit: Unit, group: Group) -> None:
        """A reduction of a group has been waited for. After the last of a step its gradients are on its shards."""

    def backward_ended(self, engine: Engine) -> None:
        """A backward is over. Where it synchronised, every unit's gradients are on their shards."""


class Extras:
    """Objects that other packages keep with an engine: at most one of each class.

    Those that are observers are told of the moments of a step. For each moment there is a tuple of the methods that
    listen: empty, it costs nothing.

    Attributes:
        observers: Those of them that are told of moments, in this order.
        guards: Called before a call of the user (``"a forward"``, ``"sw.save()"``, ...) uses the parameters' values;
            they may refuse it.
        before_step: Called with an optimizer that is about to step, outside of backward.
        before_state: Called when the state of the whole model is about to be read: they make equal over the ranks what
            should be.
        host_waits: Have the host wait for copies from and to it, and for updates that run beside a backward.
    """

    def __init__(self) -> None:
        self.guards: list[Callable[[Engine, str], None]] = []
        self.before_step: list[Callable[[Engine, torch.optim.Optimizer], None]] = []
        self.before_state: list[Callable[[], object]] = []
        self.host_waits: list[Callable[[], None]] = []
        self._by_class: dict[type, Any] = {}
        self.observers: tuple[Observer, ...] = ()
        self._resting: tuple[Observer, ...] = ()
        self._sort()

    def add(self, extra: object, *, is_first: bool = False) -> None:
        """Keep an object; an observer is told from now on, after the others or before them."""
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
        """The object of a class, if there is one."""
        return self._by_class.get(kind)

    def take(self, kind: type[_T]) -> _T:
        """The object of a class, made at the first call."""
        if kind not in self._by_class:
            self.add(kind())
        return self._by_class[kind]

    def rest(self, observer: Observer) -> None:
        """Tell an observer nothing more while steps are alike."""
        self._resting += (observer,)
        self._sort()

    def wake(self) -> None:
        """Undo every :meth:`rest`: this step is unlike those before (a new way into the model, another path)."""
        if self._resting:
            self._resting = ()
            self._sort()

    def _sort(self) -> None:
        self._awake = [each for each in self.observers if not any(each is resting for resting in self._resting)]
        self.forward_begins = self._listening(lambda each: each.forward_begins)
        self.forward_ended = self._listening(lambda each: each.forward_ended)
        self.before_gather = self._listening(lambda each: each.before_gather)
        self.backward_begins = self._listening(lambda each: each.backward_begins)
        self.before_reduce = self._listening(lambda each: each.before_reduce)
        self.reduced = self._listening(lambda each: each.reduced)
        self.backward_ended = self._listening(lambda each: each.backward_ended)

    def _listening(self, method_of: Callable[[Observer], _F]) -> tuple[_F, ...]:
        """The methods of those observers that do something at a moment."""
        return tuple(
            method
            for method in map(method_of, self._awake)
            if getattr(type(method.__self__), method.__name__) is not getattr(Observer, method.__name__)
        )


class Step:
    """The order of forwards and backwards between two updates of the parameters: here one of each.

    Attributes:
        skips_hooks: All units are gathered and in their modules and stay so: the hooks return at once.
        holds: What is gathered stays so, and in its modules, while :meth:`keeps` says so.
        entry: The way into the model that the next forward takes; ``None``: the module that is called.
        ends_with_backward: The end of a backward waits for all reductions.
    """

    skips_hooks = False
    holds = False
    entry: Entry | None = None
    ends_with_backward = True

    def keeps(self, unit: Unit) -> bool:  # noqa: ARG002
        """Whether a unit stays gathered though nothing computes with it now."""
        return False

    def leave(self, engine: Engine, unit: Unit) -> None:
        """A backward that does not synchronise has left ``unit``, and collected its gradients."""

    def refuse(self, what: str) -> None:
        """Refuse what must not happen inside the step."""

    def refuse_grad(self) -> None:
        """Refuse a forward with grad, where the hooks are skipped."""


class Window:
    """The state between two updates of the parameters.

    Attributes:
        mode: How gradients of several backwards are added up, in the plan's words.
        syncs: The next backward is the last one: gradients are reduced.
        is_open: The parameters are those of the forward before (a backward that was not the last one has ended, or a
            step of several forwards is under way): what is gathered stays up to date.
        step: How forwards and backwards follow one another.
        evaluates: Forwards without grad are made by all ranks together, so that each may take a path of its own.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.syncs = True
        self.is_open = self.evaluates = False
        self.step = Step()

    def sync(self, *, is_last: bool, mode: str | None = None) -> None:
        """Say whether the backwards from now on are the last ones, and how those that are not are added up."""
        self.syncs = is_last
        self.mode = mode or self.mode

    @contextlib.contextmanager
    def having(self, **fields: Any) -> Iterator[None]:
        """Give attributes of the window other values inside."""
        before = {name: getattr(self, name) for name in fields}
        vars(self).update(fields)
        try:
            yield
        finally:
            vars(self).update(before)

    def close(self) -> None:
        """The parameters change: what is gathered is out of date."""
        self.is_open = False
