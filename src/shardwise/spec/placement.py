"""Placements of parameters, gradients and optimizer state: the table that replaces "modes" and "stages".

A data-parallel strategy is a set of placements. The engine reads these and never the strategy's name.

Notation: ``R`` replicated (every rank has the full buffer), ``S`` sharded (every rank has one slice), ``P`` partial
(every rank has a full buffer, and the true value is the sum over the ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from shardwise.spec.errors import PlacementError
from shardwise.spec.text import did_you_mean


class Placement(StrEnum):
    """The placement of a flat buffer on the ``dp_shard`` axis."""

    REPLICATE = "replicate"
    SHARD = "shard"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Placements:
    """The placements of a strategy.

    Attributes:
        parameter: ``R`` or ``S``, between steps.
        gradient: Gradient after backward: ``R`` (all-reduced), ``P`` (a full local sum until the step boundary, then
            reduced into slices), or ``S`` (reduced into slices unit by unit, in pooled buffers).
        optimizer: ``R`` or ``S``. The optimizer updates full parameters, or this rank's slices.
        keeps_gathered: With sharded parameters: a unit stays gathered from its forward to its backward.
        is_hybrid: The placements apply inside the ``dp_shard`` axis; everything is replicated over ``dp_replicate``.
        is_threaded: One process runs replicas on all its devices, and the world has only this rank.
    """

    parameter: Placement = Placement.SHARD
    gradient: Placement = Placement.SHARD
    optimizer: Placement = Placement.SHARD
    keeps_gathered: bool = False
    is_hybrid: bool = False
    is_threaded: bool = False

    def __post_init__(self) -> None:
        for field in ("parameter", "gradient", "optimizer"):
            value = getattr(self, field)
            try:
                object.__setattr__(self, field, Placement(str(value).lower()))
            except ValueError:
                choices = ", ".join(Placement)
                raise PlacementError(
                    f"Placements({field}={value!r}) is not a placement.\n  Use one of: {choices}."
                ) from None
        row = (self.parameter, self.gradient, self.optimizer)
        if row not in _LEGAL_ROWS:
            legal = "; ".join(", ".join(legal_row) for legal_row in _LEGAL_ROWS)
            raise PlacementError(
                f"parameter={row[0]}, gradient={row[1]}, optimizer={row[2]} cannot be combined: the optimizer needs its"
                " gradient where its state is, and a sharded parameter is updated where its slice is.\n"
                f"  Legal (parameter, gradient, optimizer): {legal}."
            )
        if self.keeps_gathered and self.parameter is not Placement.SHARD:
            raise PlacementError(
                "keeps_gathered=True needs parameter='shard': a replicated parameter is always there.\n"
                "  Leave keeps_gathered out."
            )
        if self.is_threaded and self.optimizer is not Placement.REPLICATE:
            raise PlacementError(
                "is_threaded=True needs parameter, gradient and optimizer='replicate': there is one rank only.\n"
                "  Leave is_threaded out."
            )

    def describe(self) -> str:
        """The placements as text, for messages."""
        keeps = ", kept gathered from forward to backward" if self.keeps_gathered else ""
        keeps += ", replicas in one process" if self.is_threaded else ""
        return f"parameters {self.parameter}, gradients {self.gradient}, optimizer {self.optimizer}{keeps}"

    @cached_property
    def shards_parameters(self) -> bool:
        """Whether a rank has only its slice of the parameters between steps."""
        return self.parameter is Placement.SHARD

    @cached_property
    def shards_optimizer(self) -> bool:
        """Whether the optimizer updates slices."""
        return self.optimizer is Placement.SHARD

    @property
    def pools_gradients(self) -> bool:
        """Whether full gradients exist only in pooled buffers, from a unit's backward until its reduction."""
        return self.gradient is Placement.SHARD

    @property
    def gradient_move(self) -> str:
        """The collective that reduces the gradients of a unit."""
        return "reduce_scatter" if self.shards_optimizer else "all_reduce"


_R, _S, _P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL
_LEGAL_ROWS = ((_R, _R, _R), (_R, _P, _S), (_R, _S, _S), (_S, _S, _S))

#: The presets, by canonical name.
PRESETS: dict[str, Placements] = {
    "ddp": Placements(_R, _R, _R),
    "zero1": Placements(_R, _P, _S),
    "zero2": Placements(_R, _S, _S),
    "shard_grad_op": Placements(_S, _S, _S, keeps_gathered=True),
    "zero3": Placements(_S, _S, _S),
    "hsdp": Placements(_S, _S, _S, is_hybrid=True),
    "hybrid_shard_grad_op": Placements(_S, _S, _S, keeps_gathered=True, is_hybrid=True),
    "data_parallel": Placements(_R, _R, _R, is_threaded=True),
}


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
    """The preset's name for any accepted spelling, in any case.

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
    """The placements of a preset name or alias; ``Placements`` are returned unchanged.

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
