"""The names of strategies: the presets, and what other libraries call them."""

from __future__ import annotations

from shardwise.spec.errors import PlacementError
from shardwise.spec.placement import PRESETS, Placements
from shardwise.spec.text import did_you_mean

#: Other spellings (FSDP1, DeepSpeed, Lightning), by lower-case name.
ALIASES: dict[str, str] = {
    "dataparallel": "data_parallel",
    "no_shard": "ddp",
    "zero_1": "zero1",
    "zero-1": "zero1",
    "zero_2": "zero2",
    "zero-2": "zero2",
    "zero_3": "zero3",
    "zero-3": "zero3",
    "fsdp": "zero3",
    "full_shard": "zero3",
    "hybrid_shard": "hsdp",
    "_hybrid_shard_zero2": "hybrid_shard_grad_op",
    "hybrid_shard_zero2": "hybrid_shard_grad_op",
}


def canonical_name(strategy: str) -> str:
    """The preset's own name for any accepted spelling, in any case.

    Raises:
        PlacementError: Unknown name; the message suggests the nearest one.
    """
    name = strategy.strip().lower()
    name = ALIASES.get(name, name)
    if name not in PRESETS:
        hint = did_you_mean(name, [*PRESETS, *ALIASES])
        raise PlacementError(f"unknown strategy {strategy!r}.\n {hint} Known: {', '.join(PRESETS)}.")
    return name


def resolve_strategy(strategy: str | Placements) -> Placements:
    """The row of a preset name, an alias or a row itself.

    Raises:
        PlacementError: Unknown name.
    """
    if isinstance(strategy, Placements):
        return strategy
    if not isinstance(strategy, str):
        raise PlacementError(
            f"strategy must be a preset name or sw.Placements(...), got {type(strategy).__name__}.\n"
            f"  Known presets: {', '.join(PRESETS)}."
        )
    return PRESETS[canonical_name(strategy)]
