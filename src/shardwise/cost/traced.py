"""A traced model (``sw.trace_model``), which the planner accepts in place of a ``ModelShape``."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from shardwise.cost.part import Part
from shardwise.cost.unit import Product, UnitWork
from shardwise.cost.workload import Workload
from shardwise.spec.errors import PlanError
from shardwise.spec.granularity import round_up
from shardwise.spec.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """The work of one step of a module, traced without values.

    ``family``, ``hidden``, ``vocab``, ``patch_numel``, ``is_tied``, ``is_pooled`` and ``stacks`` exist because a
    ``ModelShape`` has them.

    Attributes:
        name: The module's class.
        narrow: Work in 16 bit: modules before the first unit, the units, modules after them. Empty if the module does
            not run in 16 bit.
        wide: The same in fp32.
        batch: Samples of the traced step; other batch sizes are scaled from it.
        seq_len: Tokens of a sequence in the traced step; 0: samples are not sequences of tokens.
        buffer_bytes: Bytes of the module's buffers, which every rank has.
        castable_buffers: Elements and bytes of the buffers among them that ``buffer_dtype`` casts.
        family: ``"traced"``.
        hidden: 0, because a trace has no width.
        vocab: 0.
        patch_numel: 0.
        is_tied: False.
        is_pooled: False.
        stacks: Empty.
        refusals: Error messages, by ``"16 bit"`` or ``"fp32"``, if the module does not run in that precision.
    """

    name: str
    narrow: tuple[UnitWork, ...]
    wide: tuple[UnitWork, ...]
    batch: int
    seq_len: int = 0
    buffer_bytes: int = 0
    castable_buffers: tuple[int, int] = (0, 0)
    family: str = "traced"
    hidden: int = 0
    vocab: int = 0
    patch_numel: int = 0
    is_tied: bool = False
    is_pooled: bool = False
    stacks: tuple[Any, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        shown = f"{self.num_parameters:,} parameters in {sum(unit.count for unit in self.units):,} units"
        return f"TracedModel({self.name}: {shown}, a step of {self.batch} samples)"

    @property
    def units(self) -> tuple[UnitWork, ...]:
        """The units' work in 16 bit, or in fp32 if the module does not run in 16 bit."""
        return self.narrow or self.wide

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return sum(unit.count * unit.num_parameters for unit in self.units)

    @property
    def num_active_parameters(self) -> int:
        """The same as ``num_parameters``, because a trace does not show which experts process a token."""
        return self.num_parameters

    @property
    def num_layers(self) -> int:
        """Number of units below the root."""
        return sum(unit.count for unit in self.units[1:-1])

    def work(self, plan: ParallelPlan, workload: Workload) -> tuple[UnitWork, ...]:
        """The units' work for a microbatch of ``workload``.

        Raises:
            PlanError: The plan has model parallelism, which a trace cannot describe, or the workload differs from the
                traced step in more than the number of samples.
        """
        self._check(plan, workload)
        precision = "fp32" if workload.precision == "fp32" else "16 bit"
        units = self.wide if precision == "fp32" else self.narrow
        if not units:
            raise PlanError(
                f"{self.name} did not run in {precision} when it was traced: {dict(self.refusals).get(precision, '')}\n"
                f"  Set precision={'bf16' if precision == 'fp32' else 'fp32'}."
            )
        return _scale(units, workload.micro_batch / self.batch)

    def padded(self, multiple: int) -> tuple[int, TracedModel]:
        """The most expensive width of linear layers that is not a multiple, or 0, and the model with it rounded up.

        Widths of convolutions and of products between activations follow from other sizes, and are not changed.
        """
        costs: dict[int, float] = defaultdict(float)
        for unit in self.units:
            for p in unit.products:
                for size in {int(p.inner), int(p.columns)}:
                    if size % multiple and not p.is_batched:  # sizes with fewer factors of 2 are slower
                        costs[size] += unit.count * p.flops / (size & -size)
        width = max(costs, key=costs.__getitem__, default=0)

        def rounded(p: Product) -> Product:
            inner, columns = (round_up(width, multiple) if size == width else size for size in (p.inner, p.columns))
            return p if p.is_batched else dataclasses.replace(p, inner=inner, columns=columns)

        def wider(units: tuple[UnitWork, ...]) -> tuple[UnitWork, ...]:
            return tuple(dataclasses.replace(u, products=tuple(map(rounded, u.products))) for u in units)

        return width, dataclasses.replace(self, narrow=wider(self.narrow), wide=wider(self.wide))

    def _check(self, plan: ParallelPlan, workload: Workload) -> None:
        divided = [f"{axis}={size}" for axis in ("tp", "pp", "cp", "ep") if (size := getattr(plan, axis)) > 1]
        if divided:
            raise PlanError(
                f"{self.name} was traced whole, and a trace does not tell what a rank computes with"
                f" {', '.join(divided)}.\n  Set {', '.join(d.partition('=')[0] + '=1' for d in divided)}, give a"
                " ModelShape instead (sw.ModelShape.from_config or .decoder), or run"
                " sw.dry_run(build_model, plan, world_size=...), which divides the real model."
            )
        if workload.lora_rank is not None:
            raise PlanError(
                f"{self.name} was traced without adapters: lora_rank={workload.lora_rank} cannot be added to a trace.\n"
                "  Trace the module with its adapters and frozen weights, and leave lora_rank=None."
            )
        if workload.chunked_loss:
            raise PlanError(
                f"{self.name} was traced with its own loss: chunked_loss=True cannot be added to a trace.\n"
                "  Trace the module after sw.chunk_cross_entropy(module), and leave chunked_loss=False."
            )
        if self.seq_len and workload.seq_len != self.seq_len:
            raise PlanError(
                f"{self.name} was traced with sequences of {self.seq_len} tokens, but the workload has"
                f" seq_len={workload.seq_len}; attention does not grow in proportion.\n"
                f"  Set seq_len={self.seq_len}, or trace it with sequences of {workload.seq_len} tokens."
            )


@functools.lru_cache(maxsize=64)
def _scale(units: tuple[UnitWork, ...], ratio: float) -> tuple[UnitWork, ...]:
    """The work of ``ratio`` times as many samples: everything except parameters is proportional to their number."""
    if ratio == 1:
        return units
    return tuple(_scale_unit(unit, ratio) for unit in units)


def _scale_unit(unit: UnitWork, ratio: float) -> UnitWork:
    bytes_fields = "largest_bytes", "stream_bytes", "inner_bytes", "selective_bytes", "input_bytes", "scores_bytes"
    return dataclasses.replace(
        unit,
        products=tuple(dataclasses.replace(p, rows=p.rows * ratio) for p in unit.products),
        attention=tuple(dataclasses.replace(a, queries=a.queries * ratio) for a in unit.attention),
        parts=tuple(
            Part(p.name, p.forward_bytes * ratio, p.backward_bytes * ratio, p.saved_bytes * ratio, p.num_kernels)
            for p in unit.parts
        ),
        **{name: getattr(unit, name) * ratio for name in bytes_fields},
    )
