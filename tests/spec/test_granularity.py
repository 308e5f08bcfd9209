"""What cuts must not divide: rows of every shape, padding on the shapes of real models, whole parameters in balance."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import PlanError
from shardwise.spec.granularity import (
    ELEMENT,
    ROW,
    TENSOR,
    Granularity,
    assign,
    block,
    keeps,
    resolve_granularity,
    row_numel,
)
from shardwise.spec.layout import GroupLayout, ParamSpec, rank_bytes
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.slice import Cut, Slice

# -- what may be said


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("element", ELEMENT),
        ("row", ROW),
        ("tensor", TENSOR),
        (("block", 256), block(256)),
        (["block", 256], block(256)),
        (block(64), block(64)),
    ],
)
def test_a_granularity_is_a_name_or_a_block_of_so_many_elements(value, expected):
    assert resolve_granularity(value) == expected
    assert ParallelPlan(granularity=value).cut_granularity == expected


@pytest.mark.parametrize("value", ["block", "column", ("block",), ("row", 3), 7, None, ["block", 0], ("block", True)])
def test_anything_else_is_refused_with_what_there_is(value):
    with pytest.raises(PlanError, match=r"Use 'element', 'row', 'tensor', or sw\.block\(n\)"):
        ParallelPlan(granularity=value)


def test_what_is_whole_under_one_granularity_is_whole_under_those_that_cover_it():
    every = (ELEMENT, block(64), block(256), ROW, TENSOR)
    covered = {
        ELEMENT: {ELEMENT},
        block(64): {ELEMENT, block(64)},
        block(256): {ELEMENT, block(64), block(256)},
        ROW: {ELEMENT, ROW},
        TENSOR: set(every),
    }
    for granularity, expected in covered.items():
        assert {needed for needed in every if granularity.covers(needed)} == expected
    assert [str(granularity) for granularity in every] == ["element", "block of 64", "block of 256", "row", "tensor"]


def test_what_tensor_parallelism_leaves_keeps_rows_or_blocks_or_nothing_whole():
    columns, rows = Slice((6, 4), (Cut(1, ((0, 2),)),)), Slice((6, 4), (Cut(0, ((2, 4),)),))
    whole, expert = Slice((6, 4), (Cut(0, ((0, 6),)),)), Slice((4, 6, 2), (Cut(0, ((1, 2),)),), is_expert=True)
    allowed = {
        "columns": [keeps(columns, needed) for needed in (ELEMENT, ROW, TENSOR, None, block(4))],
        "rows": [keeps(rows, needed) for needed in (ELEMENT, ROW, TENSOR, None, block(4), block(16))],
        "expert": [keeps(expert, needed) for needed in (ELEMENT, ROW, TENSOR, None, block(4), block(24))],
    }
    assert allowed == {
        "columns": [True, False, False, False, False],
        "rows": [True, True, False, False, True, False],
        "expert": [True, True, False, False, True, False],
    }
    assert all(keeps(whole, needed) for needed in (ELEMENT, ROW, TENSOR, None, block(5)))


def test_only_blocks_take_a_number():
    with pytest.raises(PlanError, match="'row' takes no number"):
        Granularity("row", 4)


# -- rows


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((), None, 1),
        ((9,), None, 1),
        ((6, 5), None, 5),
        ((6, 5), (1, 6), 30),  # stored by columns: a row is not a run of memory
        ((1, 5), (1, 1), 5),
        ((4, 6, 5), None, 5),
        ((4, 6, 5), (30, 1, 6), 120),
        ((4, 6, 5), (1, 20, 4), 120),
        ((8, 3, 2, 2), None, 12),
        ((8, 3, 2, 2), (12, 1, 6, 3), 12),  # channels last: a filter is still one run
        ((8, 3, 2, 2, 2), None, 24),
    ],
)
def test_a_row_is_a_run_of_the_last_dimension_or_a_filter(shape, stride, expected):
    assert row_numel(shape, stride) == expected


# -- padding on the shapes of real models, each unit as transformers 5 has it: experts stacked, GPT-2 [in, out]

H, D, F = 768, 4096, 14336
ATTENTION = ((D, D), (1024, D), (1024, D), (D, D))
MODELS = {
    "GPT-2": (
        ((50257, H), (1024, H), (H,), (H,)),
        ((H, 2304), (H, H), (H, 3072), (3072, H), (H,), (H,), (2304,), (H,), (H,), (H,), (3072,), (H,)),
    ),
    "Llama-3-8B": (((128256, D), (128256, D), (D,)), (*ATTENTION, (F, D), (F, D), (D, F), (D,), (D,))),
    "Mixtral 8x7B": (((32000, D), (32000, D), (D,)), (*ATTENTION, (8, D), (8, 2 * F, D), (8, D, F), (D,), (D,))),
}


def layout_of(shapes, size, granularity, dtype="fp32", owners=None):
    params = [ParamSpec(f"p{index}", shape, dtype) for index, shape in enumerate(shapes)]
    return GroupLayout.build(params, size, granularity=granularity, owners=owners)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    ("granularity", "sizes"),
    [(ELEMENT, (8, 64, 512)), (block(256), (8, 64, 512)), (block(2048), (8, 64, 512)), (ROW, (8, 64))],
    ids=str,
)
def test_less_than_five_percent_is_padding_and_no_rank_holds_five_percent_more_than_its_share(
    granularity, sizes, name, dtype
):
    for size in sizes:
        for shapes in MODELS[name]:
            layout = layout_of(shapes, size, granularity, dtype)
            assert layout.padding_numel < 0.05 * layout.numel
            fullest = max(layout.slice_numel(rank) for rank in range(size))
            assert fullest * size < 1.05 * layout.logical_numel


def test_rows_of_llama_and_mixtral_leave_all_slices_equal():
    """So that one in-place collective moves them."""
    for name in ("Llama-3-8B", "Mixtral 8x7B"):
        assert all(layout_of(shapes, size, ROW).is_even for shapes in MODELS[name] for size in (8, 64, 512))
    assert not layout_of(MODELS["GPT-2"][1], 64, ROW).is_even  # its rows have no small common multiple


def test_where_equal_slices_would_be_mostly_padding_they_are_not_equal():
    layout = layout_of(((3, 50257), (3, 1009)), 2, ROW)
    assert not layout.is_even
    assert layout.padding_numel < 128
    assert [piece.numel for piece in layout.owned(0)] == [3 * 50257]  # cuts lie at multiples of 64 elements as well


# -- whole parameters


@given(st.lists(st.integers(0, 10**6), max_size=60), st.integers(1, 40))
def test_whole_parameters_are_spread_within_grahams_bound(weights, size):
    owners = assign(weights, size)
    assert len(owners) == len(weights)
    loads = [sum(w for w, owner in zip(weights, owners, strict=True) if owner == rank) for rank in range(size)]
    total, heaviest = sum(weights), max(weights, default=0)
    assert max(loads) * size <= total + heaviest * (size - 1)
    if len([w for w in weights if w]) <= size:
        assert max(loads) == heaviest  # nobody gets two where there are ranks enough


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(1, 8), st.randoms())
def test_the_loads_do_not_depend_on_the_order_of_parameters(weights, size, random):
    shuffled = random.sample(weights, len(weights))
    found = []
    for each in (weights, shuffled):
        owners = assign(each, size)
        found.append(sorted(sum(w for w, o in zip(each, owners, strict=True) if o == r) for r in range(size)))
    assert found[0] == found[1]


def test_llamas_parameters_are_balanced_over_the_whole_model_where_no_single_one_is_too_large():
    root, layer = MODELS["Llama-3-8B"]
    units = [root, *[layer] * 32]
    owners = iter(assign([math.prod(shape) for unit in units for shape in unit], 8))
    layouts = [layout_of(unit, 8, TENSOR, owners=[next(owners) for _ in unit]) for unit in units]
    sizes = rank_bytes(layouts)
    assert sum(sizes) == 4 * sum(layout.logical_numel for layout in layouts)
    assert max(sizes) * 8 < 1.01 * sum(sizes)
    assert max(rank_bytes(layouts[1:2])) * 8 > 2 * sum(rank_bytes(layouts[1:2]))  # of one layer alone it is not


def test_owners_decide_whose_slice_a_parameter_lies_in():
    layout = layout_of(((5, 7), (3,), (64,), ()), 3, TENSOR, owners=(2, 0, 2, 0))
    assert [[piece.index for piece in layout.owned(rank)] for rank in range(3)] == [[1, 3], [], [0, 2]]
    assert layout.bounds == (0, 128, 128, 256)
    other = dataclasses.replace(layout, owners=(0, 0, 2, 0))
    assert layout.fingerprint() != other.fingerprint()
