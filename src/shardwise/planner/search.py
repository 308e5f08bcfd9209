"""Every legal plan for a world, pruned by memory and ranked by time.

A candidate goes through four stages, and the first that refuses it spares it the others:

1. it is not legal (:mod:`planner.legal`): it is never made;
2. what it holds at least is more than the device has (:class:`planner.bounds.MemoryBound`);
3. it takes no less time than plans already found (:class:`planner.bounds.TimeBound`);
4. its memory does not suffice, as :func:`planner.memory.estimate_memory` says.

What is left is estimated in full. Stages 2 and 3 use bounds from below: the first plan is the best legal one, or at
most 1% slower, and the best of a kind at most 5%; the tests compare with estimating every legal plan. Stage 4 asks less
often than once for each candidate: a larger microbatch holds no less; and where a plan fits, the same one with
recomputation or offloading is no faster.
"""

from __future__ import annotations

import bisect
from typing import Any

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.bounds import MemoryBound, TimeBound, order
from shardwise.planner.candidate import Candidate, bases, check_fixed, microbatches, saves_less, savings
from shardwise.planner.estimate import Estimate, estimate
from shardwise.planner.legal import schedules
from shardwise.planner.memory import estimate_memory
from shardwise.spec.errors import ConfigError, PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape

#: Plans that are returned whatever their kind is; besides, the best of every kind.
NUM_BEST = 3

#: How much faster a plan must be for certain not to be passed over: than the best, and than the best of its kind.
SLACK, SLACK_OF_KIND = 0.01, 0.05


def search(shape: ModelShape, cluster: Cluster, workload: Workload, **fixed: Any) -> list[Estimate]:
    """The best plans for a model on a cluster, and the best of each kind.

    A kind is a strategy of data parallelism alone; one of the axes ``tp``, ``pp``, ``cp``, ``ep`` beside it, under
    any strategy; or several of them.

    Args:
        shape: The model.
        cluster: The GPUs.
        workload: What a step trains. The search chooses ``micro_batch`` and ``recompute``, unless they are fixed.
        **fixed: Fields of the plan that every proposal has, and ``micro_batch``, ``accumulation_steps``,
            ``recompute``, ``in_backward``, and the pipeline's ``schedule``.

    Returns:
        Plans that fit, fastest first. Behind them, for each kind without one, a plan that saves all memory that it can
        and does not fit all the same (``fits`` is false), the smallest first.

    Raises:
        ConfigError: A fixed name is unknown, or the engine does not train in the workload's precision.
        PlanError: No plan is legal with what is fixed.
    """
    return _Search(shape, cluster, workload, check_fixed(fixed)).run()


def kind_of(plan: ParallelPlan | Candidate) -> str:
    """The axis besides data parallelism with more than one rank, or ``several``; without any, the strategy."""
    axes = plan.layout if isinstance(plan, Candidate) else plan
    found = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(axes, axis) > 1]
    if not found:
        return str(plan.strategy)
    return found[0] if len(found) == 1 else "several"


class _Search:
    def __init__(self, shape: ModelShape, cluster: Cluster, workload: Workload, fixed: dict[str, Any]) -> None:
        if workload.precision == "fp8":
            raise ConfigError(
                "precision='fp8': the engine computes in fp32, bf16 and fp16.\n"
                "  Use bf16; sw.planner.estimate() takes fp8, for a plan of your own."
            )
        self.shape, self.cluster, self.workload, self.fixed = shape, cluster, workload, fixed
        self.capacity = cluster.device.memory_bytes
        self.num_estimates = self.num_memory = 0
        self._least_bytes = MemoryBound(shape, workload)
        self._limits: dict[Candidate, list[int]] = {}
        self._plans: dict[Candidate, ParallelPlan] = {}

    def run(self) -> list[Estimate]:  # noqa: C901  the stages of the module's docstring
        """The result of :func:`search`."""
        bound = TimeBound(self.shape, self.cluster, self.workload, self.fixed)
        ranked: list[tuple[float, tuple[object, ...], Candidate]] = []
        smallest: dict[str, tuple[float, Candidate]] = {}
        for base in bases(self.shape, self.cluster, self.workload, self.fixed):
            choices = savings(base, self.workload, self.fixed)
            if not choices:
                continue
            least, kind = self._least_bytes(choices[-1]), kind_of(base)
            if kind not in smallest or (least, base.micro_batch) < (smallest[kind][0], smallest[kind][1].micro_batch):
                smallest[kind] = least, base
            if least <= self.capacity:
                ranked.append((bound(base), order(base), base))
        if not smallest:
            raise PlanError(_nothing_legal(self.shape, self.cluster, self.workload, self.fixed))
        ranked.sort(key=lambda item: item[:2])
        found: dict[Candidate, Estimate] = {}
        times: list[float] = []
        best_of: dict[str, float] = {}
        for least, _, base in ranked:
            kind = kind_of(base)

            def is_slow(candidate: Candidate, kind: str = kind) -> bool:
                return self._is_slow(bound(candidate), times, best_of.get(kind))

            if self._is_slow(least, times, best_of.get(kind)):
                continue
            for candidate in self._fitting([choice for choice in self._savings(base) if not is_slow(choice)]):
                if is_slow(candidate):
                    continue
                made = found[candidate] = self._estimate(candidate)
                bisect.insort(times, made.step_time_s)
                best_of[kind] = min(made.step_time_s, best_of.get(kind, made.step_time_s))
        return self._chosen(found, {kind: base for kind, (_, base) in smallest.items()})

    @staticmethod
    def _is_slow(least: float, times: list[float], best_of_kind: float | None) -> bool:
        """Whether a plan that takes ``least`` seconds or more is neither among the best nor the best of its kind."""
        if best_of_kind is None or len(times) < NUM_BEST:
            return False
        return least >= (1 - SLACK) * times[0] and least >= (1 - SLACK_OF_KIND) * best_of_kind

    def _savings(self, base: Candidate) -> list[Candidate]:
        every = savings(base, self.workload, self.fixed)
        return [choice for choice in every if self._least_bytes(choice) <= self.capacity]

    def _fitting(self, choices: list[Candidate]) -> list[Candidate]:
        """What fits of a base's choices, without what saves more memory than another that fits."""
        if len(choices) > 2 and not self._fits(choices[0]) and not self._fits(choices[-1]):
            return []
        fitting: list[Candidate] = []
        for choice in choices:
            if not any(saves_less(other, choice) for other in fitting) and self._fits(choice):
                fitting.append(choice)
        return fitting

    def _chosen(self, found: dict[Candidate, Estimate], kinds: dict[str, Candidate]) -> list[Estimate]:
        ranked = sorted(found.items(), key=lambda item: (item[1].step_time_s, order(item[0])))
        result: list[Estimate] = []
        seen: set[str] = set()
        for place, (candidate, made) in enumerate(ranked):
            if place < NUM_BEST or kind_of(candidate) not in seen:
                result.append(made)
            seen.add(kind_of(candidate))
        missing = [self._smallest(candidate) for kind, candidate in kinds.items() if kind not in seen]
        return result + sorted(missing, key=lambda made: made.memory.device_bytes)

    def _smallest(self, base: Candidate) -> Estimate:
        """The plan of a base that comes nearest to fitting: with all memory saved, in the host's or not."""
        every = savings(base, self.workload, self.fixed)
        on_device = [choice for choice in every if choice.offload == "none"]
        made = [self._estimate(choices[-1]) for choices in (every, on_device) if choices]
        return min(made, key=lambda made: made.memory.device_bytes)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether memory suffices. A larger microbatch holds no less, so few of them are asked for."""
        key = candidate._replace(micro_batch=0, accumulation=0)
        if key not in self._limits:
            self._limits[key] = [0, 1 << 62]
            micro, count = self._smallest_of(candidate)
            if micro != candidate.micro_batch and not self._fits(
                candidate._replace(micro_batch=micro, accumulation=count)
            ):
                return False
        limits = self._limits[key]
        if candidate.micro_batch <= limits[0]:
            return True
        if candidate.micro_batch >= limits[1]:
            return False
        self.num_memory += 1
        plan, workload = self._plan(candidate), candidate.workload(self.workload)
        fits = estimate_memory(self.shape, plan, self.cluster, workload).device_bytes <= self.capacity
        limits[not fits] = candidate.micro_batch
        return fits

    def _smallest_of(self, candidate: Candidate) -> tuple[int, int]:
        """The smallest microbatch of a layout, and how many of them make a step."""
        sizes = microbatches(candidate.layout, self.workload, self.fixed)
        return next((micro, count) for micro, count in sizes if not candidate.schedule or self._runs(candidate, count))

    def _runs(self, candidate: Candidate, count: int) -> bool:
        found = schedules(self.shape, candidate.layout.pp, count, self.fixed)
        return (candidate.schedule, candidate.virtual_stages) in found

    def _estimate(self, candidate: Candidate) -> Estimate:
        self.num_estimates += 1
        return estimate(self.shape, self._plan(candidate), self.cluster, candidate.workload(self.workload))

    def _plan(self, candidate: Candidate) -> ParallelPlan:
        """The plan of a candidate; without a pipeline it is the same for every microbatch."""
        key = candidate if candidate.schedule else candidate._replace(micro_batch=0, accumulation=0)
        if key not in self._plans:
            self._plans[key] = candidate.plan(self.workload, self.fixed)
        return self._plans[key]


def _nothing_legal(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: dict[str, Any]) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in fixed.items())
    what = f" with {given}" if given else ""
    return (
        f"no plan for {shape.name} on {cluster.num_gpus} GPUs is legal{what}, for a global batch of"
        f" {workload.global_batch} sequences of {workload.seq_len} tokens.\n"
        "  The batch must be a multiple of the data-parallel ranks, tp must divide the heads, and pp be at most the"
        f" {shape.num_layers} layers: change what is fixed, or the batch."
    )
