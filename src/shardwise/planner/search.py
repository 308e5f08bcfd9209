"""Every legal plan for a world, pruned by memory and ranked by time.

A candidate goes through four stages, and the first that refuses it spares it the others:

1. it is not legal (:mod:`planner.legal`): it is never made;
2. what it holds at least is more than the device has (:class:`planner.bounds.MemoryBound`);
3. it takes no less time than plans already found (:class:`planner.bounds.TimeBound`);
4. its memory does not suffice, as :func:`planner.memory.estimate_memory` says.

What is left is estimated in full, in the order of the bounds of time, so that good plans are found early. Stages 2 and
3 use bounds from below: the fastest plan that is found is the fastest legal one, or at most 2% slower, and the best of
a kind at most 5%; the tests compare with estimating every legal plan. Stage 4 asks less often than once for each
candidate: a larger microbatch holds no less; where a plan does not fit, no more does the same one that saves less; and
where a plan fits, the same one with recomputation or offloading is no faster.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.bounds import MemoryBound, TimeBound
from shardwise.planner.candidate import (
    Candidate,
    bases,
    check_fixed,
    microbatches,
    saves_less,
    savings,
)
from shardwise.planner.estimate import Estimate, Plans, estimate, needed_bytes, usable_bytes
from shardwise.planner.legal import schedules, why_none
from shardwise.planner.memory import estimate_memory
from shardwise.planner.plainness import EQUALLY_FAST, order, plainness
from shardwise.spec.errors import ConfigError, PlanError
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape

#: Plans that are returned whatever their kind is; besides, the best of every kind.
NUM_BEST = 3

#: How much faster a plan must be for certain not to be passed over: than the best, and than the best of its kind.
SLACK, SLACK_OF_KIND = 0.02, 0.05


def search(shape: ModelShape, cluster: Cluster, workload: Workload, **fixed: Any) -> Plans:
    """The best plans for a model on a cluster, the recommended one first.

    Recommended is the plainest plan (:mod:`planner.plainness`) of those that take at most
    :data:`~planner.plainness.EQUALLY_FAST` longer than the fastest and leave :data:`~planner.estimate.MARGIN` of the
    device's memory free; where no plan leaves as much, of those that fit.

    A kind is a strategy of data parallelism alone; one of the axes ``tp``, ``pp``, ``cp``, ``ep`` beside it, under
    any strategy; or several of them.

    Args:
        shape: The model.
        cluster: The GPUs.
        workload: What a step trains. The search chooses ``micro_batch`` and ``recompute``, unless they are fixed.
        **fixed: Fields of the plan that every proposal has, and ``micro_batch``, ``accumulation_steps``,
            ``recompute``, ``in_backward``, and the pipeline's ``schedule``.

    Returns:
        The recommended plan. Behind it the fastest plans and the best of each kind, fastest first; then, for each kind
        that has none, a plan that fits but leaves less memory free (``is_tight``), fastest first; then, for each kind
        that has none of these either, a plan that saves all memory that it can and does not fit all the same (``fits``
        is false), the smallest first.

    Raises:
        ConfigError: A fixed name is unknown, or the engine does not train in the workload's precision.
        PlanError: No plan is legal with what is fixed.
    """
    return Plans(_Search(shape, cluster, workload, check_fixed(fixed)).run())


def fastest_of(plans: Sequence[Estimate]) -> Estimate:
    """The fastest of a search's plans among those that it could have recommended."""
    alike = [made for made in plans if (made.fits, made.is_tight) == (plans[0].fits, plans[0].is_tight)]
    return min(alike, key=lambda made: made.step_time_s)


def kind_of(plan: ParallelPlan | Candidate) -> str:
    """The axis besides data parallelism with more than one rank, or ``several``; without any, the strategy."""
    axes = plan.layout if isinstance(plan, Candidate) else plan
    found = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(axes, axis) > 1]
    if not found:
        return str(plan.strategy)
    return found[0] if len(found) == 1 else "several"


class _Family(NamedTuple):
    """The candidates of one base, by how much is recomputed.

    Attributes:
        base: What they have in common.
        choices: Those that recompute least.
        others: Those that recompute more, in groups.
        least_bytes: For each group, ``choices`` first, what its smallest holds at least.
    """

    base: Candidate
    choices: list[Candidate]
    others: list[list[Candidate]]
    least_bytes: list[float]

    @property
    def is_one(self) -> bool:
        """Whether it is one candidate."""
        return len(self.choices) == 1 and not self.others

    def within(self, capacity: float) -> _Family | None:
        """The family without groups that certainly hold more; ``None`` where all do."""
        groups = [self.choices, *self.others]
        first = next((place for place, least in enumerate(self.least_bytes) if least <= capacity), None)
        if first is None:
            return None
        return _Family(self.base, groups[first], groups[first + 1 :], self.least_bytes[first:])


#: What is tried where no plan fits, one after the other: fields of a candidate, and of the plan.
_RESORTS = {"offloads_activations": "offload_activations", "gathers_late": "backward_prefetch"}


class _Search:
    def __init__(self, shape: ModelShape, cluster: Cluster, workload: Workload, fixed: dict[str, Any]) -> None:
        if workload.precision == "fp8":
            raise ConfigError(
                "precision='fp8': the engine computes in fp32, bf16 and fp16.\n"
                "  Use bf16; sw.planner.estimate() takes fp8, for a plan of your own."
            )
        self.shape, self.cluster, self.workload, self.fixed = shape, cluster, workload, fixed
        self.num_estimates = self.num_memory = 0
        self._resorts = {
            "offloads_activations": bool(fixed.get("offload_activations", False)),
            "gathers_late": fixed.get("backward_prefetch") == 0,
        }
        self.least_bytes = MemoryBound(shape, cluster, workload)
        self.least_time = TimeBound(shape, cluster, workload, fixed)
        self._bytes: dict[Candidate, float] = {}
        self._plans: dict[Candidate, ParallelPlan] = {}
        self._made: dict[Candidate, Estimate] = {}

    def run(self) -> list[Estimate]:
        """The result of :func:`search`."""
        roomy, tight, kinds = self._explored()
        for resort, field in _RESORTS.items():
            if roomy.found or tight.found or field in self.fixed:
                continue
            self._resorts[resort] = True  # nothing else makes it fit
            roomy, tight, kinds = self._explored()
        lacking = kinds.keys() - roomy.best_of
        chosen, rest = (roomy, tight) if roomy.found else (tight, roomy)
        result = [*chosen.ranked(chosen.recommended()), *rest.ranked()]
        missing = [self._smallest(base) for kind, base in kinds.items() if kind in lacking - tight.best_of.keys()]
        return result + sorted(missing, key=lambda made: made.memory.device_bytes)

    def _explored(self) -> tuple[_Pass, _Pass, dict[str, Candidate]]:
        """What fits with room to spare, what of other kinds fits without, and a base of each kind."""
        every, kinds = self._families()
        if not kinds:
            raise PlanError(_nothing_legal(self.shape, self.cluster, self.workload, self.fixed))
        roomy = _Pass(self, usable_bytes(self.cluster))
        roomy.explore(every)
        lacking = kinds.keys() - roomy.best_of
        tight = _Pass(self, self.cluster.device.memory_bytes)
        tight.explore([family for family in every if kind_of(family.base) in lacking])
        return roomy, tight, kinds

    def _savings(self, base: Candidate) -> list[Candidate]:
        """A base with every way to trade time for memory, activations on the host included where they are to be."""
        found = savings(base, self.workload, self.fixed)
        if self._resorts["offloads_activations"]:
            found = [choice for choice in found if choice.recompute != "selective"]
        is_away = self._resorts["offloads_activations"]
        gathers_late = self._resorts["gathers_late"] and PRESETS[base.strategy].shards_parameters
        return [choice._replace(offloads_activations=is_away, gathers_late=gathers_late) for choice in found]

    def _families(self) -> tuple[list[_Family], dict[str, Candidate]]:
        """What may fit, and for each kind the base that holds the least with all memory saved."""
        capacity = self.cluster.device.memory_bytes
        found: list[_Family] = []
        smallest: dict[str, tuple[float, int, Candidate]] = {}
        for base in bases(self.shape, self.cluster, self.workload, self.fixed):
            choices = self._savings(base)
            if not choices:
                continue
            kind, least = kind_of(base), self.least_bytes(choices[-1])
            if kind not in smallest or (least, base.micro_batch) < smallest[kind][:2]:
                smallest[kind] = least, base.micro_batch, base
            if least <= capacity:
                groups = [[c for c in choices if c.recompute == r] for r in dict.fromkeys(c.recompute for c in choices)]
                found.append(_Family(base, groups[0], groups[1:], [self.least_bytes(group[-1]) for group in groups]))
        return found, {kind: base for kind, (_, _, base) in smallest.items()}

    def _smallest(self, base: Candidate) -> Estimate:
        """The plan of a base that comes nearest to fitting: with all memory saved, in the host's or not."""
        every = self._savings(base)
        on_device = [choice for choice in every if choice.offload == "none"]
        most = [choices[-1] for choices in (every, on_device) if choices]
        return self.estimate(min(most, key=self.device_bytes))

    def device_bytes(self, candidate: Candidate) -> float:
        """What the fullest rank's device needs."""
        if candidate not in self._bytes:
            self.num_memory += 1
            plan, workload = self.plan(candidate), candidate.workload(self.workload)
            memory = estimate_memory(self.shape, plan, self.cluster, workload)
            self._bytes[candidate] = needed_bytes(memory, self.cluster)
        return self._bytes[candidate]

    def estimate(self, candidate: Candidate) -> Estimate:
        """Memory and time."""
        if candidate not in self._made:
            self.num_estimates += 1
            self._made[candidate] = estimate(
                self.shape, self.plan(candidate), self.cluster, candidate.workload(self.workload)
            )
        return self._made[candidate]

    def plan(self, candidate: Candidate) -> ParallelPlan:
        """The plan of a candidate; without a pipeline it is the same for every microbatch."""
        key = candidate if candidate.schedule else candidate._replace(micro_batch=0, accumulation=0)
        if key not in self._plans:
            self._plans[key] = candidate.plan(self.workload, self.fixed)
        return self._plans[key]


class _Pass:
    """One pass over candidates, with so much memory on a device.

    Attributes:
        found: What was estimated.
        best_of: Seconds of the fastest of each kind.
    """

    def __init__(self, asked: _Search, capacity: float) -> None:
        self._asked, self._capacity = asked, capacity
        self.found: dict[Candidate, Estimate] = {}
        self.best_of: dict[str, float] = {}
        self._times: list[float] = []
        self._passed_over: list[tuple[float, _Family]] = []
        self._fitting: dict[Candidate, list[Candidate]] = {}
        self._limits: dict[Candidate, list[int]] = {}

    def explore(self, every: Iterable[_Family]) -> None:
        """Estimate what may be among the fastest, or the fastest of its kind, in the order of the bounds of time."""
        number = itertools.count()
        heap = [
            (self._least_time(family), next(number), family)
            for family in (given.within(self._capacity) for given in every)
            if family is not None
        ]
        heapq.heapify(heap)
        while heap:
            least, _, family = heapq.heappop(heap)
            if self._is_slow(least, kind_of(family.base)):
                self._passed_over.append((least, family))
            elif family.is_one:
                self._try(family.choices[0])
            else:
                for part in self._parts(family):
                    heapq.heappush(heap, (max(least, self._least_time(part)), next(number), part))

    def _parts(self, family: _Family) -> Iterator[_Family]:
        """The choices of a family, each alone, and the family with more recomputation; nothing if none can fit."""
        most = family.others[-1][-1] if family.others else family.choices[-1]
        if not self._fits(most):
            return
        for choice in family.choices:
            if (least := self._asked.least_bytes(choice)) <= self._capacity:
                yield _Family(family.base, [choice], [], [least])
        if family.others:
            yield _Family(family.base, family.others[0], family.others[1:], family.least_bytes[1:])

    def _least_time(self, family: _Family) -> float:
        return self._asked.least_time(family.choices[0])

    def _is_slow(self, least: float, kind: str) -> bool:
        """Whether a plan that takes ``least`` seconds or more is neither among the best nor the best of its kind."""
        best_of_kind = self.best_of.get(kind)
        if best_of_kind is None or len(self._times) < NUM_BEST:
            return False
        return least >= (1 - SLACK) * min(self._times) and least >= (1 - SLACK_OF_KIND) * best_of_kind

    def _try(self, candidate: Candidate) -> Estimate | None:
        """Estimate a candidate that fits, unless the same one fits that saves less memory."""
        base = candidate._replace(
            offload="none",
            recompute="none",
            in_backward=False,
            releases_units=False,
            offloads_activations=False,
            gathers_late=False,
        )
        fitting = self._fitting.setdefault(base, [])
        if any(saves_less(other, candidate) for other in fitting) or not self._fits(candidate):
            return None
        fitting.append(candidate)
        made = self.found[candidate] = self._asked.estimate(candidate)
        self._times.append(made.step_time_s)
        kind = kind_of(candidate)
        self.best_of[kind] = min(made.step_time_s, self.best_of.get(kind, made.step_time_s))
        return made

    def recommended(self) -> Candidate | None:
        """The plainest of what is equally fast as the fastest; of equally plain plans the fastest.

        Candidates that were passed over, as they are slower than others, are tried here in the order of plainness.
        """
        if not self.found:
            return None
        most = (1 + EQUALLY_FAST) * min(self._times)
        found = {c: made.step_time_s for c, made in self.found.items() if made.step_time_s <= most}
        best = min(found, key=lambda c: (plainness(c), found[c], order(c)))
        # What saves less memory comes before the same with more, as `_try` needs it.
        plainest_first = sorted(
            self._left(most), key=lambda c: (plainness(c), c.releases_units, self._asked.least_time(c))
        )
        for candidate in plainest_first:
            if plainness(candidate) > plainness(best):
                break
            is_alike = plainness(candidate) == plainness(best)
            if is_alike and self._asked.least_time(candidate) >= (1 - SLACK) * found[best]:
                continue
            made = self._try(candidate)
            if made is None or made.step_time_s > most or (is_alike and made.step_time_s >= found[best]):
                continue
            best, found[candidate] = candidate, made.step_time_s
        return best

    def _left(self, most: float) -> Iterator[Candidate]:
        """Candidates that were passed over and may take no more than ``most`` seconds."""
        for least, family in self._passed_over:
            if least > most:
                continue
            for choice in itertools.chain(family.choices, *family.others):
                if self._asked.least_time(choice) <= most and self._asked.least_bytes(choice) <= self._capacity:
                    yield choice

    def ranked(self, first: Candidate | None = None) -> list[Estimate]:
        """The plans that the search returns: ``first``, the fastest, and the best of each kind, fastest first."""
        ranked = sorted(self.found.items(), key=lambda item: (item[1].step_time_s, order(item[0])))
        result = [] if first is None else [self.found[first]]
        seen: set[str] = set()
        for place, (candidate, made) in enumerate(ranked):
            if candidate != first and (place < NUM_BEST or kind_of(candidate) not in seen):
                result.append(made)
            seen.add(kind_of(candidate))
        return result

    def _fits(self, candidate: Candidate) -> bool:
        """Whether memory suffices. A larger microbatch holds no less, so few of them are asked for.

        A step of one microbatch is asked for apart, as it holds no sums of gradients.
        """
        key = candidate._replace(micro_batch=0, accumulation=min(candidate.accumulation, 2))
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
        fits = self._asked.device_bytes(candidate) <= self._capacity
        limits[not fits] = candidate.micro_batch
        return fits

    def _smallest_of(self, candidate: Candidate) -> tuple[int, int]:
        """The smallest microbatch of a layout, and how many of them make a step."""
        if candidate.accumulation == 1:
            return candidate.micro_batch, 1
        asked = self._asked
        sizes = microbatches(candidate.layout, asked.workload, asked.fixed)
        return next((micro, count) for micro, count in sizes if not candidate.schedule or self._runs(candidate, count))

    def _runs(self, candidate: Candidate, count: int) -> bool:
        found = schedules(self._asked.shape, candidate.layout.pp, count, self._asked.fixed)
        return (candidate.schedule, candidate.virtual_stages) in found


def _nothing_legal(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: dict[str, Any]) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in fixed.items())
    what = f" with {given}" if given else ""
    reasons = why_none(shape, cluster, workload, fixed)
    if reasons:
        return f"no plan for {shape.name} on {cluster.num_gpus} GPUs is legal{what}:\n  " + ";\n  ".join(reasons) + "."
    return (
        f"no plan for {shape.name} on {cluster.num_gpus} GPUs is legal{what}, for a global batch of"
        f" {workload.global_batch} sequences of {workload.seq_len} tokens.\n"
        "  The batch must be a multiple of the data-parallel ranks, tp must divide the heads, and pp be at most the"
        f" {shape.num_layers} layers: change what is fixed, or the batch."
    )
