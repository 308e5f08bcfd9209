"""One way to run a step that the search may try, as light as a tuple; plans and workloads are made of the good ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.legal import Layout, divisors, layouts, schedules, strategies
from shardwise.spec.errors import ConfigError
from shardwise.spec.placement import PRESETS, canonical_name
from shardwise.spec.plan import ParallelPlan, plan_fields
from shardwise.spec.policies import OffloadPolicy, PrecisionPolicy
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import ModelShape
from shardwise.spec.text import did_you_mean

RECOMPUTE = ("none", "selective", "full")

#: What is kept in host memory: nothing; masters, gradients and optimizer state; shards of parameters too.
OFFLOADS = ("none", "optimizer", "cpu")

#: What can be fixed besides fields of the plan.
WORKLOAD_FIELDS = ("micro_batch", "recompute", "accumulation_steps", "in_backward", "schedule")


class Candidate(NamedTuple):
    """A layout, and how a step runs on it. Plainer values come first in each field's order.

    Attributes:
        layout: Degrees of every axis.
        strategy: A preset.
        schedule: Of the pipeline; ``""`` without one.
        virtual_stages: Stages of each rank of it.
        micro_batch: Sequences of a forward.
        accumulation: Microbatches of a step.
        offload: One of ``OFFLOADS``.
        recompute: ``"none"``, ``"selective"``, ``"full"``, or a number of blocks.
        in_backward: Units are updated inside backward.
        releases_units: A pipeline releases units after each use, instead of keeping them for the step.
    """

    layout: Layout
    strategy: str
    schedule: str
    virtual_stages: int
    micro_batch: int
    accumulation: int
    offload: str = "none"
    recompute: str | int = "none"
    in_backward: bool = False
    releases_units: bool = False

    def plan(self, workload: Workload, fixed: Mapping[str, Any]) -> ParallelPlan:
        """The plan as users write it, with every degree filled in."""
        layout, values = self.layout, {name: fixed[name] for name in fixed if name in plan_fields()}
        values |= {name: getattr(layout, name) for name in Layout.__slots__}
        values |= {"strategy": self.strategy, "compile": workload.compile or bool(fixed.get("compile", False))}
        if "mp_policy" not in fixed and workload.precision in {"bf16", "fp16"}:
            values["mp_policy"] = PrecisionPolicy(param_dtype=workload.precision)
        if "activation_checkpointing" not in fixed:
            values["activation_checkpointing"] = self.recompute
        if "offload_policy" not in fixed and self.offload != "none":
            values["offload_policy"] = OffloadPolicy(parameters=False) if self.offload == "optimizer" else "cpu"
        if self.schedule:
            stages = self.virtual_stages if self.schedule == "interleaved-1f1b" else None
            values["pipeline"] = PipelinePolicy(self.schedule, self.accumulation, stages)
        if self.releases_units:
            values["reshard_after_forward"] = True
        return ParallelPlan(**values)

    def workload(self, workload: Workload) -> Workload:
        """What a step trains, with microbatches and recomputation filled in."""
        return dataclasses.replace(
            workload, micro_batch=self.micro_batch, recompute=self.recompute, in_backward=self.in_backward
        )


def check_fixed(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What is fixed, in one spelling.

    Raises:
        ConfigError: A name is not known.
        PlacementError: The strategy is not.
    """
    known = [*plan_fields(), *WORKLOAD_FIELDS]
    for name in fixed:
        if name not in known:
            hint = did_you_mean(name, known) or f" Fields are: {', '.join(known)}."
            raise ConfigError(f"{name!r} cannot be fixed: it is no field of a plan.\n {hint}")
    held = dict(fixed)
    if isinstance(strategy := held.get("strategy"), str):
        held["strategy"] = canonical_name(strategy)
    if "activation_checkpointing" in held:
        held.setdefault("recompute", held["activation_checkpointing"])
        if held["recompute"] in RECOMPUTE:
            del held["activation_checkpointing"]
    return held


def microbatches(layout: Layout, workload: Workload, fixed: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Sequences of a forward and forwards of a step, whose product is what a data-parallel rank trains."""
    samples = workload.global_batch // layout.data_parallel_size
    for micro in divisors(samples):
        if fixed.get("micro_batch", micro) == micro and fixed.get("accumulation_steps", samples // micro) == (
            samples // micro
        ):
            yield micro, samples // micro


def candidates(
    shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]
) -> Iterator[Candidate]:
    """Every candidate that the engine accepts."""
    for layout in layouts(shape, cluster, workload, fixed):
        for strategy in strategies(layout, fixed):
            for micro, count in microbatches(layout, workload, fixed):
                for schedule, stages in schedules(shape, layout.pp, count, fixed):
                    base = Candidate(layout, strategy, schedule, stages, micro, count)
                    for saving in savings(base, workload, fixed):
                        yield base._replace(**saving)


def savings(base: Candidate, workload: Workload, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What trades time for memory, the least of it first."""
    shards = PRESETS[base.strategy].shards_parameters
    is_pipeline = base.layout.pp > 1
    offloads = [name for name in OFFLOADS if (name != "optimizer" or shards) and fixed.get("offload", name) == name]
    if "offload_policy" in fixed:
        offloads = ["none"]
    recompute = [fixed["recompute"]] if "recompute" in fixed else list(RECOMPUTE)
    if workload.compile or fixed.get("compile"):
        recompute = [value for value in recompute if value != "selective"]
    for offload in offloads:
        can_update = not is_pipeline and base.accumulation == 1 and offload == "none" and workload.precision != "fp16"
        for in_backward in (False, True) if can_update and "offload_policy" not in fixed else (False,):
            if fixed.get("in_backward", in_backward) != in_backward:
                continue
            for releases in (
                (False, True) if is_pipeline and shards and "reshard_after_forward" not in fixed else (False,)
            ):
                for value in recompute:
                    yield {
                        "offload": offload,
                        "recompute": value,
                        "in_backward": in_backward,
                        "releases_units": releases,
                    }
