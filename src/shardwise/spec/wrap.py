"""Which modules become units: the policies as plain data. ``engine.wrap`` applies them to a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.spec.errors import PlanError


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
