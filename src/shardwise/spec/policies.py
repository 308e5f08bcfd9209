"""What a plan may say of units, recomputation, offloading and ignored parameters, as plain data.

``features.wrap``, ``features.recompute``, ``forms.host`` and ``features.ignored`` apply them to a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from shardwise.spec.errors import PlanError
from shardwise.spec.placement import Placements


@dataclass(frozen=True, slots=True)
class WrapByClass:
    """Every module of one of these classes is a unit. Classes are given as such or by class name."""

    classes: tuple[type | str, ...]

    def matches(self, module: object) -> bool:
        """Whether ``module`` is an instance of one of the classes."""
        names = {cls.__name__ for cls in type(module).__mro__}
        return any(c in names if isinstance(c, str) else isinstance(module, c) for c in self.classes)

    def __str__(self) -> str:
        shown = ", ".join(sorted(c if isinstance(c, str) else c.__name__ for c in self.classes))
        return f"wrap_by_class({{{shown}}})"


@dataclass(frozen=True, slots=True)
class WrapBySize:
    """Bottom up, a module with at least ``min_num_params`` parameters that no unit below it holds yet is a unit."""

    min_num_params: int

    def __str__(self) -> str:
        return f"wrap_by_size(min_num_params={self.min_num_params})"


@dataclass(frozen=True, slots=True)
class WrapByName:
    """Every module whose qualified name matches one of these shell patterns is a unit; ``*`` does not cross a dot."""

    patterns: tuple[str, ...]

    def __str__(self) -> str:
        return f"wrap_by_name({', '.join(map(repr, self.patterns))})"


WrapPolicy = WrapByClass | WrapBySize | WrapByName


def wrap_by_class(classes: Iterable[type | str] | type | str) -> WrapByClass:
    """A policy that makes every module of the given classes a unit, for example ``wrap_by_class({T5Block})``.

    Raises:
        PlanError: No class is given, or something that is neither a class nor a class name.
    """
    given = (classes,) if isinstance(classes, (type, str)) else tuple(classes)
    if not given:
        raise PlanError("wrap_by_class() got no class.\n  Name at least one, or use auto_wrap_policy='none'.")
    for cls in given:
        if not isinstance(cls, (type, str)):
            raise PlanError(f"wrap_by_class() takes classes or class names, got {cls!r}.\n  Pass the class itself.")
    return WrapByClass(tuple(sorted(given, key=lambda c: c if isinstance(c, str) else c.__qualname__)))


def wrap_by_size(min_num_params: int) -> WrapBySize:
    """A policy that makes modules units from ``min_num_params`` parameters on.

    Raises:
        PlanError: The number is not a positive whole number.
    """
    if isinstance(min_num_params, bool) or not isinstance(min_num_params, int) or min_num_params < 1:
        raise PlanError(
            f"wrap_by_size(min_num_params={min_num_params!r}): expected a whole number of at least 1.\n"
            "  A transformer block of hidden size h has about 12 h^2 parameters; start there."
        )
    return WrapBySize(min_num_params)


def wrap_by_name(*patterns: str) -> WrapByName:
    """A policy that makes modules units by qualified name, for example ``wrap_by_name("layers.*")``.

    Raises:
        PlanError: No pattern is given, or an empty one.
    """
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise PlanError(f"wrap_by_name() takes one or more patterns such as 'layers.*', got {patterns!r}.")
    return WrapByName(tuple(patterns))


def wrap_policy(value: object, field: str) -> str | WrapPolicy:
    """A policy, ``"auto"`` or ``"none"``, from one of these or the mapping that a configuration file writes.

    Raises:
        PlanError: The value of ``field`` is none of these.
    """
    if isinstance(value, WrapByClass | WrapBySize | WrapByName) or (
        isinstance(value, str) and value in {"auto", "none"}
    ):
        return value
    usage = (
        "  Use 'auto', 'none', wrap_by_class(...), wrap_by_size(...), wrap_by_name(...), or in a file one of "
        "{by_class: [names]}, {by_size: number}, {by_name: [globs]}."
    )
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in {"by_class", "by_size", "by_name"}:
        raise PlanError(f"{field}={value!r} is not a wrap policy.\n{usage}")
    key, content = next(iter(value.items()))
    if key == "by_size":
        if isinstance(content, bool) or not isinstance(content, int) or content < 1:
            raise PlanError(f"{field} by_size={content!r}: expected a positive number of elements.\n{usage}")
        return WrapBySize(content)
    names = [content] if isinstance(content, str) else content
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"{field} {key}={content!r}: expected a list of names.\n{usage}")
    return WrapByClass(tuple(names)) if key == "by_class" else WrapByName(tuple(names))


#: Families of operators that ``RecomputePolicy.save`` knows by name; what is in them is said in ``features.recompute``.
OPERATOR_FAMILIES = ("matmul", "attention")

_USAGE = (
    "  Use 'none', 'full', 'selective', a wrap policy that names modules, or RecomputePolicy(modules=..., every=...,"
    " save=...)."
)


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """Which modules are recomputed in backward, and which operators' outputs are kept all the same.

    Attributes:
        modules: ``"units"``, the outermost units below the root, or a wrap policy (in a file, the mapping that
            describes one) for modules of any other cut.
        every: Every how many-th of those modules is recomputed, the first one included.
        save: Operators whose outputs are kept, so that only the rest is recomputed: ``"matmul"``, ``"attention"``, or
            operators by name (``"aten.gelu"``, ``"my_library.my_op.default"``). Empty: everything is recomputed.

    Raises:
        PlanError: A value is none of these.
    """

    modules: str | WrapPolicy | Mapping[str, Any] = "units"
    every: int = 1
    save: tuple[str, ...] | list[str] | str = ()

    def __post_init__(self) -> None:
        if self.modules != "units":
            object.__setattr__(self, "modules", _modules(self.modules))
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise PlanError(
                f"RecomputePolicy(every={self.every!r}): expected a whole number of at least 1.\n"
                "  2 recomputes every second module."
            )
        names = (self.save,) if isinstance(self.save, str) else tuple(self.save)
        for name in names:
            if not isinstance(name, str) or not (name in OPERATOR_FAMILIES or "." in name):
                raise PlanError(
                    f"RecomputePolicy(save=...): {name!r} is no operator.\n"
                    f"  Use {', '.join(map(repr, OPERATOR_FAMILIES))}, or names such as 'aten.gelu'."
                )
        object.__setattr__(self, "save", names)

    def __str__(self) -> str:
        every = "" if self.every == 1 else f", one in {self.every}"
        saved = f", keeping what {', '.join(self.save)} give" if self.save else ""
        return f"{self.modules}{every}{saved}"


_WORDS = {"none": None, "full": RecomputePolicy(), "selective": RecomputePolicy(save=OPERATOR_FAMILIES)}


def recompute_policy(value: object) -> RecomputePolicy | None:
    """The policy that ``activation_checkpointing`` means; ``None`` where nothing is recomputed.

    Raises:
        PlanError: The value means none.
    """
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, RecomputePolicy):
        return value
    if isinstance(value, WrapByClass | WrapBySize | WrapByName):
        return RecomputePolicy(modules=value)
    if not isinstance(value, Mapping):
        raise PlanError(f"activation_checkpointing={value!r} is no policy.\n{_USAGE}")
    known = tuple(field.name for field in fields(RecomputePolicy))
    if any(key in known for key in value):
        unknown = [str(key) for key in value if key not in known]
        if unknown:
            raise PlanError(
                f"activation_checkpointing has no field {', '.join(unknown)}.\n  Its fields are: {', '.join(known)}."
            )
        return RecomputePolicy(**value)
    return RecomputePolicy(modules=_modules(value))


def _modules(value: object) -> WrapPolicy:
    policy = wrap_policy(value, "activation_checkpointing")
    if isinstance(policy, str):
        raise PlanError(f"activation_checkpointing: modules={policy!r} names no modules.\n{_USAGE}")
    return policy


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """What lives on the host.

    Attributes:
        parameters: Shards go back to the device for each gather. ``False``: of what the optimizer updates on the host,
            the device keeps its shard in the compute dtype, so that it is sent once after each update; frozen shards
            stay on the device. ``"auto"``: ``True`` where the strategy shards parameters; where it replicates them, the
            replica is on the device by definition.
        gradients: Where ``.grad`` lives: where the optimizer works.
        optimizer: The optimizer updates masters, and keeps its state, on the host, with the host's processor. ``False``
            offloads frozen parameters alone.
        ratio: The fraction of the bytes to offload. Whole units are chosen, spread evenly over the model.
        pin_memory: With CUDA, in page-locked memory, from which copies are asynchronous.

    Raises:
        PlanError: A value is out of range, or the combination offloads nothing or cannot work.
    """

    parameters: bool | str = "auto"
    gradients: bool = True
    optimizer: bool = True
    ratio: float = 1.0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("gradients", "optimizer", "pin_memory"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"OffloadPolicy({name}={getattr(self, name)!r}): expected True or False.")
        if not (isinstance(self.parameters, bool) or self.parameters == "auto"):
            raise PlanError(f"OffloadPolicy(parameters={self.parameters!r}): expected 'auto', True or False.")
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise PlanError(
                f"OffloadPolicy(ratio={self.ratio!r}): expected a number above 0 and at most 1.\n"
                "  To offload nothing, set offload_policy='none'."
            )
        if self.gradients != self.optimizer:
            raise PlanError(
                f"OffloadPolicy(gradients={self.gradients}, optimizer={self.optimizer}): torch's optimizers update a"
                " parameter where it lies, with its gradient and state beside it.\n  Give both the same value."
            )
        if not (self.optimizer or self.parameters):
            raise PlanError("OffloadPolicy offloads nothing.\n  Set offload_policy='none'.")

    def covers(self, row: Placements, *, is_trainable: bool) -> bool:
        """Whether a group of this row is kept on the host, if its unit is chosen."""
        if is_trainable:
            return self.optimizer
        return row.shards_parameters and bool(self.parameters)

    def keeps_shard(self, row: Placements) -> bool:
        """Whether the device keeps a shard of what the optimizer updates on the host."""
        return row.shards_parameters and not self.parameters


def offload_policy(value: object) -> OffloadPolicy | None:
    """The policy that ``offload_policy`` means; ``None`` where nothing is offloaded.

    Raises:
        PlanError: The value means none.
    """
    if value == "none":
        return None
    if value == "cpu":
        return OffloadPolicy()
    if isinstance(value, OffloadPolicy):
        return value
    known = tuple(field.name for field in fields(OffloadPolicy))
    if not isinstance(value, Mapping):
        raise PlanError(
            f"offload_policy={value!r}: expected 'none', 'cpu', or an OffloadPolicy (in a file a mapping of its"
            f" fields).\n  Its fields are: {', '.join(known)}."
        )
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise PlanError(f"offload_policy has no field {', '.join(unknown)}.\n  Its fields are: {', '.join(known)}.")
    return OffloadPolicy(**value)


def check_offload(policy: OffloadPolicy | None, row: Placements) -> None:
    """Refuse a policy that means nothing for a strategy.

    Raises:
        PlanError: It does.
    """
    if policy is None or row.shards_parameters:
        return
    if policy.parameters is True:
        raise PlanError(
            "OffloadPolicy(parameters=True) needs sharded parameters, but this strategy keeps them whole on every"
            f" device ({row.describe()}).\n  Use zero3 or shard_grad_op, or leave parameters at 'auto': masters,"
            " gradients and optimizer state are then on the host."
        )
    if not policy.optimizer:
        raise PlanError(
            "OffloadPolicy(optimizer=False) offloads frozen shards alone, but this strategy has no shards of"
            f" parameters ({row.describe()}).\n  Use zero3 or shard_grad_op."
        )


def choose(sizes: Sequence[int], ratio: float) -> list[bool]:
    """Which of some units are offloaded, so that their bytes come to ``ratio`` of all, spread evenly over the units.

    The sum is off by at most half of the largest unit.
    """
    chosen, due = [], 0.0
    for size in sizes:
        due += ratio * size
        is_chosen = size > 0 and due >= size / 2
        due -= size if is_chosen else 0
        chosen.append(is_chosen)
    return chosen


def ignored_entries(value: Any) -> tuple[Any, ...]:
    """``ParallelPlan.ignored`` as a tuple of name patterns, modules and parameters.

    Raises:
        PlanError: Something is none of these.
    """
    entries = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    for entry in entries:
        is_name = isinstance(entry, str) and bool(entry)
        is_object = not isinstance(entry, type) and (hasattr(entry, "named_modules") or hasattr(entry, "requires_grad"))
        if not (is_name or is_object):
            raise PlanError(
                f"ignored={value!r}: expected names of modules or parameters, modules, or parameters.\n"
                "  Write for example ignored=['blocks.*.experts'] or ignored=[model.vision_tower]; [] ignores nothing."
            )
    return entries


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """Tells whether a qualified name matches a shell pattern, in which ``*`` does not cross a dot."""
    parts = [re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]") for part in pattern.split(".")]
    expression = re.compile(r"\.".join(parts))
    return lambda name: expression.fullmatch(name) is not None
