"""How to train: one frozen description that planning, the runtime, checkpoints and configuration share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.spec.buffers import BUFFER_SYNCS
from shardwise.spec.errors import PlanError
from shardwise.spec.granularity import Granularity, resolve_granularity
from shardwise.spec.mesh import Mesh
from shardwise.spec.precision import FULL_PRECISION, PrecisionPolicy

if TYPE_CHECKING:
    from shardwise.spec.placement import Placements
    from shardwise.spec.wrap import WrapByClass, WrapByName, WrapBySize

    WrapPolicy = WrapByClass | WrapBySize | WrapByName

#: How microbatches are accumulated; what ``auto`` becomes depends on the strategy.
ACCUMULATIONS = ("auto", "sharded", "unsharded")

#: What happens at ``parallelize`` where ranks hold different weights.
SYNCS = ("warn", "error", "rank0")

_LATER_AXES = {"dp_replicate": "hybrid sharding", "cp": "context parallelism", "tp": "tensor parallelism"}
_LATER_AXES |= {"pp": "pipeline parallelism", "ep": "expert parallelism"}
_LATER_STRATEGIES = {"hsdp", "hybrid_shard", "hybrid_shard_grad_op", "_hybrid_shard_zero2", "hybrid_shard_zero2"}
_WRAP_KEYS = ("by_class", "by_size", "by_name")


@dataclass(frozen=True)
class ParallelPlan:
    """Which strategy, on which mesh, wrapped how.

    Attributes:
        strategy: A preset name or alias in any case (``ddp``, ``zero1``, ``zero2``, ``shard_grad_op``, ``zero3``), or a
            ``Placements``.
        dp_replicate: Ranks along the replicated data-parallel axis. Only 1 in this version.
        dp_shard: Ranks along the data-parallel axis on which the strategy's placements act. ``-1``: what is left of the
            world.
        cp: Context-parallel ranks. Only 1 in this version.
        tp: Tensor-parallel ranks. Only 1 in this version.
        pp: Pipeline stages. Only 1 in this version.
        ep: Expert-parallel ranks. Only 1 in this version.
        auto_wrap_policy: ``"auto"`` (the model's repeated blocks), ``"none"``, or a wrap policy. A mapping with one of
            ``by_class: [names]``, ``by_size: numel``, ``by_name: [globs]`` is what configuration files write.
        reshard_after_forward: ``"auto"`` (as the strategy says), ``True`` or ``False``.
        mp_policy: In which dtypes to compute and reduce; ``None``: the model's own, no cast. A mapping of the fields of
            ``PrecisionPolicy`` is what configuration files write. Its ``overrides`` are for parts of the model.
        granularity: What a rank's cut never divides, for the optimizer's sake: ``"element"``, ``"row"``,
            ``sw.block(n)`` (in a file ``[block, n]``) or ``"tensor"``, which gives every parameter whole to one rank.
        accumulation: ``"auto"``, ``"sharded"`` or ``"unsharded"``.
        sync: What to do where ranks hold different weights: ``"warn"`` sends rank 0's and warns once, ``"error"``
            refuses, ``"rank0"`` takes rank 0's and lets the other ranks hold meta tensors.
        sync_buffers: What happens, before the first forward after one that trained, to buffers that each rank has
            changed by itself, such as batch norm's running statistics: ``"broadcast"`` sends rank 0's, ``"mean"``
            averages those of floating point over the ranks and sends rank 0's others, ``"none"`` leaves them alone.
            ``"auto"`` broadcasts those that are saved with the model, under every strategy; what is not saved (masks,
            rotary frequencies) does not change.

    Raises:
        PlanError: A value is out of range or belongs to a later version.
        PlacementError: The strategy is unknown.
    """

    strategy: str | Placements = "zero3"
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    auto_wrap_policy: str | WrapPolicy | Mapping[str, Any] = "auto"
    reshard_after_forward: str | bool = "auto"
    mp_policy: PrecisionPolicy | Mapping[str, Any] | None = None
    granularity: str | Granularity | Sequence[Any] = "element"
    accumulation: str = "auto"
    sync: str = "warn"
    sync_buffers: str = "auto"

    def __post_init__(self) -> None:
        """Check every field that can be checked without a model or a world."""
        for axis, feature in _LATER_AXES.items():
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise PlanError(f"{axis}={size!r}: expected a positive integer.\n  Set {axis}=1.")
            if size != 1:
                raise PlanError(
                    f"{axis}={size}: this version does not have {feature} yet.\n"
                    f"  Set {axis}=1; data parallelism (dp_shard) takes the whole world."
                )
        if isinstance(self.dp_shard, bool) or not isinstance(self.dp_shard, int):
            raise PlanError(
                f"dp_shard={self.dp_shard!r}: expected an integer.\n  Use -1 for what is left of the world."
            )
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise PlanError(
                f"dp_shard={self.dp_shard}: expected a positive integer or -1.\n  Use -1 for what is left of the world."
            )
        self._check_strategy()
        object.__setattr__(self, "auto_wrap_policy", _wrap_policy(self.auto_wrap_policy))
        if not (isinstance(self.reshard_after_forward, bool) or self.reshard_after_forward == "auto"):
            raise PlanError(
                f"reshard_after_forward={self.reshard_after_forward!r}: expected 'auto', True or False.\n"
                "  Resharding to an inner group of some size is not in this version yet."
            )
        if self.mp_policy is not None:
            object.__setattr__(self, "mp_policy", PrecisionPolicy.parse(self.mp_policy))
        object.__setattr__(self, "granularity", resolve_granularity(self.granularity))
        if self.accumulation == "defer_replicate":
            raise PlanError(
                "accumulation='defer_replicate' needs hybrid sharding, which this version does not have yet.\n"
                "  Use 'auto', 'sharded' or 'unsharded'."
            )
        _one_of("accumulation", self.accumulation, ACCUMULATIONS)
        _one_of("sync", self.sync, SYNCS)
        _one_of("sync_buffers", self.sync_buffers, BUFFER_SYNCS)

    @property
    def placements(self) -> Placements:
        """Where parameters, gradients and optimizer state live."""
        from shardwise.spec.placement import resolve_strategy  # placement is read only when a strategy is asked for

        return resolve_strategy(self.strategy)

    @property
    def precision(self) -> PrecisionPolicy:
        """``mp_policy`` as a policy, whatever it was given as."""
        assert not isinstance(self.mp_policy, Mapping)  # __post_init__ has replaced it
        return self.mp_policy or FULL_PRECISION

    @property
    def cut_granularity(self) -> Granularity:
        """``granularity``, whatever it was given as."""
        return resolve_granularity(self.granularity)

    @property
    def wrap_policy(self) -> str | WrapPolicy:
        """``auto_wrap_policy``, where a mapping has become the policy that it describes."""
        assert not isinstance(self.auto_wrap_policy, Mapping)  # __post_init__ has replaced it
        return self.auto_wrap_policy

    def mesh(self, world_size: int) -> Mesh:
        """The mesh of this plan on ``world_size`` ranks.

        Raises:
            MeshError: The degrees do not make the world.
        """
        return Mesh.build(
            world_size,
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            tp=self.tp,
        )

    def _check_strategy(self) -> None:
        if isinstance(self.strategy, str) and self.strategy.strip().lower() in _LATER_STRATEGIES:
            raise PlanError(
                f"strategy {self.strategy!r}: this version does not have hybrid sharding yet.\n"
                "  Use zero3 or shard_grad_op over all ranks."
            )
        _ = self.placements


def plan_fields() -> tuple[str, ...]:
    """The names of all fields, in order."""
    return tuple(field.name for field in dataclasses.fields(ParallelPlan))


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        shown = ", ".join(repr(choice) for choice in choices)
        raise PlanError(f"{name}={value!r}: expected one of {shown}.\n  Set {name} to one of them.")


def _wrap_policy(value: object) -> Any:
    from shardwise.spec.wrap import WrapByClass, WrapByName, WrapBySize

    if isinstance(value, WrapByClass | WrapBySize | WrapByName) or value in ("auto", "none"):
        return value
    usage = (
        "  Use 'auto', 'none', wrap_by_class(...), wrap_by_size(...), wrap_by_name(...), or in a file one of "
        "{by_class: [names]}, {by_size: number}, {by_name: [globs]}."
    )
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in _WRAP_KEYS:
        raise PlanError(f"auto_wrap_policy={value!r} is not a wrap policy.\n{usage}")
    key, content = next(iter(value.items()))
    if key == "by_size":
        if isinstance(content, bool) or not isinstance(content, int) or content < 1:
            raise PlanError(f"auto_wrap_policy by_size={content!r}: expected a positive number of elements.\n{usage}")
        return WrapBySize(content)
    names = [content] if isinstance(content, str) else content
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"auto_wrap_policy {key}={content!r}: expected a list of names.\n{usage}")
    return WrapByClass(tuple(names)) if key == "by_class" else WrapByName(tuple(names))
