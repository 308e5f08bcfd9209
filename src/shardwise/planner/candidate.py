"""Candidates of the search: tuples, because there are many; only good ones are converted to plans and workloads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.legal import Layout, divisors, layouts, schedules, strategies
from shardwise.spec.errors import ConfigError
from shardwise.spec.placement import PRESETS, canonical_name
from shardwise.spec.plan import ParallelPlan, plan_fields
from shardwise.spec.policies import OffloadPolicy, PrecisionPolicy, offload_policy, recompute_policy
from shardwise.spec.schedule import PipelinePolicy, pipeline_policy
from shardwise.spec.shape import ModelShape
from shardwise.spec.text import did_you_mean

RECOMPUTE = ("none", "selective", "full")

#: Data in host memory: nothing; masters, gradients and optimizer state; these and shards of parameters.
OFFLOADS = ("none", "optimizer", "cpu")

#: Names that can be fixed in addition to fields of the plan.
WORKLOAD_FIELDS = ("micro_batch", "recompute", "accumulation_steps", "in_backward", "schedule")


class Candidate(NamedTuple):
    """One way to run a step: a layout, and choices of strategy, schedule, microbatches and memory saving.

    Attributes:
        layout: Degrees of every axis.
        strategy: A preset.
        schedule: Schedule of the pipeline; ``""`` without one.
        virtual_stages: Stages of each rank of the pipeline.
        micro_batch: Sequences of a forward.
        accumulation: Microbatches of a step.
        offload: One of ``OFFLOADS``.
        recompute: ``"none"``, ``"selective"``, ``"full"``, or a number of blocks.
        in_backward: Units are updated inside backward.
        releases_units: A pipeline releases units after each use, instead of keeping them for the step.
        offloads_activations: Saved activations are kept on the host between forward and backward.
        gathers_late: Units are gathered when they are needed, without prefetch.
        chunks_loss: The loss is computed for a part of the positions at a time.
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
    offloads_activations: bool = False
    gathers_late: bool = False
    chunks_loss: bool = False

    def plan(self, workload: Workload, fixed: Mapping[str, Any]) -> ParallelPlan:
        """The ``ParallelPlan`` of this candidate, with every degree filled in."""
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
        if self.offloads_activations:
            values.setdefault("offload_activations", True)
        if self.gathers_late:
            values |= {"forward_prefetch": 0, "backward_prefetch": 0}
        return ParallelPlan(**values)

    def workload(self, workload: Workload) -> Workload:
        """The workload of a step, with microbatches and recomputation filled in."""
        return dataclasses.replace(
            workload,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            in_backward=self.in_backward,
            chunked_loss=workload.chunked_loss or self.chunks_loss,
        )


def kind_of(plan: ParallelPlan | Candidate) -> str:
    """The model-parallel axis with more than one rank, ``several`` if there are more, or the strategy if none."""
    axes = plan.layout if isinstance(plan, Candidate) else plan
    found = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(axes, axis) > 1]
    if not found:
        return str(plan.strategy)
    return found[0] if len(found) == 1 else "several"


def check_fixed(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Normalize the fixed values to one spelling.

    Raises:
        ConfigError: A name is not known, or a number of recomputed blocks is fixed.
        PlacementError: The strategy is not known.
        PlanError: The recomputation is not known.
    """
    known = [*plan_fields(), *WORKLOAD_FIELDS]
    for name in fixed:
        if name not in known:
            hint = did_you_mean(name, known) or f" Fields are: {', '.join(known)}."
            raise ConfigError(f"{name!r} cannot be fixed: it is not a field of a plan.\n {hint}")
    fields = dict(fixed)
    if isinstance(strategy := fields.get("strategy"), str):
        fields["strategy"] = canonical_name(strategy)
    if fields.get("activation_checkpointing") in RECOMPUTE:
        fields.setdefault("recompute", fields.pop("activation_checkpointing"))
    elif "activation_checkpointing" in fields:  # a policy by modules: its savings depend on the modules
        fields.setdefault("recompute", "full")
    if isinstance(wanted := fields.get("recompute", "none"), int):
        raise ConfigError(
            f"recompute={wanted} cannot be fixed: the search tries {', '.join(RECOMPUTE)}.\n"
            "  Fix one of these. sw.planner.estimate tells what a plan needs that recomputes a number of blocks:"
            f" Workload(recompute={wanted})."
        )
    if wanted not in RECOMPUTE:
        recompute_policy(wanted)  # refuses it
    if (pipeline := fields.pop("pipeline", None)) is not None:
        policy = pipeline_policy(pipeline)
        fields.setdefault("schedule", policy.schedule)
        if policy.num_microbatches is not None:
            fields.setdefault("accumulation_steps", policy.num_microbatches)
    return fields


def microbatches(layout: Layout, workload: Workload, fixed: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Pairs (sequences of a forward, forwards of a step); their product is the batch of a data-parallel rank.

    Unless one of both is fixed, the sequences of a forward are a power of two, or all. A pipeline has at least as many
    microbatches as ranks, if there are enough sequences.
    """
    samples = workload.global_batch // layout.data_parallel_size
    is_open = "micro_batch" not in fixed and "accumulation_steps" not in fixed
    for micro in divisors(samples):
        is_usual = micro == 1 or (micro * layout.pp <= samples and (micro & (micro - 1) == 0 or micro == samples))
        if is_open and not is_usual:
            continue
        if fixed.get("micro_batch", micro) == micro and fixed.get("accumulation_steps", samples // micro) == (
            samples // micro
        ):
            yield micro, samples // micro


def bases(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """Every candidate that the engine accepts and that does not trade time for memory."""
    for layout in layouts(shape, cluster, workload, fixed):
        named = strategies(layout, fixed)
        for micro, count in microbatches(layout, workload, fixed):
            for schedule, stages in schedules(shape, layout.pp, count, fixed):
                for strategy in named:
                    yield Candidate(layout, strategy, schedule, stages, micro, count)


def savings(base: Candidate, workload: Workload, fixed: Mapping[str, Any]) -> list[Candidate]:
    """The variants of a base that trade time for memory, the smallest trade first."""
    is_pipeline, shards = base.layout.pp > 1, PRESETS[base.strategy].shards_parameters
    is_on_host = offload_policy(fixed.get("offload_policy") or "none") is not None
    ways = _ways(
        (fixed["recompute"],) if "recompute" in fixed else None,
        in_backward=fixed.get("in_backward"),
        is_compiled=workload.compile or bool(fixed.get("compile")),
        offloads="offload_policy" not in fixed,
        must_offload=shards and base.layout.dp_shard * base.layout.cp == 1 and "strategy" not in fixed,
        shards=shards,
        can_update=not is_pipeline and (base.accumulation == 1 or is_on_host) and workload.precision != "fp16",
        can_release=is_pipeline and shards and "reshard_after_forward" not in fixed,
    )
    return [Candidate(*base[:6], *way) for way in ways]


@functools.cache
def _ways(
    recompute: tuple[str | int] | None,
    *,
    in_backward: bool | None,
    is_compiled: bool,
    offloads: bool,
    must_offload: bool,
    shards: bool,
    can_update: bool,
    can_release: bool,
) -> tuple[tuple[str, str | int, bool, bool], ...]:
    """Values of ``offload``, ``recompute``, ``in_backward`` and ``releases_units``, in the order of :func:`savings`."""
    values = recompute or [r for r in RECOMPUTE if not (is_compiled and r == "selective")]
    kept = [o for o in OFFLOADS if shards or o != "optimizer"] if offloads else ["none"]
    kept = ["cpu"] if must_offload and offloads else kept
    found = []
    for offload in kept:
        # With states on the host, an update inside backward saves no device memory and forbids clipping, so it is
        # tried only if it is fixed.
        may_update = can_update and (in_backward is not None or (offload == "none" and offloads))
        updates = [u for u in ((False, True) if may_update else (False,)) if in_backward in {None, u}]
        releases = (False, True) if can_release else (False,)
        found += [(offload, value, *way) for way in itertools.product(updates, releases) for value in values]
    return tuple(found)


def candidates(
    shape: ModelShape, cluster: Cluster, workload: Workload, fixed: Mapping[str, Any]
) -> Iterator[Candidate]:
    """Every legal candidate."""
    for base in bases(shape, cluster, workload, fixed):
        yield from savings(base, workload, fixed)


_LEVELS: dict[object, int] = {"none": 0, "optimizer": 1, "cpu": 2, "selective": 1, "full": 2}


def saves_less(a: Candidate, b: Candidate) -> bool:
    """Whether ``a`` saves no more memory than ``b`` in any field; both have the same base."""
    return (
        _LEVELS[a.offload] <= _LEVELS[b.offload]
        and _LEVELS.get(a.recompute, 1) <= _LEVELS.get(b.recompute, 1)
        and a.in_backward <= b.in_backward
        and a.releases_units <= b.releases_units
        and a.offloads_activations <= b.offloads_activations
        and a.gathers_late <= b.gathers_late
        and a.chunks_loss <= b.chunks_loss
    )
