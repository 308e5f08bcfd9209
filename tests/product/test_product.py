"""Products of parallel degrees against one plain process: a few rows of the table, and, long, all of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.product import product
from tests.product.product import ACCUMULATES, CLIPS, Case, Distance, RankNumbers


@pytest.fixture(autouse=True)
def _one_thread():
    """Kernels cut sums by threads; the ranks have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TP_PP, THREE = (("pp", 2), ("tp", 2)), (("pp", 2), ("dp_shard", 2), ("tp", 2))
FEW = (
    Case((("dp_shard", 2), ("tp", 2)), "zero1", None, CLIPS, "fp64"),
    Case(TP_PP, "zero3", "zb-v", product.SEQUENCE, is_beside_flat=True),
    Case(THREE, "zero3", "1f1b", ACCUMULATES, "fp64"),
)
MORE = (
    Case(TP_PP, "zero3", "zb-v", CLIPS, "fp64"),
    Case(TP_PP, "zero3", "zb-h1", product.RECOMPUTES, "fp64"),
    Case(TP_PP, "zero3", "1f1b", is_beside_flat=True),
    Case(TP_PP, "zero1", "interleaved-1f1b", product.SEQUENCE, "fp64"),
)


def check(cases: tuple[Case, ...], timeout_s: float) -> None:
    results = product.run(cases, timeout_s)
    found = {case: product.measure(case, results) for case in cases}
    assert not {case.shown: apart for case, apart in found.items() if not product.judge(case, apart)}


@pytest.mark.parametrize("cases", [pytest.param(FEW, id="few"), pytest.param(MORE, id="more", marks=pytest.mark.long)])
def test_products_of_degrees_equal_one_process(cases):
    check(cases, timeout_s=120)


@pytest.mark.long
@pytest.mark.timeout(960)  # a little over that of its ranks
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_row_of_the_table_holds(world):
    check(tuple(case for case in product.cases() if case.world == world), timeout_s=900)


def test_the_table_has_every_mesh_schedule_and_variant():
    cases = product.cases()
    assert len(set(cases)) == len(cases)
    meshes = {case.mesh for case in cases}
    wanted = {TP_PP, THREE, (("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)), (("tp", 4),), (("pp", 4),), (("cp", 2),)}
    wanted |= {(("dp_shard", 2), ("tp", 2)), (("pp", 2), ("dp_shard", 2)), (("dp_shard", 2), ("ep", 2))}
    assert wanted <= meshes
    for mesh in wanted:
        rows = [case for case in cases if case.mesh == mesh]
        assert {"plain", "accumulates", "clips", "recomputes"} <= {case.variant.name for case in rows}, mesh
        assert {"bf16", "fp32"} <= {case.dtype for case in rows}, mesh
    assert {case.schedule for case in cases if case.mesh == (("pp", 4),)} == {None, *product.SCHEDULES} - {None}


# -- negative controls: what a row would not notice proves nothing


def ranks_of(case: Case) -> list[RankNumbers]:
    """What one rank would return that holds everything and is right."""
    expected = product.train_plain(case.reference)
    return [RankNumbers(list(expected.losses), list(expected.norms), product.as_held(expected.parameters))]


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_a_row_fails_for_one_element_one_loss_one_norm_and_one_copy(dtype):
    case = Case((("tp", 2),) if dtype != "fp32" else (("pp", 2),), dtype=dtype)
    expected, limits = product.train_plain(case.reference), product.tolerance(case)
    loss, norm, absolute = limits or (1e-7, 1e-7, 1e-9)
    assert product.judge(case, product.distance(expected, ranks_of(case)))

    def fails(change) -> bool:
        ranks = ranks_of(case)
        change(ranks)
        return not product.judge(case, product.distance(expected, ranks))

    def nudge(ranks):
        ranks[0].held[3][1].view(-1)[-1] += 1.1 * absolute

    def other_copy(ranks):
        ranks.append(ranks_of(case)[0])
        held = ranks[1].held[-1][1]
        held[0] = torch.nextafter(held[0], torch.tensor(math.inf, dtype=held.dtype))

    assert fails(nudge)
    assert fails(other_copy)
    assert fails(lambda ranks: ranks[0].losses.__setitem__(4, expected.losses[4] * (1 + 1.1 * loss)))
    assert fails(lambda ranks: ranks[0].norms.__setitem__(0, expected.norms[0] * (1 + 1.1 * norm)))
    assert fails(lambda ranks: ranks[0].losses.__setitem__(0, math.nan))
    assert fails(lambda ranks: ranks[0].held.pop())


def test_tolerances_are_those_that_were_agreed():
    assert product.TOLERANCES == {"fp64": (1e-9, 1e-9, 1e-8), "fp32": (1e-5, 1e-5, 5e-4)}
    assert product.tolerance(Case((("pp", 4), ("dp_shard", 2)), schedule="zb-v", dtype="bf16")) is None
    loss, norm, parameter = product.tolerance(Case((("tp", 2),), dtype="bf16")) or (0, 0, 0)
    assert loss == 2**-7
    assert 0 < norm < 0.1
    assert 0 < parameter < 2 * product.LR * product.STEPS
    assert not product.judge(Case((("tp", 2),), dtype="fp64"), Distance(math.nan, 0, 0))


def test_the_groupings_of_sums_differ():
    """Else rows would be bitwise whatever the order."""
    case = Case((("pp", 2), ("dp_replicate", 2), ("dp_shard", 2)), schedule="1f1b")
    other = dataclasses.replace(case.reference, num_groups=1)
    assert other != case.reference
    a, b = (product.train_plain(reference).parameters for reference in (case.reference, other))
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_parameters_move_far_beyond_every_tolerance():
    case = Case((("tp", 2),), dtype="fp64")
    start = dict(product.build("fp64", ()).named_parameters())
    moved = product.train_plain(case.reference).parameters
    assert (
        min((start[name] - moved[name]).abs().max().item() for name in moved) > 5 * product.TOLERANCES["fp32"].parameter
    )
