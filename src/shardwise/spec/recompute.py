"""What of a forward is computed again in backward instead of being kept: the policy as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardwise.spec.errors import PlanError
from shardwise.spec.wrap import WrapByClass, WrapByName, WrapBySize, WrapPolicy, wrap_policy

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
