"""Seconds of a step, from the measured tables of a calibrated machine if there are any, else from the hardware table.

On a machine that ``shardwise calibrate`` has measured, every part of a unit is looked up in the measured tables: linear
layers by their three sizes, attention, norms and element-wise work by their elements, the optimizer's step, collectives
by their bytes. The engine's copies of gradients into flat buffers, and of slices into gathered buffers, are added.
``sim`` simulates their order and overlap.

On a CPU a rank computes and sends with the same core. ``Measured.shared`` says how much they slow each other down:
while n of a rank's streams are busy, each needs ``1 + shared (n - 1)`` times as long. The time of a collective includes
the sums that the rank computes when it waits, because the measured collectives did so too. On a GPU the measured times
begin with the kernel, so the host's time to launch the kernel is taken from ``cost.software``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from shardwise.cost.hardware import Cluster
from shardwise.cost.kernels import UnitSeconds, alignment, launch_seconds
from shardwise.cost.links import Link
from shardwise.cost.measured import Measured
from shardwise.cost.part import Part
from shardwise.cost.software import find_software
from shardwise.cost.work import Product, UnitWork, item_bytes
from shardwise.cost.workload import Workload
from shardwise.planner.timing import TimeEstimate, Timing, model_flops
from shardwise.sim.step import Transfer
from shardwise.sim.streams import NO_SLOWDOWN, Slowdown
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape

__all__ = ["CalibratedTiming", "TimeEstimate", "estimate_time", "model_flops", "timing"]

#: Parts whose time is included in that of measured attention and of measured linear layers, which have biases.
_MEASURED = {"attention", "gradients", "biases"}
#: The measured operation of a part by its name; other parts are measured as additions or copies.
_OPERATIONS = {"norm": "norm", "loss": "loss"} | dict.fromkeys(("gelu", "gelu_new", "silu", "relu"), "activation")


@dataclass(frozen=True, slots=True)
class _MeasuredLink(Link):
    """A link with measured times; an all-to-all of tokens is assumed to be as fast as an all-gather."""

    measured: Measured = field(default_factory=Measured)

    def seconds(self, kind: str, num_bytes: float) -> float:
        if kind == "ring":  # a rank sends its keys and values n - 1 times
            return (self.kind_size - 1) * self.measured.link_s("message", 2, num_bytes)
        if kind == "all_reduce" and self.name == "tp":
            kind = "all_reduce_out"
        return self.measured.link_s("all_gather" if kind == "all_to_all" else kind, self.kind_size, num_bytes)


class CalibratedTiming(Timing):
    """The step of a plan on a calibrated machine; the time of every part is looked up.

    Raises:
        ConfigError: The file has no times of this dtype, or of a collective that the plan needs.
    """

    adds_gradients: ClassVar[bool] = False  # the measured copies of gradients include it

    @cached_property
    def _measured(self) -> Measured:
        gpu = self.cluster.device
        assert gpu.measured is not None
        return replace(gpu.measured, speeds=gpu.speeds) if gpu.speeds else gpu.measured

    @cached_property
    def links(self) -> Mapping[str, Link]:
        """The link of every axis."""
        plan, measured = self.plan, self._measured
        sizes = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "dp_replicate": plan.dp_replicate}
        sizes |= {"dp_shard": plan.dp_shard * plan.cp, "inner": plan.inner_size or 1}
        return {axis: _MeasuredLink(size, 1, 0.0, axis, measured) for axis, size in sizes.items()}

    @property
    def _slowdown(self) -> Slowdown:
        return Slowdown(shared=self._measured.shared) if self._measured.shared else NO_SLOWDOWN

    def _transfers(self, work: UnitWork) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...], tuple[Transfer, ...]]:
        gathers, reduces, sums = super()._transfers(work)
        if self.plan.placements.shards_parameters:
            copied = sum(
                self._measured.operation_s("copy", numel / link.kind_size, self._copied)[0]
                for numel, _, link in self._groups(work, self.links["dp_shard"])
            )
            gathers = (Transfer(copied), *gathers)
        return gathers, reduces, sums

    def optimizer_s(self, work: UnitWork) -> float:
        """The optimizer's step on a rank's part: each weight of a product, and all other parameters together."""
        share = self.links["dp_shard"].kind_size if self.plan.placements.shards_optimizer else 1
        optimizer = self.workload.optimizer if self.workload.optimizer in self._measured.optimizers else "adamw"
        weights = [(p.inner * p.columns, p.count) for p in work.products if p.is_trained]
        rest = max(work.num_trained - sum(numel * count for numel, count in weights), 0.0)
        return sum(
            count * self._measured.update_s(optimizer, numel / share) for numel, count in [*weights, (rest, 1)] if numel
        )

    def _product_s(self, rows: float, inner: float, columns: float) -> float:
        dtype = "bf16" if any(row.dtype == "bf16" for row in self._measured.products) else self.workload.precision
        return self._measured.product_s(rows, inner, columns, dtype)[0]

    def _exchange_s(self) -> float:
        num_ranks = self.plan.dp_replicate * self.plan.dp_shard * self.plan.cp * self.plan.tp
        whole = num_ranks / max(num_ranks - 1, 1)
        return sum(self._measured.link_s("all_gather", num_ranks, whole * sent) for sent in self._exchanged_bytes)

    def _messages(self, num_stages: int) -> list[float]:
        tokens = self.workload.micro_batch * self.workload.seq_len / self.plan.cp
        sent = item_bytes(self.workload) * tokens * self.shape.hidden
        return [self._measured.link_s("message", 2, sent)] * (num_stages - 1) + [0.0]

    def _seconds(self, work: UnitWork) -> UnitSeconds:
        forward = backward = products = 0.0
        is_gpu = self.cluster.device.device_type != "cpu"
        for product in work.products:
            there, back = self._measured.product_s(
                product.rows, product.inner, product.columns, self.workload.precision
            )
            if is_gpu:  # products were measured at multiples of 256
                share = self._alignment(product, product.inner) * self._alignment(product, product.columns)
                there, back = there / share, back / share
            products += there * product.count
            backward += back * product.count * (1.0 if product.is_trained else 0.5)
        attended = 0.0
        for each in work.attention:
            there, back = self._measured.attention_s(
                each.queries, each.keys, each.heads, each.width, self.workload.precision
            )
            attended, backward = attended + there, backward + back
        for part in work.parts:
            there, back = self._part(part)
            forward, backward = forward + there, backward + back
        backward += self._measured.operation_s("copy", work.num_trained, self._copied)[0]
        return UnitSeconds(
            forward_s=forward + products + attended,
            backward_s=backward,
            elementwise_s=forward,
            products_s=products,
            launch_s=launch_seconds(work, self.software, self.workload) if is_gpu else 0.0,
        )

    def _alignment(self, product: Product, size: float) -> float:
        is_odd = size % 2 and not product.is_convolution
        measured = self._measured.odd_share(self.workload.precision) if is_odd else None
        return alignment(size) if measured is None else measured

    @property
    def _copied(self) -> str:
        return (
            "fp32"
            if any(row.dtype == "fp32" for row in self._measured.operations.get("copy", ()))
            else self.workload.precision
        )

    def _part(self, part: Part) -> tuple[float, float]:
        """Forward and backward seconds of an element-wise part, from the measured operation that resembles it."""
        e = item_bytes(self.workload)
        if part.name in _MEASURED:
            return 0.0, 0.0
        if part.name == "gated":
            there, back = self._measured.operation_s(
                "activation", part.forward_bytes / (5 * e), self.workload.precision
            )
            product, _ = self._measured.operation_s("add", part.forward_bytes / (5 * e), self.workload.precision)
            return there + product, back + 2 * product
        kind = _OPERATIONS.get(part.name)
        if kind is not None:
            elements = part.saved_bytes / 4 if kind == "loss" else part.forward_bytes / (2 * e)
            return self._measured.operation_s(kind, elements, self.workload.precision)
        is_copied = part.name == "lookup"
        moved, passes, dtype = ("copy", 2, self._copied) if is_copied else ("add", 3, self.workload.precision)

        def seconds(num_bytes: float) -> float:
            return self._measured.operation_s(moved, num_bytes / (passes * e), dtype)[0] if num_bytes else 0.0

        return seconds(part.forward_bytes), seconds(part.backward_bytes)


def timing(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload, software: str = "pytorch"
) -> Timing:
    """The step of a resolved plan."""
    kind = Timing if cluster.device.measured is None else CalibratedTiming
    return kind(shape, plan, cluster, workload, find_software(software, cluster.device))


def estimate_time(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload, software: str = "pytorch"
) -> TimeEstimate:
    """Seconds of a step of a resolved plan."""
    return timing(shape, plan, cluster, workload, software).estimate()
