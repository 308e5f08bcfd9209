"""Search for the plans that fit a cluster, ranked by predicted time and risk.

Candidates are enumerated (:mod:`planner.legal`, :mod:`planner.candidate`): powers of two and divisors. Candidates that
a lower bound of their memory rules out are dropped. The others are ordered by a rough time in closed form
(:mod:`planner.rough`) and their risk (:mod:`planner.risk`), and the first of each kind that fit are estimated in full.

Time is traded for memory in the order in which people do it. Smaller microbatches and recomputation are always tried.
Host memory is tried only if nothing fits without it, and then axes over links that pass through the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner.bounds import MemoryBound, expert_parameters
from shardwise.planner.candidate import Candidate, bases, check_fixed, kind_of, saves_less, savings
from shardwise.planner.estimate import Estimate, Plans, estimate
from shardwise.planner.legal import can_chunk, why_none
from shardwise.planner.memory import MemoryEstimate, estimate_memory
from shardwise.planner.planned import needed_bytes, usable_bytes
from shardwise.planner.risk import fullness, order, risk
from shardwise.planner.rough import RoughTime
from shardwise.spec.errors import ConfigError, PlanError
from shardwise.spec.placement import PRESETS
from shardwise.spec.shape import ModelShape

#: Fastest plans that are returned whatever their kind is, in addition to the best of every kind.
NUM_BEST = 3

#: Most plans of each kind that are estimated in full, and the largest ratio of their rough time to that of the best.
NUM_ESTIMATED, FAR = 8, 1.3


def search(shape: ModelShape, cluster: Cluster, workload: Workload, **fixed: Any) -> Plans:
    """The best plans for a model on a cluster, the recommended one first.

    The recommended plan fits and has the least time with its risk added (:mod:`planner.risk`). A plan that leaves less
    than :data:`~planner.planned.MARGIN` of the device's memory free has the additional risk of running out of memory.

    The kind of a plan is its strategy if it has data parallelism alone, the axis if one of ``tp``, ``pp``, ``cp``,
    ``ep`` has several ranks, and otherwise "several".

    Args:
        shape: The model.
        cluster: The GPUs.
        workload: The batch and settings of a step. The search chooses ``micro_batch`` and ``recompute``, unless they
            are fixed.
        **fixed: Values that every plan must have: fields of the plan, ``micro_batch``, ``accumulation_steps``,
            ``recompute``, ``in_backward``, and the pipeline's ``schedule``.

    Returns:
        The recommended plan, then the fastest plans and the best of each kind, fastest first. For each kind without
        such a plan, a tight plan follows (``is_tight``), fastest first. For each kind without either, a plan follows
        that saves as much memory as possible and still does not fit (``fits`` is false), the smallest first.

    Raises:
        ConfigError: A fixed name is unknown, or the engine does not train in the workload's precision.
        PlanError: No plan is legal with the fixed values.
    """
    return Plans(_Search(shape, cluster, workload, check_fixed(fixed)).run())


#: Axes that need links between the GPUs of a node.
_LINKED = ("tp", "cp", "pp")

#: Measures to try if no plan fits, each in addition to those before it, and the plan's field that fixes it, if any.
#: ``offload``: host memory for states, updates inside backward, and in a pipeline gathers for every microbatch.
#: ``axes``: axes over links that pass through the host. ``activations``: host memory for activations. ``late``: gathers
#: without prefetch.
_RESORTS = {"offload": "offload_policy", "axes": "", "activations": "offload_activations", "late": "backward_prefetch"}


class _Search:
    def __init__(self, shape: ModelShape, cluster: Cluster, workload: Workload, fixed: dict[str, Any]) -> None:
        if workload.precision == "fp8":
            raise ConfigError(
                "precision='fp8': the engine computes in fp32, bf16 and fp16.\n"
                "  Use bf16; sw.planner.estimate() takes fp8, for a plan of your own."
            )
        self.shape, self.cluster, self.workload, self.fixed = shape, cluster, workload, fixed
        self.is_mixture = expert_parameters(shape) > 0
        self.resorts = set[str]()
        if fixed.get("offload_activations"):
            self.resorts.add("activations")
        if fixed.get("backward_prefetch") == 0:
            self.resorts.add("late")
        self.least_bytes = MemoryBound(shape, cluster, workload, fixed)
        self.rough_s = RoughTime(shape, cluster, workload, fixed)
        self._bytes: dict[Candidate, dict[int, float]] = {}  # by microbatch
        self._refused: PlanError | None = None  # the error of the first layout that fixed values do not permit

    def run(self) -> list[Estimate]:
        """The result of :func:`search`."""
        found = self._explored()
        for resort, field in _RESORTS.items():
            is_first = resort == "offload"  # is tried before tight plans are accepted
            enough = any(made.fits and not (is_first and made.is_tight) for made, _ in found.values())
            if enough or (field and field in self.fixed):
                continue
            self.resorts.add(resort)
            found = self._explored() or found
        if not found:
            raise self._refused or PlanError(_nothing_legal(self.shape, self.cluster, self.workload, self.fixed))
        groups: list[list[Candidate]] = [[], [], []]  # with enough free memory, tight, too large
        for candidate, (made, _) in found.items():
            groups[made.is_tight + 2 * (not made.fits)].append(candidate)
        roomy, tight, more = groups
        result = [min([*roomy, *tight], key=lambda c: (found[c][1], order(c)))] if roomy or tight else []
        if not roomy:
            roomy, tight = tight, []
        for group in (roomy, tight):
            kinds = {kind_of(candidate) for candidate in result[1:]} if group is tight else set()
            ranked = sorted(group, key=lambda c: (found[c][0].step_time_s, order(c)))
            for place, candidate in enumerate(ranked):
                if candidate not in result and (
                    (place < NUM_BEST and group is roomy) or kind_of(candidate) not in kinds
                ):
                    result.append(candidate)
                kinds.add(kind_of(candidate))
        kinds = {kind_of(candidate) for candidate in result}
        missing = sorted((c for c in more if kind_of(c) not in kinds), key=lambda c: found[c][0].memory.device_bytes)
        return [found[candidate][0] for candidate in result + missing]

    def _explored(self) -> dict[Candidate, tuple[Estimate, float]]:
        """The best plans of each kind by rough time that fit, or the smallest one, with their costs."""
        capacity = self.cluster.device.memory_bytes
        ranked, smallest = self._ranked()
        most = NUM_ESTIMATED if self.cluster.device.measured is None else len(ranked)  # measured: no rough times
        found: dict[Candidate, tuple[Estimate, float]] = {}
        fitting: dict[Candidate, list[Candidate]] = {}
        times: dict[str, list[float]] = {}  # by kind, rough times of plans that are not tight
        for rough, candidate in ranked:
            roomy = times.setdefault(kind_of(candidate), [])
            if len(roomy) >= most or (roomy and rough > FAR * roomy[0]):
                continue
            alike = fitting.setdefault(_plain(candidate), [])
            if any(saves_less(other, candidate) for other in alike):
                continue  # a variant that saves less memory fits
            is_tight = not self._fits(candidate, usable_bytes(self.cluster))
            if is_tight and (roomy or not self._fits(candidate, capacity)):
                continue
            found[candidate] = self._judged(candidate)
            if not is_tight:
                alike.append(candidate)
                roomy.append(rough)
        kinds = {kind_of(candidate) for candidate in found}
        left = [min(least, key=self._device_bytes) for kind, least in smallest.items() if kind not in kinds]
        return found | {candidate: self._judged(candidate) for candidate in left}

    def _ranked(self) -> tuple[list[tuple[float, Candidate]], dict[str, list[Candidate]]]:
        """Candidates that may fit, by rough time and risk; of each kind the smallest with one microbatch, and more."""
        found: list[tuple[float, Candidate]] = []
        smallest: dict[tuple[str, bool], tuple[tuple[float, int], Candidate]] = {}
        for candidate in self._candidates():
            least, kind = self.least_bytes(candidate), (kind_of(candidate), candidate.accumulation == 1)
            size = least, candidate.micro_batch
            if kind not in smallest or size <= smallest[kind][0]:
                smallest[kind] = size, candidate
            if least <= self.cluster.device.memory_bytes:
                found.append((self.rough_s(candidate) * (1 + self._risk(candidate)), candidate))
        found.sort(key=lambda item: item[0])
        of_kinds: dict[str, list[Candidate]] = {}
        for (kind, _), (_, candidate) in smallest.items():
            of_kinds.setdefault(kind, []).append(candidate)
        return found, of_kinds

    def _candidates(self) -> Iterator[Candidate]:
        """The candidates to try with the measures of :data:`_RESORTS` that are in force."""
        fixed, device = self.fixed, self.cluster.device
        if not device.link_bandwidth and device.measured is None and "axes" not in self.resorts:
            fixed = {**dict.fromkeys(_LINKED, 1), **fixed}
        is_away, is_late = "activations" in self.resorts, "late" in self.resorts
        for base in bases(self.shape, self.cluster, self.workload, fixed):
            if not self._goes_with_fixed(base):
                continue
            gathers_late = is_late and PRESETS[base.strategy].shards_parameters
            may_chunk = can_chunk(self.shape, base.layout) and not self.workload.chunked_loss
            for choice in savings(base, self.workload, fixed):
                is_last = choice.offload != "none" or choice.releases_units
                is_last |= choice.in_backward and not self.fixed.get("in_backward")
                if is_last and "offload" not in self.resorts:
                    continue
                if not (is_away and choice.recompute == "selective"):
                    made = choice._replace(offloads_activations=is_away, gathers_late=gathers_late)
                    yield from (made, made._replace(chunks_loss=True)) if may_chunk else (made,)

    def _goes_with_fixed(self, candidate: Candidate) -> bool:
        """Whether fixed fields such as ``reshard_after_forward=4`` permit the layout."""
        if not self.fixed:
            return True
        try:
            candidate.plan(self.workload, self.fixed).mesh(self.cluster.num_gpus)
        except PlanError as error:
            self._refused = self._refused or error
            return False
        return True

    def _risk(self, candidate: Candidate) -> float:
        known = risk(candidate, self.cluster, self.workload, is_mixture=self.is_mixture)
        return known + self.rough_s.network_risk(candidate)

    def _judged(self, candidate: Candidate) -> tuple[Estimate, float]:
        """The full estimate, and its cost: the step time with its risk."""
        plan, workload = candidate.plan(self.workload, self.fixed), candidate.workload(self.workload)
        made = estimate(self.shape, plan, self.cluster, workload)
        full = fullness(made.memory.device_bytes / self.cluster.device.memory_bytes)
        return made, made.step_time_s * (1 + self._risk(candidate) + full)

    def _memory(self, candidate: Candidate) -> MemoryEstimate:
        plan, workload = candidate.plan(self.workload, self.fixed), candidate.workload(self.workload)
        return estimate_memory(self.shape, plan, self.cluster, workload)

    def _device_bytes(self, candidate: Candidate) -> int:
        return self._memory(candidate).device_bytes

    def _fits(self, candidate: Candidate, capacity: float) -> bool:
        """Whether memory is sufficient. Larger microbatches never need less memory, so few estimates are computed."""
        key = candidate._replace(micro_batch=0, accumulation=min(candidate.accumulation, 2))
        known, micro = self._bytes.setdefault(key, {}), candidate.micro_batch
        if any(other >= micro and num_bytes <= capacity for other, num_bytes in known.items()):
            return True
        if any(other <= micro and num_bytes > capacity for other, num_bytes in known.items()):
            return False
        known[micro] = needed_bytes(self._memory(candidate), self.cluster)
        return known[micro] <= capacity


def _plain(candidate: Candidate) -> Candidate:
    """The candidate without memory savings."""
    return Candidate(*candidate[:6])


def _nothing_legal(shape: ModelShape, cluster: Cluster, workload: Workload, fixed: dict[str, Any]) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in fixed.items())
    what = f" with {settings}" if settings else ""
    reasons = why_none(shape, cluster, workload, fixed)
    if reasons:
        names = " and ".join(reason.partition("=")[0] for reason in reasons)
        start = f"no plan for {shape.name} on {cluster.num_gpus} GPUs is legal{what}: "
        return f"{start}{'; '.join(reasons)}.\n  Leave {names} open, or choose another value."
    return (
        f"no plan for {shape.name} on {cluster.num_gpus} GPUs is legal{what}, for a global batch of"
        f" {workload.global_batch} sequences of {workload.seq_len} tokens.\n"
        "  The batch must be a multiple of the data-parallel ranks, tp must divide the heads, and pp be at most the"
        f" {shape.num_layers} layers: change what is fixed, or the batch."
    )
