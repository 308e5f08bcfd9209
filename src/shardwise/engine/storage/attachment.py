"""Marks on parallelized modules and on shards, by which the engine of a module or parameter is found."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.unit import Unit
from shardwise.spec.errors import StateError, Uncopyable

_MODULE_KEY = "_shardwise"
_PARAMETER_KEY = "_shardwise_mark"
#: In the ``__dict__`` of a module of another pipeline stage: a weak reference to the model.
ROOT_KEY = "_shardwise_root"


class Attachment(Uncopyable):
    """The engine and unit of a unit's module, stored in the module."""

    __slots__ = ("engine", "unit")

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self.engine = engine
        self.unit = unit


class Mark:
    """The group of a sharded parameter, and its number in the group."""

    __slots__ = ("_group", "index")

    def __init__(self, group: Group, index: int) -> None:
        self._group = weakref.ref(group)
        self.index = index

    @property
    def group(self) -> Group | None:
        """The group, while its model lives."""
        return self._group()


def attach(engine: Engine) -> None:
    """Attach the engine to the modules of every unit."""
    for unit in engine.units:
        for member in unit.members:
            module = member.module()
            assert module is not None
            module.__dict__[_MODULE_KEY] = Attachment(engine, unit)


def mark_shards(units: Iterable[Unit]) -> None:
    """Mark every shard with its group; call it before the full parameters are made, because these copy the marks."""
    for unit in units:
        for group in unit.groups:
            for index, shard in enumerate(group.shards):
                setattr(shard, _PARAMETER_KEY, Mark(group, index))


def attachment_of(module: nn.Module) -> Attachment | None:
    """The attachment that :func:`attach` made, or ``None``."""
    return module.__dict__.get(_MODULE_KEY)


def engine_around(module: nn.Module) -> Engine | None:
    """The engine of a unit's module, or of a module of another pipeline stage; ``None`` for other modules."""
    root = module.__dict__.get(ROOT_KEY, lambda: None)()
    attachment = attachment_of(module if root is None else root)
    return None if attachment is None else attachment.engine


def engine_of_unit(unit: Unit) -> Engine | None:
    """The engine of a unit; ``None`` once its model has been deleted."""
    for member in unit.members:
        module = member.module()
        attachment = attachment_of(module) if module is not None else None
        if attachment is not None:
            return attachment.engine
    return None


def engine_of(module: nn.Module, call: str, *, on_shards: bool = True) -> Engine:
    """Return the engine of which ``module`` is the root or another unit.

    Args:
        module: The module that the user passed.
        call: Name of the function that the user called, for errors.
        on_shards: Whether the call works on shards, so that it is refused inside ``full_parameters``.

    Raises:
        StateError: The module is not parallelized, or shows full parameters although ``call`` needs shards.
    """
    attachment = attachment_of(module)
    if attachment is None:
        inner: dict[Engine, str] = {}  # the outermost module of each engine
        for path, part in module.named_modules():
            if (found := attachment_of(part)) is not None:
                inner.setdefault(found.engine, path)
        is_part = any(mark_of(parameter) is not None for parameter in module.parameters())
        what = "is a part of a parallelized model" if is_part and not inner else "is not parallelized"
        advice = "Call model = sw.parallelize(model, plan) first, and pass that model."
        if len(inner) > 1:
            first, second, *others = map(repr, inner.values())
            parts = f"{first} and {second}" if not others else f"{first}, {second} and {len(others)} more parts"
            advice = (
                f"Its {parts} are, each as a model of its own; call sw.parallelize() once, on the module around them"
                " (after sw.fully_shard() of parts, sw.fully_shard() of that module)."
            )
        elif inner:
            advice = f"Its {next(iter(inner.values()))!r} is; pass that module, without the wrapper around it."
        elif is_part:
            advice = "Pass the whole model, which sw.parallelize() has returned."
        raise StateError(f"{call} got a {type(module).__name__} that {what}.\n  {advice}")
    engine = attachment.engine
    if on_shards and any(unit.shown_mode is not None for unit in engine.units):
        raise StateError(
            f"{call} works on shards, but sw.full_parameters() shows whole parameters now.\n"
            "  Call it outside; inside, use module.state_dict() and the parameters themselves."
        )
    return engine


def mark_of(parameter: Tensor) -> Mark | None:
    """The mark that :func:`mark_shards` made; ``None`` for a parameter that is not sharded."""
    return parameter.__dict__.get(_PARAMETER_KEY) if hasattr(parameter, "__dict__") else None


def group_and_index(parameter: Tensor) -> tuple[Group, int] | None:
    """The group of a shard and its number there; ``None`` for other parameters, or if the model has been deleted."""
    mark = mark_of(parameter)
    group = mark.group if mark is not None else None
    return None if mark is None or group is None else (group, mark.index)
