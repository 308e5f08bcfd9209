"""Every legal plan for a world, pruned by memory and ranked by time.

A candidate goes through four stages, and the first that refuses it spares it the others:

1. it is not legal (:mod:`planner.legal`): it is never made;
2. its states alone are more than the device holds (:func:`planner.bounds.least_state_bytes`);
3. its products alone take longer than the estimate of enough plans already found (:class:`planner.bounds.TimeBound`);
4. its memory does not suffice, as :func:`planner.memory.estimate_memory` says.

What is left is estimated in full. Stages 2 and 3 use bounds from below, so that no plan is lost that would be best; the
tests compare with estimating every legal plan. Stage 4 asks less often than once for each candidate by two facts: a
larger microbatch holds no less; and where a plan fits, the same one with recomputation or offloading is no faster.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import Any

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.bounds import TimeBound, least_state_bytes, order
from shardwise.planner.candidate import Candidate, candidates, check_fixed, savings
from shardwise.planner.estimate import Estimate, estimate
from shardwise.planner.memory import estimate_memory
from shardwise.spec.errors import ConfigError, PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape

#: Plans that are returned whatever their kind is; besides, the best of every kind.
NUM_BEST = 10


def search(shape: ModelShape, cluster: Cluster, workload: Workload, **fixed: Any) -> list[Estimate]:
    """The best plans for a model on a cluster, and the best of each kind.

    A kind is a strategy of data parallelism alone, or a set of other axes with more than one rank, under any strategy.

    Args:
        shape: The model.
        cluster: The GPUs.
        workload: What a step trains. The search chooses ``micro_batch`` and ``recompute``, unless they are fixed.
        **fixed: Fields of the plan that every proposal must have, and ``micro_batch``, ``accumulation_steps``,
            ``recompute``, ``in_backward``, and the pipeline's ``schedule``.

    Returns:
        Plans that fit, fastest first. Behind them, for each kind without one, a plan that saves all memory that it can
        and does not fit all the same (``fits`` is false), the smallest first.

    Raises:
        ConfigError: A fixed name is unknown, or the engine does not train in the workload's precision.
        PlanError: No plan is legal with what is fixed.
    """
    return _Search(shape, cluster, workload, check_fixed(fixed)).run()


def kind_of(plan: ParallelPlan | Candidate) -> tuple[str, ...]:
    """The axes of a plan besides data parallelism that have more than one rank; without any, its strategy."""
    axes = plan.layout if isinstance(plan, Candidate) else plan
    return tuple(axis for axis in ("tp", "pp", "cp", "ep") if getattr(axes, axis) > 1) or (str(plan.strategy),)


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
        self._limits: dict[Candidate, list[float]] = {}

    def run(self) -> list[Estimate]:
        """The result of :func:`search`."""
        bound = TimeBound(self.shape, self.cluster, self.workload)
        kinds: dict[tuple[str, ...], Candidate] = {}
        ranked: list[tuple[float, tuple[object, ...], Candidate]] = []
        for candidate in candidates(self.shape, self.cluster, self.workload, self.fixed):
            states = least_state_bytes(self.shape, candidate, self.workload)
            kind = kind_of(candidate)
            if kind not in kinds or states < least_state_bytes(self.shape, kinds[kind], self.workload):
                kinds[kind] = candidate
            if states <= self.capacity:
                ranked.append((bound(candidate), order(candidate), candidate))
        if not kinds:
            raise PlanError(_nothing_legal(self.shape, self.cluster, self.workload, self.fixed))
        ranked.sort(key=lambda item: item[:2])
        found: dict[Candidate, Estimate] = {}
        best: list[float] = []
        best_of: dict[tuple[str, ...], float] = defaultdict(lambda: float("inf"))
        for least, _, candidate in ranked:
            kind = kind_of(candidate)
            is_slow = len(best) >= NUM_BEST and least >= best[NUM_BEST - 1]
            if (is_slow and least >= best_of[kind]) or self._is_needless(candidate) or not self._fits(candidate):
                continue
            made = self._estimate(candidate)
            if not made.fits:
                continue
            found[candidate] = made
            bisect.insort(best, made.step_time_s)
            best_of[kind] = min(best_of[kind], made.step_time_s)
        return self._chosen(found, kinds)

    def _chosen(self, found: dict[Candidate, Estimate], kinds: dict[tuple[str, ...], Candidate]) -> list[Estimate]:
        ranked = sorted(found.items(), key=lambda item: (item[1].step_time_s, order(item[0])))
        result: list[Estimate] = []
        seen: set[tuple[str, ...]] = set()
        for place, (candidate, made) in enumerate(ranked):
            if place < NUM_BEST or kind_of(candidate) not in seen:
                result.append(made)
            seen.add(kind_of(candidate))
        missing = [self._smallest(candidate) for kind, candidate in kinds.items() if kind not in seen]
        return result + sorted(missing, key=lambda made: made.memory.device_bytes)

    def _smallest(self, candidate: Candidate) -> Estimate:
        """The plan of a candidate's kind that comes nearest to fitting: the smallest microbatch, everything saved."""
        kept = [candidate._replace(**saving) for saving in savings(candidate, self.workload, self.fixed)]
        on_device = [choice for choice in kept if choice.offload == "none"]
        return min(
            (self._estimate(choices[-1]) for choices in (kept, on_device) if choices),
            key=lambda made: made.memory.device_bytes,
        )

    def _is_needless(self, candidate: Candidate) -> bool:
        """Whether the same plan fits without saving as much memory."""
        for saving in savings(candidate, self.workload, self.fixed):
            other = candidate._replace(**saving)
            if other != candidate and _saves_less(other, candidate) and self._fits(other):
                return True
        return False

    def _fits(self, candidate: Candidate) -> bool:
        """Whether memory suffices; asks once for each size of microbatch between the largest that fits and the next."""
        key = candidate._replace(micro_batch=0, accumulation=0)
        limits = self._limits.setdefault(key, [0.0, float("inf")])
        if candidate.micro_batch <= limits[0]:
            return True
        if candidate.micro_batch >= limits[1]:
            return False
        plan, workload = candidate.plan(self.workload, self.fixed), candidate.workload(self.workload)
        self.num_memory += 1
        fits = estimate_memory(self.shape, plan, self.cluster, workload).device_bytes <= self.capacity
        limits[not fits] = candidate.micro_batch
        return fits

    def _estimate(self, candidate: Candidate) -> Estimate:
        self.num_estimates += 1
        plan, workload = candidate.plan(self.workload, self.fixed), candidate.workload(self.workload)
        return estimate(self.shape, plan, self.cluster, workload)


_LEVELS = {"none": 0, "optimizer": 1, "cpu": 2, "selective": 1, "full": 2}


def _saves_less(a: Candidate, b: Candidate) -> bool:
    """Whether ``a`` saves no more memory than ``b`` in any respect, and less in one."""

    def levels(candidate: Candidate) -> tuple[int, ...]:
        recompute = candidate.recompute
        return (
            _LEVELS[candidate.offload],
            _LEVELS.get(str(recompute), 1),
            candidate.in_backward,
            candidate.releases_units,
        )

    return all(x <= y for x, y in zip(levels(a), levels(b), strict=True))


def _nothing_legal(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: dict[str, Any]) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in fixed.items())
    what = f" with {given}" if given else ""
    return (
        f"no plan for {shape.name} on {cluster.num_gpus} GPUs is legal{what}, for a global batch of"
        f" {workload.global_batch} sequences of {workload.seq_len} tokens.\n"
        "  The batch must be a multiple of the data-parallel ranks, tp must divide the heads, and pp be at most the"
        f" {shape.num_layers} layers: change what is fixed, or the batch."
    )
