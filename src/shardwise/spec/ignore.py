"""What of a model the engine leaves alone, as users name it. ``engine.ignore`` finds it in a model."""

from __future__ import annotations

from typing import Any

from shardwise.spec.errors import PlanError


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
