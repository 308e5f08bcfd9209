"""Strategies of a comparison with what else is to differ: ``zero3+flat``, ``zero3+reshard_after_forward=false``.

Values are YAML: ``zero3+mp_policy={param_dtype: bf16, reduce_dtype: fp32}``. Marks inside of brackets and quotes belong
to the value.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import yaml

from shardwise.spec.errors import ConfigError
from shardwise.spec.plan import ParallelPlan, plan_fields
from shardwise.spec.text import printable

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

    @property
    def is_threaded(self) -> bool:
        """Whether this is ``data_parallel``, which is one process."""
        return self.applied_to(ParallelPlan()).placements.is_threaded

    def applied_to(self, plan: ParallelPlan) -> ParallelPlan:
        """``plan`` with this strategy and these fields."""
        return dataclasses.replace(plan, strategy=self.strategy, **self.fields)


def split(text: str, mark: str) -> list[str]:
    """Cut ``text`` at every ``mark`` that is in no brackets and in no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "{[") - (character in "}]")
        if character == mark and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def canonical(text: str) -> str:
    """The same variant with the strategy's name in small letters."""
    strategy, *parts = split(text.strip(), "+")
    return "+".join([strategy.strip().lower(), *parts])


def parse(text: str) -> Variant:
    """The variant that ``NAME[+flat][+FIELD=VALUE]...`` describes; values are written as in a configuration file.

    Raises:
        ConfigError: A part is neither ``flat`` nor a field of the plan, or a value is no YAML.
        PlanError, PlacementError: A value that the plan refuses.
    """
    strategy, *parts = split(text, "+")
    is_flat, fields = False, {}
    for part in parts:
        name, is_field, value = part.partition("=")
        if part == _FLAT:
            is_flat = True
        elif is_field and name in plan_fields() and name != "strategy":
            fields[name] = _value(text, part, value)
        else:
            raise ConfigError(
                f"--strategies {printable(text)}: {printable(repr(part))} is neither 'flat' nor FIELD=VALUE.\n"
                f"  Fields are: {', '.join(plan_fields()[1:])}."
            )
    variant = Variant(strategy, is_flat, fields)
    variant.applied_to(ParallelPlan())
    return variant


def _value(text: str, part: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        reason = printable(str(getattr(error, "problem", None) or error).splitlines()[0])
        raise ConfigError(
            f"--strategies {printable(text)}: the value in {printable(repr(part))} is no YAML: {reason}.\n"
            "  Write it as in a configuration file, for example zero3+mp_policy={param_dtype: bf16}, and in quotes for"
            " the shell."
        ) from None
