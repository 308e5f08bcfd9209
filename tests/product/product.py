"""Products of parallel degrees against one plain process: the cases, both runs and how far apart they are.

One process adds up the microbatches of every data-parallel rank, in the order and grouping in which the ranks do, so
where no sum is split the two are equal to the last bit. Where a sum is split (over ``tp``, ``cp`` and ``ep``, or over
the stages that hold one tied parameter) it is the same sum in another order, and :data:`TOLERANCES` says how near it
must come.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.spec.extent import Extent
from shardwise.spec.mesh import Mesh
from shardwise.testing import part_of, probe, run_on_ranks
from tests.common.bits import worst

STEPS, LR = 5, 1e-3
NUM_LAYERS, VOCAB, SEQ, MICRO_BATCH = 8, 31, 8, 2  # a vocabulary that no degree divides
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}


class Limits(NamedTuple):
    """How far two runs may be apart: of losses and norms, relative; of parameters, the largest absolute difference."""

    loss: float
    norm: float
    parameter: float


#: Where sums are split. In bf16 :func:`tolerance` measures.
TOLERANCES = {"fp64": Limits(1e-9, 1e-9, 1e-8), "fp32": Limits(1e-5, 1e-5, 5e-4)}
_BF16_EPSILON = torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True)
class Variant:
    """What a step does besides forward, backward and update.

    Attributes:
        name: For the table.
        calls: Of ``sw.train_step`` before the optimizer's step.
        num_microbatches: Of each call; ``None``: 4 in a pipeline, else 1.
        max_norm: Gradients are clipped to it.
        plan: Further fields of the plan.
    """

    name: str = "plain"
    calls: int = 1
    num_microbatches: int | None = None
    max_norm: float = math.inf
    plan: tuple[tuple[str, Any], ...] = ()


PLAIN = Variant()
ACCUMULATES = Variant("accumulates", calls=2)
CLIPS = Variant("clips", max_norm=0.3)
RECOMPUTES = Variant("recomputes", plan=(("activation_checkpointing", "full"),))
SEQUENCE = Variant("sequence parallel", plan=(("sequence_parallel", True),))
IN_MICROBATCHES = Variant("4 microbatches", num_microbatches=4)


@dataclass(frozen=True)
class Case:
    """One row: a mesh and what is trained on it.

    Attributes:
        mesh: Sizes of the axes with several ranks, as the plan takes them.
        strategy: On the data-parallel axes.
        schedule: With ``pp``.
        variant: Of the step.
        dtype: ``fp64`` or ``fp32`` throughout, or ``bf16`` with fp32 masters.
        model: Changes of the model.
        is_beside_flat: Compared with the same case without its pipeline instead of with one process: stages divide no
            sum, so whatever ``tp`` makes of it, everything must be equal to the last bit.
    """

    mesh: tuple[tuple[str, int], ...]
    strategy: str = "zero3"
    schedule: str | None = None
    variant: Variant = PLAIN
    dtype: str = "fp32"
    model: tuple[tuple[str, Any], ...] = ()
    is_beside_flat: bool = False

    @property
    def axes(self) -> Mesh:
        sizes = dict(self.mesh)
        return Mesh(**{axis: size for axis, size in sizes.items() if axis != "ep"})

    @property
    def world(self) -> int:
        return self.axes.world_size

    @property
    def splits_sums(self) -> bool:
        """A sum that one process makes in one go is made of parts."""
        sizes = dict(self.mesh)
        is_shared = dict(self.model).get("tied", False) and sizes.get("pp", 1) > 1
        return is_shared or any(sizes.get(axis, 1) > 1 for axis in ("tp", "cp", "ep"))

    @property
    def num_microbatches(self) -> int:
        given = self.variant.num_microbatches
        return given or (4 if self.schedule else 1)

    @property
    def reference(self) -> Reference:
        axes = self.axes
        return Reference(
            axes.data_parallel_size,
            axes.dp_replicate,
            self.num_microbatches,
            self.variant.calls,
            self.variant.max_norm,
            self.dtype,
            self.model,
        )

    @property
    def plan(self) -> sw.ParallelPlan:
        options = dict(self.mesh) | dict(self.variant.plan)
        if not self.schedule and self.variant.calls * self.num_microbatches > 1:
            options["accumulation"] = "unsharded"
        if self.dtype == "bf16":
            options["mp_policy"] = sw.PrecisionPolicy(param_dtype="bf16")
        return sw.ParallelPlan(strategy=self.strategy, pipeline=self.schedule, **options)

    @property
    def shown(self) -> tuple[str, ...]:
        """Mesh, strategy, schedule, variant and dtype, as the table has them."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh)
        changes = "".join(f", {name}" for name, value in self.model if value is True)
        beside = ", beside pp 1" if self.is_beside_flat else ""
        return mesh, self.strategy, self.schedule or "", self.variant.name + changes + beside, self.dtype

    @property
    def flat(self) -> Case:
        """The same in as many microbatches, without the pipeline."""
        mesh = tuple((axis, size) for axis, size in self.mesh if axis != "pp")
        variant = dataclasses.replace(IN_MICROBATCHES, plan=self.variant.plan)
        return Case(mesh, self.strategy, None, variant, self.dtype, self.model)


@dataclass(frozen=True)
class Reference:
    """What one process must know to do what the ranks do together."""

    num_readers: int
    num_groups: int
    num_microbatches: int
    calls: int
    max_norm: float
    dtype: str
    model: tuple[tuple[str, Any], ...]


@dataclass
class Numbers:
    """What a run computed: the mean loss and the gradient of each step with its norm, and the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class RankNumbers:
    """The same of a rank: of parameters the ranges that it holds."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held: list[tuple[Extent, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Distance:
    """How far two runs are apart.

    Attributes:
        loss: Of the losses, the largest relative difference.
        norm: The same of the gradient norms.
        parameter: Of the parameters' elements, the largest absolute difference.
        faults: What is wrong whatever the tolerance: copies that differ, elements that no rank holds.
    """

    loss: float
    norm: float
    parameter: float
    faults: tuple[str, ...] = ()

    @property
    def is_bitwise(self) -> bool:
        return not (self.loss or self.norm or self.parameter or self.faults)

    def within(self, limits: Limits) -> bool:
        """A difference that is not a number is in no tolerance."""
        apart = (self.loss, self.norm, self.parameter)
        return not self.faults and all(value <= limit for value, limit in zip(apart, limits, strict=True))


def build(dtype: str, changes: tuple[tuple[str, Any], ...]) -> nn.Module:
    torch.manual_seed(7)
    sizes = {"num_layers": NUM_LAYERS, "hidden": 16, "num_heads": 4, "vocab_size": VOCAB, "seq_len": SEQ, "tied": False}
    return sw.models.gpt("gpt-tiny", **(sizes | dict(changes))).to(DTYPES[dtype])


def batch(step: int, call: int, microbatch: int, reader: int) -> tuple[Tensor, Tensor]:
    """No two of them are alike."""
    generator = torch.Generator().manual_seed(1000 * step + 200 * call + 20 * microbatch + reader)
    tokens_BT = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ + 1), generator=generator)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)


# -- one process


@functools.lru_cache(maxsize=256)
def train_plain(reference: Reference) -> Numbers:
    """One process; a rank adds its microbatches, a group its ranks, then the groups are added."""
    model = build(reference.dtype, reference.model)
    computes = model if reference.dtype != "bf16" else build(reference.dtype, reference.model).bfloat16()
    masters, copies = list(model.parameters()), list(computes.parameters())
    optimizer, numbers = optimizer_of(model), Numbers()
    num_readers, m = reference.num_readers, reference.num_microbatches
    size = num_readers // reference.num_groups
    for step in range(STEPS):
        with torch.no_grad():
            for copy, master in zip(copies, masters, strict=True):
                copy.copy_(master)
        losses = torch.zeros(num_readers, dtype=torch.float64)
        groups: list[list[Tensor]] = []
        for first in range(0, num_readers, size):
            ranks = []
            for reader in range(first, first + size):
                terms = []
                for call in range(reference.calls):
                    for microbatch in range(m):
                        loss = computes(*batch(step, call, microbatch, reader))
                        (loss / m if m > 1 else loss).backward()
                        losses[reader] += loss.detach().double() * (call == reference.calls - 1)
                        terms.append(_take_gradients(copies, masters))
                ranks.append(_sum(terms))
            groups.append(_sum(ranks))
        divisor = torch.tensor(num_readers, dtype=masters[0].dtype)
        for master, total in zip(masters, _sum(groups), strict=True):
            master.grad = total / divisor
        norm = torch.stack([p.grad.double().square().sum() for p in masters]).sum().sqrt().to(masters[0].dtype)
        numbers.gradients.append(torch.cat([p.grad.flatten() for p in masters]))
        coefficient = torch.clamp(reference.max_norm / (norm + 1e-6), max=1.0)
        for master in masters:
            master.grad.mul_(coefficient)
        numbers.losses.append(((losses / m).sum() / num_readers).to(masters[0].dtype).item())
        numbers.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    numbers.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return numbers


def _take_gradients(copies: list[nn.Parameter], masters: list[nn.Parameter]) -> list[Tensor]:
    taken = []
    for copy, master in zip(copies, masters, strict=True):
        assert copy.grad is not None
        taken.append(copy.grad.to(master.dtype))
        copy.grad = None
    return taken


def _sum(terms: list[list[Tensor]]) -> list[Tensor]:
    total = terms[0]
    for more in terms[1:]:
        total = [a + b for a, b in zip(total, more, strict=True)]
    return total


# -- the ranks


def train_ranks(cases: tuple[Case, ...]) -> list[RankNumbers]:
    """On a rank: every case, one after the other."""
    return [_train(case) for case in cases]


def _train(case: Case) -> RankNumbers:
    model = sw.parallelize(build(case.dtype, case.model), case.plan)
    optimizer, numbers = optimizer_of(model), RankNumbers()
    reader, m = case.axes.data_parallel_rank(distributed.get_rank()), case.num_microbatches
    for step in range(STEPS):
        for call in range(case.variant.calls):
            parts = [batch(step, call, microbatch, reader) for microbatch in range(m)]
            tokens_BT, targets_BT = (torch.cat(column) for column in zip(*parts, strict=True))
            with sw.gradient_sync(model, call == case.variant.calls - 1):
                loss = sw.train_step(model, (tokens_BT, targets_BT), num_microbatches=m)
        numbers.losses.append(loss.item())
        numbers.norms.append(sw.clip_grad_norm(model, case.variant.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    numbers.held = [(extent, values.clone()) for extent, values in probe(model).extents()]
    return numbers


def as_held(parameters: dict[str, Tensor]) -> list[tuple[Extent, Tensor]]:
    """Whole parameters as one rank would hold them."""
    held = []
    for name, value in parameters.items():
        extent = Extent(
            name, tuple(value.shape), {torch.float64: "fp64", torch.float32: "fp32"}[value.dtype], 0, value.numel()
        )
        held.append((extent, value.flatten().clone()))
    return held


# -- comparison


Results = dict[Case, list[RankNumbers]]


def run(cases: tuple[Case, ...], timeout_s: float) -> Results:
    """Train them all, and what they are compared with; ranks are started once for each size of world."""
    needed = dict.fromkeys([*cases, *(case.flat for case in cases if case.is_beside_flat)])
    results: Results = {}
    for world in sorted({case.world for case in needed}):
        chosen = tuple(case for case in needed if case.world == world)
        ranks = run_on_ranks(train_ranks, world, chosen, timeout_s=timeout_s)
        results |= {case: [rank[place] for rank in ranks] for place, case in enumerate(chosen)}
    return results


def measure(case: Case, results: Results) -> Distance:
    """How far a case is from what it is compared with."""
    expected = train_plain(case.reference)
    if case.is_beside_flat:
        flat = results[case.flat]
        parameters = _assemble(expected.parameters, flat, [])
        expected = Numbers(flat[0].losses, flat[0].norms, parameters=parameters)
    return distance(expected, results[case])


def distance(expected: Numbers, ranks: list[RankNumbers]) -> Distance:
    """Of what the ranks hold together from what is expected."""
    faults: list[str] = []
    parameters = _assemble(expected.parameters, ranks, faults)
    return Distance(
        max(_relative(expected.losses, numbers.losses) for numbers in ranks),
        max(_relative(expected.norms, numbers.norms) for numbers in ranks),
        _largest(expected.parameters, parameters),
        tuple(faults),
    )


def tolerance(case: Case) -> Limits | None:
    """``None``: everything must be equal to the last bit.

    Two runs in bf16 whose roundings differ are each about as far from fp32 as one process in bf16 is, and no further
    from each other than both distances together. That is taken of parameters, and of gradients as vectors: norms
    differ by no more than the vectors do. A loss may differ by an epsilon.
    """
    if case.is_beside_flat or not case.splits_sums:
        return None
    if case.dtype in TOLERANCES:
        return TOLERANCES[case.dtype]
    low = train_plain(case.reference)
    wide = train_plain(dataclasses.replace(case.reference, dtype="fp32"))
    apart = ((a - b).norm() / b.norm() for a, b in zip(low.gradients, wide.gradients, strict=True))
    return Limits(_BF16_EPSILON, 2 * max(apart).item(), 2 * _largest(wide.parameters, low.parameters))


def judge(case: Case, found: Distance) -> bool:
    """Whether the row holds."""
    limits = tolerance(case)
    return found.is_bitwise if limits is None else found.within(limits)


def _relative(expected: list[float], got: list[float]) -> float:
    assert len(expected) == len(got) == STEPS
    return worst(*(abs(a - b) / abs(a) for a, b in zip(expected, got, strict=True)))


def _largest(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    assert list(expected) == list(got)
    return worst(*((expected[name].double() - got[name].double()).abs().max().item() for name in expected))


def _assemble(like: dict[str, Tensor], ranks: list[RankNumbers], faults: list[str]) -> dict[str, Tensor]:
    """Whole tensors from the ranks' ranges; what several ranks hold must be the same bits."""
    whole = {name: torch.full_like(value, math.nan) for name, value in like.items()}
    for rank, numbers in enumerate(ranks):
        for extent, values in numbers.held:
            target = whole[extent.name]
            places = part_of(extent, torch.arange(target.numel()).view(target.shape))
            flat = target.view(-1)
            known = flat[places]
            if not torch.equal(torch.where(known.isnan(), values, known), values):
                faults.append(f"rank {rank} holds another {extent.name} than earlier ranks")
            flat[places] = values
    faults += [f"no rank holds all of {name}" for name, value in whole.items() if bool(value.isnan().any())]
    return whole


# -- the table's rows

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


def cases() -> tuple[Case, ...]:
    """All rows, smaller worlds first."""
    return (
        *_rows({"dp_shard": 2}),
        *_rows({"tp": 2}, strategies=("ddp", "zero1", "zero2"), variants=(SEQUENCE,)),
        *_rows({"pp": 2}, schedules=SCHEDULES, tied=("1f1b",)),
        *_rows({"tp": 4}, variants=(SEQUENCE,)),
        *_rows({"pp": 4}, schedules=SCHEDULES, tied=("1f1b", "interleaved-1f1b")),
        *_rows({"dp_shard": 2, "tp": 2}, strategies=("ddp", "zero1", "zero2"), variants=(SEQUENCE,)),
        *_rows({"pp": 2, "dp_shard": 2}, strategies=("ddp", "zero1", "zero2"), schedules=SCHEDULES, tied=("zb-v",)),
        *_rows({"pp": 2, "tp": 2}, schedules=SCHEDULES, tied=("1f1b",)),
        *_rows({"dp_replicate": 2, "dp_shard": 2}, "hsdp"),
        *_rows(
            {"pp": 2, "dp_shard": 2, "tp": 2},
            strategies=("ddp", "zero1", "zero2"),
            schedules=("1f1b", "interleaved-1f1b", "zb-v"),
            tied=("1f1b",),
        ),
        *_rows({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, "hsdp"),
        *_rows({"cp": 2}, strategies=("ddp", "zero1", "zero2")),
        *_rows({"dp_shard": 2, "ep": 2}, strategies=("ddp", "zero1", "zero2")),
        *_brief({"dp_shard": 2, "cp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}),
        *_brief(
            {"dp_shard": 2, "tp": 2, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2}, {"cp": 2, "dp_shard": 2, "ep": 2}
        ),
        *_brief({"pp": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2}),
        *_beside({"pp": 2, "tp": 2}, ("1f1b", "zb-v")),
        *_beside({"pp": 2, "dp_shard": 2, "tp": 2}, ("1f1b", "zb-v")),
        *_rows({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, "hsdp", schedules=("1f1b",)),
    )


def _rows(
    mesh: dict[str, int],
    strategy: str = "zero3",
    *,
    strategies: tuple[str, ...] = (),
    schedules: tuple[str, ...] = (),
    variants: tuple[Variant, ...] = (),
    tied: tuple[str, ...] = (),
) -> list[Case]:
    """Every variant under ``strategy``, every schedule and strategy plain, fp32 beside fp64 where sums are split."""
    sizes, model = tuple(mesh.items()), _model(mesh)
    usual = "1f1b" if schedules else None
    splits = Case(sizes).splits_sums
    exact = "fp64" if splits else "fp32"
    found = [Case(sizes, strategy, schedule, dtype=exact, model=model) for schedule in schedules or (None,)]
    found += [Case(sizes, other, usual, dtype=exact, model=model) for other in strategies]
    for variant in (ACCUMULATES, CLIPS, RECOMPUTES, *variants):
        found.append(Case(sizes, strategy, usual, variant, exact, model))
    if splits:
        found += [Case(sizes, strategy, usual, variant, "fp32", model) for variant in (PLAIN, CLIPS)]
    found.append(Case(sizes, strategy, usual, dtype="bf16", model=model))
    found += [Case(sizes, strategy, schedule, dtype="fp64", model=(*model, ("tied", True))) for schedule in tied]
    return found


def _brief(*meshes: dict[str, int]) -> list[Case]:
    """Two rows of each: all at once in fp64, and plain in fp32."""
    everything = Variant("accumulates, clips, recomputes", 2, max_norm=0.3, plan=RECOMPUTES.plan)
    found = []
    for mesh in meshes:
        schedule = "1f1b" if "pp" in mesh else None
        for variant, dtype in ((everything, "fp64"), (PLAIN, "fp32")):
            found.append(Case(tuple(mesh.items()), "zero3", schedule, variant, dtype, _model(mesh)))
    return found


def _model(mesh: dict[str, int]) -> tuple[tuple[str, Any], ...]:
    return (("num_experts", 4),) if "ep" in mesh else ()


def _beside(mesh: dict[str, int], schedules: tuple[str, ...]) -> list[Case]:
    """Pipelines of tensor-parallel stages beside the same without a pipeline."""
    sizes = tuple(mesh.items())
    return [Case(sizes, "zero3", s, dtype=d, is_beside_flat=True) for d in ("fp32", "bf16") for s in schedules]
