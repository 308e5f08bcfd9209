"""Strategies of a comparison with what else is to differ: ``zero3+flat``, ``zero3+reshard_after_forward=false``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import yaml

from shardwise.spec.errors import ConfigError
from shardwise.spec.plan import ParallelPlan, plan_fields
from shardwise.train.text import printable

_FLAT = "flat"


@dataclass(frozen=True)
class Variant:
    """One way to run our engine.

    Attributes:
        strategy: Preset name or alias.
        is_flat: The optimizer gets ``sw.flat_parameters(model)`` instead of the parameters by name.
        fields: Other fields of the plan.
    """

    strategy: str
    is_flat: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    def applied_to(self, plan: ParallelPlan) -> ParallelPlan:
        """``plan`` with this strategy and these fields."""
        return dataclasses.replace(plan, strategy=self.strategy, **self.fields)


def parse(text: str) -> Variant:
    """The variant that ``NAME[+flat][+FIELD=VALUE]...`` describes; values are written as in a configuration file.

    Raises:
        ConfigError: A part is neither ``flat`` nor a field of the plan.
        PlanError, PlacementError: A value that the plan refuses.
    """
    strategy, *parts = text.split("+")
    is_flat, fields = False, {}
    for part in parts:
        name, is_field, value = part.partition("=")
        if part == _FLAT:
            is_flat = True
        elif is_field and name in plan_fields() and name != "strategy":
            fields[name] = yaml.safe_load(value)
        else:
            raise ConfigError(
                f"--strategies {printable(text)}: {printable(repr(part))} is neither 'flat' nor FIELD=VALUE.\n"
                f"  Fields are: {', '.join(plan_fields()[1:])}."
            )
    variant = Variant(strategy, is_flat, fields)
    variant.applied_to(ParallelPlan())
    return variant
