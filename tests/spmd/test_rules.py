"""Each rule beside what its function computes on ranks, forward and backward, and beside one plain process.

A tensor is dealt out to ranks as its type says, and what they make of it is put together as the type of the result
says. A gradient likewise, by the opposite types. All but three of the functions are linear in each of their inputs, so
that random numbers stand for all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spmd_types import I, MeshAxis, P, R, V, assert_type, get_axis_local_type, set_current_mesh
from spmd_types.checker import typecheck
from torch import Tensor

import shardwise
from shardwise.comm.base import Comm
from shardwise.comm.record import RecordComm
from shardwise.engine.extensions.batch_norm import _Normalize
from shardwise.parallel.context.ring import Ring
from shardwise.parallel.context.root import Division, _MeanLoss, reorder_positions
from shardwise.parallel.experts import route
from shardwise.parallel.sharded_embedding.rows import RowShardedEmbedding, _distinct, _Lookup, _Route
from shardwise.parallel.tensor import mappings
from shardwise.parallel.tensor.linear import ColumnPlan, column_linear
from shardwise.parallel.tensor.loss import Vocabulary, _CrossEntropy
from shardwise.spec.styles import near_even_range
from shardwise.spec.traffic.context import own_ranges
from shardwise.spec.traffic.rows import row_bounds
from tests.checkpoint.threads import run_in_threads
from tests.spmd.rules import RULES, WITHOUT_RULE

AXIS = "tp"
#: Local by construction: their own tests compare them with one process.
LOCAL = {"_Linear", "_Add"}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@dataclass(frozen=True)
class Cut:
    """Varying: each rank has its run of a dimension, as even as possible; of ``cp`` an early and a late run."""

    dim: int
    is_paired: bool = False

    def deal(self, whole: Tensor, size: int) -> list[Tensor]:
        if self.is_paired:
            ranges = [own_ranges(whole.shape[self.dim], size, rank) for rank in range(size)]
            return [torch.cat([whole.narrow(self.dim, a, b - a) for a, b in own], self.dim) for own in ranges]
        return list(whole.split(sizes(whole.shape[self.dim], size), self.dim))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        if self.is_paired:
            return reorder_positions([part.movedim(self.dim, 1) for part in parts]).movedim(1, self.dim)
        return torch.cat(list(parts), self.dim)


def sizes(length: int, parts: int) -> list[int]:
    edges = [near_even_range(length, parts, part) for part in range(parts)]
    return [stop - start for start, stop in edges]


#: How a tensor lies on ranks: a type, or a cut, whose type is V.
Placed = Any
OPPOSITE = {R: P, P: R, I: I}


def letter(placed: Placed) -> Any:
    return V if isinstance(placed, Cut) else placed


def deal(whole: Tensor, placed: Placed, size: int) -> list[Tensor]:
    if isinstance(placed, Cut):
        parts = placed.deal(whole, size)
    elif placed is P:
        terms = [torch.randn_like(whole) for _ in range(size - 1)]
        parts = [*terms, whole - sum(terms)]
    else:
        parts = [whole] * size
    return [part.clone() for part in parts]


def join(parts: Sequence[Tensor], placed: Placed) -> Tensor:
    if isinstance(placed, Cut):
        return placed.join(parts)
    if placed is P:
        return sum(parts[1:], parts[0])
    for part in parts:
        assert torch.equal(part, parts[0]), f"typed {placed}, but the ranks hold different values"
    return parts[0]


@dataclass(frozen=True)
class Case:
    """A function on ranks, and what it is in one process.

    Attributes:
        function: Whose rule it is.
        call: On a rank, with its parts of the inputs.
        given: Each whole input, and how it lies on the ranks.
        gives: How the result lies on them.
        plain: What one process computes from the whole inputs.
        factor: What the gradients are multiplied by: the engine averages over the ranks.
    """

    function: str
    call: Callable[..., Tensor]
    given: tuple[tuple[Tensor, Placed], ...]
    gives: Placed
    plain: Callable[..., Tensor]
    factor: float = 1.0


def cases(n: int) -> list[Case]:
    """On ``n`` ranks. No dimension that is cut freely is a multiple of them."""
    torch.manual_seed(n)
    return [*cases_of_tp(n), *cases_of_cp(n), *cases_of_ep(n), *cases_of_data(n)]


def with_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias


def same(x: Tensor) -> Tensor:
    return x


def cases_of_tp(n: int) -> list[Case]:
    odd, u = 3 * n + 1, "unit"
    x_BTC, last, seq = random(2, 4 * n, odd), Cut(2), Cut(1)
    bias, weight, weight_bias = random(odd), random(odd, odd), random(odd)
    targets = torch.randint(odd, (7,))

    def column(comm, x, w, b, **fields):
        return column_linear(x, w, b, ColumnPlan(comm, u, **fields))

    def cross_entropy(comm, logits):
        return _CrossEntropy.apply(logits, targets, Vocabulary(sizes(odd, n), comm), u)

    return [
        Case("_CopyToTp", lambda c, x: mappings.copy_to_tp(x, c, u), ((x_BTC, I),), R, same),
        Case("_ReduceFromTp", lambda c, x: mappings.reduce_from_tp(x, c, u), ((x_BTC, P),), I, same),
        Case(
            "_ReduceFromTp", lambda c, x, b: mappings.reduce_from_tp(x, c, u, b), ((x_BTC, P), (bias, I)), I, with_bias
        ),
        Case("_GatherFromTp", lambda c, x: mappings.gather_from_tp(x, sizes(odd, n), c, u), ((x_BTC, last),), I, same),
        Case("_ScatterToTp", lambda c, x: mappings.scatter_to_tp(x, sizes(odd, n), c, u), ((x_BTC, I),), last, same),
        Case("_GatherFromSeq", lambda c, x: mappings.gather_from_seq(x, c, u), ((x_BTC, seq),), R, same),
        Case(
            "_ReduceScatterToSeq",
            lambda c, x: mappings.reduce_scatter_to_seq(x, c, u),
            ((x_BTC, P),),
            seq,
            same,
        ),
        Case(
            "_ReduceScatterToSeq",
            lambda c, x, b: mappings.reduce_scatter_to_seq(x, c, u, b),
            ((x_BTC, P), (bias, I)),
            seq,
            with_bias,
        ),
        Case("_ScatterToSeq", lambda c, x: mappings.scatter_to_seq(x, c, u), ((x_BTC, I),), seq, same),
        Case("_GatherWholeSeq", lambda c, x: mappings.gather_whole_seq(x, c, u), ((x_BTC, seq),), I, same),
        Case(
            "_ColumnLinear",
            partial(column, is_transposed=False),
            ((x_BTC, I), (weight, Cut(0)), (weight_bias, Cut(0))),
            last,
            F.linear,
        ),
        Case(
            "_ColumnLinear",
            partial(column, is_transposed=True, divides_sequence=True),
            ((x_BTC, seq), (weight, Cut(1)), (weight_bias, Cut(0))),
            last,
            lambda x, w, b: F.linear(x, w.t(), b),
        ),
        Case(
            "_CrossEntropy",
            cross_entropy,
            ((random(7, odd), Cut(1)),),
            I,
            lambda logits: F.cross_entropy(logits, targets, reduction="none"),
        ),
    ]


def cases_of_cp(n: int) -> list[Case]:
    q, k, v = random(2, 4, 4 * n, 3), random(2, 2, 4 * n, 3), random(2, 2, 4 * n, 3)
    paired = Cut(2, is_paired=True)
    counts = torch.arange(1, n + 1)

    def mean_loss(comm, losses):
        return _MeanLoss.apply(losses.squeeze(0), counts[comm.rank], counts.sum(), comm)

    def joined(comm, own):
        return Division(4 * n, comm, multiple=1, device=own.device).join(own, "unit")

    return [
        Case(
            "_Attention",
            lambda comm, q, k, v: Ring(comm, "unit")(q, k, v),
            ((q, paired), (k, paired), (v, paired)),
            paired,
            partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
        ),
        Case(
            "_MeanLoss",
            mean_loss,
            ((random(n), Cut(0)),),
            I,
            lambda losses: (losses * counts).sum() / counts.sum(),
            factor=n,
        ),
        Case("_GatherPositions", joined, ((random(2, 4 * n, 3), Cut(1, is_paired=True)),), R, same),
    ]


def cases_of_ep(n: int) -> list[Case]:
    """Two experts on each rank, which multiply what they get by a number of their own."""
    chosen_NK = torch.stack([torch.randperm(2 * n)[:2] for _ in range(5 * n)])
    scale_E = random(2 * n)

    def experts(comm, x_NC):
        found = route.find_route(chosen_NK.chunk(n)[comm.rank], 2 * n, None, comm, "unit")
        rows = route.dispatch(x_NC, found)
        own = scale_E[2 * comm.rank : 2 * comm.rank + 2].repeat_interleave(torch.tensor(found.by_expert))
        return route.combine(rows * own.unsqueeze(1), found)

    def plain(x_NC):
        return torch.stack([x_NC * scale_E[chosen_NK[:, choice]].unsqueeze(1) for choice in range(2)])

    given = ((random(5 * n, 3), Cut(0)),)
    return [Case(function, experts, given, Cut(1), plain) for function in ("_Dispatch", "_Combine")]


def cases_of_data(n: int) -> list[Case]:
    num_rows = 3 * n + 1
    ids = torch.randint(num_rows, (n, 2, 5))
    image, channels = random(2 * n, 3, 2, 2), random(3)

    def lookup(comm, rows):
        table = torch.nn.Embedding(num_rows, 3, dtype=torch.float64)
        layer = RowShardedEmbedding(table, "unit", comm, row_bounds(num_rows, comm.size), torch.float64)
        wanted, inverse = _distinct(ids[comm.rank].to(rows.device))
        return _Lookup.apply(rows, wanted, inverse, _Route(layer, wanted, None))

    def normalize(comm, x, w, b):
        return _Normalize.apply(x, w, b, comm, 1e-5)[0]

    def plain_normalize(x, w, b):
        return F.batch_norm(x, None, None, w, b, training=True)

    return [
        Case(
            "_Lookup",
            lookup,
            ((random(num_rows, 3), Cut(0)),),
            Cut(0),
            lambda rows: F.embedding(ids.flatten(0, 1), rows),
            factor=1 / n,
        ),
        Case("_Normalize", normalize, ((image, Cut(0)), (channels, R), (channels + 2, R)), Cut(0), plain_normalize),
    ]


def parts_of(case: Case, n: int) -> list[list[Tensor]]:
    """Each rank's inputs."""
    dealt = [deal(whole, placed, n) for whole, placed in case.given]
    return [[part.requires_grad_() for part in own] for own in zip(*dealt, strict=True)]


def check_type(case: Case, n: int) -> None:
    """The rule infers what the case says."""
    with set_current_mesh({AXIS: MeshAxis.of(n, 1)}):
        # Which rows others ask for is not known without them.
        device = "meta" if case.function == "_Lookup" else "cpu"
        inputs = [part.detach().to(device).requires_grad_() for part in parts_of(case, n)[0]]
        for tensor, (_, placed) in zip(inputs, case.given, strict=True):
            assert_type(tensor, {AXIS: letter(placed)})
        with typecheck("permissive"):  # targets and numbers of choices have no types
            made = case.call(RecordComm(AXIS, rank=0, size=n), *inputs)
        assert get_axis_local_type(made, AXIS) is letter(case.gives)


def check_values(case: Case, n: int) -> None:
    """Forward and backward on ranks are those of one process."""
    whole = [value.clone().requires_grad_() for value, _ in case.given]
    wanted = case.plain(*whole)
    grad = torch.randn_like(wanted)
    wanted.backward(grad)
    grads = deal(grad, OPPOSITE.get(case.gives, case.gives), n)
    given = parts_of(case, n)

    def rank(comm: Comm) -> tuple[Tensor, list[Tensor | None]]:
        made = case.call(comm, *given[comm.rank])
        made.backward(grads[comm.rank])
        return made.detach(), [tensor.grad for tensor in given[comm.rank]]

    found = run_in_threads(rank, n)
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    torch.testing.assert_close(join([made for made, _ in found], case.gives), wanted.detach())
    for index, (_, placed) in enumerate(case.given):
        of_ranks = [own[index] for _, own in found]
        torch.testing.assert_close(join(of_ranks, OPPOSITE.get(placed, placed)), case.factor * whole[index].grad)


IDS = [f"{case.function.strip('_')}-{index}" for index, case in enumerate(cases(2))]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("index", range(len(IDS)), ids=IDS)
def test_a_function_is_what_its_rule_says(index: int, n: int) -> None:
    case = cases(n)[index]
    check_type(case, n)
    check_values(case, n)


def test_copies_of_a_head_get_the_sum_of_their_gradients() -> None:
    """Two heads on four ranks: each rank's gradient is the sum over those that hold the same head."""
    torch.manual_seed(0)
    grads = random(4, 3, 5)

    def rank(comm: Comm) -> Tensor | None:
        head = comm.rank // 2
        part = random(3, 5).requires_grad_()
        mappings.copy_part_to_tp(part, (0, 6, 3 * head), comm, "u").backward(grads[comm.rank])
        return part.grad

    found = run_in_threads(rank, 4)
    for index, made in enumerate(found):
        pair = 2 * (index // 2)
        torch.testing.assert_close(made, grads[pair] + grads[pair + 1])


def test_every_function_of_ours_has_a_rule() -> None:
    source = Path(shardwise.__file__).parent
    for path in source.rglob("*.py"):
        if "torch.autograd.Function" in path.read_text("utf-8"):
            importlib.import_module(".".join(("shardwise", *path.relative_to(source).with_suffix("").parts)))
    ours = {kind for kind in torch.autograd.Function.__subclasses__() if kind.__module__.startswith("shardwise.")}
    assert ours == {*RULES, *WITHOUT_RULE}
    tested = {case.function for case in cases(2)} | {"_CopyPartToTp"} | LOCAL
    assert {kind.__name__ for kind in RULES} == tested
