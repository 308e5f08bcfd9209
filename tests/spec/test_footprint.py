"""The bytes that a rank holds, against ZeRO's table and against walks by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.granularity import TENSOR
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.memory.footprint import (
    Footprint,
    footprint,
    gathered_bytes,
    reduce_bytes,
    size_class,
)
from shardwise.spec.placement import PRESETS
from shardwise.spec.unit_facts import GroupFacts

#: Elements of the root and of each block of the even model: multiples of 64 for up to 64 ranks.
ROOT, BLOCK, NUM_BLOCKS = 300 * 4096, 1000 * 4096, 6
PSI = ROOT + NUM_BLOCKS * BLOCK
HEADER = 64


def model(preset, world, *, root=ROOT, blocks=(BLOCK,) * NUM_BLOCKS, dtype="fp32", frozen=()):
    """A root and units below it, one parameter each."""
    row = PRESETS[preset]
    groups = []
    for unit, numel in enumerate((root, *blocks)):
        layout = GroupLayout.build([ParamSpec(f"p{unit}", (numel,), dtype, unit not in frozen)], world)
        reshards = row.shards_parameters and not row.keeps_gathered and unit > 0
        groups.append(GroupFacts(unit, layout, row, int(unit > 0), reshards, unit not in frozen))
    return groups


@pytest.mark.parametrize("world", [1, 2, 4, 16, 64])
@pytest.mark.parametrize(
    ("preset", "parameters", "gradients", "optimizer"),
    [
        ("ddp", lambda n: 4, lambda n: 4, lambda n: 8),
        ("zero1", lambda n: 4, lambda n: 4, lambda n: 8 / n),
        ("zero2", lambda n: 4, lambda n: 4 / n, lambda n: 8 / n),
        ("shard_grad_op", lambda n: 4 / n, lambda n: 4 / n, lambda n: 8 / n),
        ("zero3", lambda n: 4 / n, lambda n: 4 / n, lambda n: 8 / n),
    ],
)
def test_even_shapes_give_zeros_table_in_single_precision_plus_headers(preset, world, parameters, gradients, optimizer):
    result = footprint(model(preset, world), rank=0)
    units = NUM_BLOCKS + 1
    # One header of 64 elements for each slice that is held; an all-reduced buffer has one of 64 n.
    slices = 1 if PRESETS[preset].pools_gradients else world
    assert result.parameters == parameters(world) * PSI
    assert result.gradients == gradients(world) * PSI + 4 * HEADER * slices * units
    assert result.optimizer == optimizer(world) * PSI + 4 * sum(
        1 for group in model(preset, world) if not group.placements.shards_optimizer or group.layout.owned(0)
    )


#: ZeRO (arXiv 1910.02054), table 1: billions of parameters, ranks, GB per rank of stages 1, 2 and 3 with Adam in mixed
#: precision: 2 + 2 + 12 bytes. In single precision it is 4 + 4 + 8.
ZERO_TABLE = [
    (7.5, 1, 120, 120, 120),
    (7.5, 4, 52.5, 41.25, 30),
    (7.5, 16, 35.62, 21.56, 7.5),
    (7.5, 64, 31.41, 16.64, 1.875),
    (128, 4, 896, 704, 512),
    (128, 64, 536, 284, 32),
    (1000, 16, 4750, 2875, 1000),
    (1000, 64, 4188, 2219, 250),
]


@pytest.mark.parametrize(("billions", "world", "stage1", "stage2", "stage3"), ZERO_TABLE)
def test_zeros_published_table_follows_from_the_same_shares(billions, world, stage1, stage2, stage3):
    """Each category's share of its whole is that of the table; only the bytes of one element differ."""
    scale = 4 * PSI
    for preset, published in (("zero1", stage1), ("zero2", stage2), ("zero3", stage3)):
        result = footprint(model(preset, world), rank=0)
        parameters, gradients = result.parameters / scale, result.gradients / scale
        optimizer = result.optimizer / (2 * scale)
        mixed_gb = billions * (2 * parameters + 2 * gradients + 12 * optimizer)
        assert mixed_gb == pytest.approx(published, rel=0.02)


def test_one_rank_alone_computes_with_its_master_and_reduces_where_grad_is():
    for preset in PRESETS:
        result = footprint(model(preset, 1), rank=0)
        assert (result.gathered, result.reduce) == (0, 0)
        assert result.gradients == pytest.approx(4 * PSI, rel=1e-3)


@pytest.mark.parametrize("world", [2, 8])
def test_zero3_holds_two_blocks_and_the_root_gathered(world):
    assert footprint(model("zero3", world), rank=0).gathered == 4 * (2 * BLOCK + ROOT)
    assert footprint(model("shard_grad_op", world), rank=0).gathered == 4 * PSI
    for preset in ("ddp", "zero1", "zero2"):
        assert footprint(model(preset, world), rank=0).gathered == 0


@pytest.mark.parametrize("preset", ["zero2", "shard_grad_op", "zero3"])
@pytest.mark.parametrize("world", [2, 8])
def test_pooled_gradients_take_one_block_as_a_reduction_is_waited_for_before_the_next_unit_collects(preset, world):
    result = reduce_bytes(model(preset, world), rank=0, has_receive_buffers=False)
    assert result == 4 * (BLOCK + HEADER * world)


@pytest.mark.parametrize("preset", ["ddp", "zero1"])
def test_gradients_that_stay_whole_take_no_pooled_buffer(preset):
    assert reduce_bytes(model(preset, 4), rank=0, has_receive_buffers=False) == 0


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("world", [1, 2, 8])
def test_sums_receive_every_peers_slice_of_one_unit_the_largest(preset, world):
    groups = model(preset, world)
    without = reduce_bytes(groups, rank=0, has_receive_buffers=False)
    pooled = reduce_bytes(groups, rank=0, accumulations=["sharded"], has_receive_buffers=False)
    adding = reduce_bytes(groups, rank=0, accumulations=["sharded"]) - pooled
    if not PRESETS[preset].shards_optimizer:  # an all-reduce has two phases, so that a second unit's is on its way
        adding -= 4 * (BLOCK + HEADER * world)
    assert adding == 4 * (world - 1) * (BLOCK // world + HEADER)
    goes_home = PRESETS[preset].pools_gradients  # one of the slices lands where .grad will be
    received = reduce_bytes(groups, rank=0) - without
    assert received == 4 * max(world - 1 - goes_home, 0) * (BLOCK // world + HEADER)


def test_receive_buffers_that_turn_out_too_small_are_replaced():
    """A rank's slices differ from unit to unit; what one backward makes is enough for the next."""
    sizes = {1: 640, 2: 64, 3: 1280}  # by unit; backward goes from the last to the first
    groups = [
        GroupFacts(
            unit,
            GroupLayout.build([ParamSpec(f"p{unit}", (numel,))], 2, granularity=TENSOR, owners=[unit % 2]),
            PRESETS["zero3"],
            1,
            True,
            True,
        )
        for unit, numel in sizes.items()
    ]
    received = [
        reduce_bytes(groups, rank=rank, accumulations=["sharded"])
        - reduce_bytes(groups, rank=rank, has_receive_buffers=False)
        for rank in range(2)
    ]
    assert received == [4 * (64 + HEADER), 4 * (1280 + HEADER)]  # rank 1 adds up units 3 and 1, rank 0 unit 2


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_all_gradient_buffers_but_one_are_on_their_way_while_it_is_filled(limit):
    result = reduce_bytes(model("zero3", 2), rank=0, num_gradient_buffers=limit, has_receive_buffers=False)
    assert result == 4 * max(limit - 1, 1) * (BLOCK + 2 * HEADER)


@given(
    st.sampled_from([name for name, row in PRESETS.items() if not row.is_hybrid]),
    st.integers(1, 64),
    st.lists(st.integers(0, 5000), min_size=1, max_size=7),
)
def test_ranks_together_hold_the_state_of_every_element(preset, world, sizes):
    groups = model(preset, world, root=sizes[0], blocks=sizes[1:])
    copies = 1 if groups[0].placements.shards_optimizer else world
    state = sum(footprint(groups, rank=rank, optimizer_scalar_bytes=0).optimizer for rank in range(world))
    assert state == 8 * sum(sizes) * copies
    parameters = sum(footprint(groups, rank=rank).parameters for rank in range(world))
    assert parameters >= 4 * sum(sizes) * (1 if groups[0].placements.shards_parameters else world)


def test_optimizers_with_less_state_take_less():
    groups = model("zero3", 2)
    adam, momentum, plain = (footprint(groups, rank=0, optimizer_tensors=count) for count in (2, 1, 0))
    assert adam.optimizer - 4 * (NUM_BLOCKS + 1) == 2 * momentum.optimizer
    assert plain.optimizer == 0


def test_frozen_units_have_neither_gradients_nor_state():
    groups = model("zero3", 2, frozen=(1, 2))
    trained = footprint(model("zero3", 2, blocks=(BLOCK,) * (NUM_BLOCKS - 2)), rank=0)
    result = footprint(groups, rank=0)
    assert (result.gradients, result.optimizer, result.reduce) == (trained.gradients, trained.optimizer, trained.reduce)
    assert result.parameters == trained.parameters + 2 * 2 * BLOCK
    assert result.gathered == 4 * (2 * BLOCK + ROOT)


def test_of_blocks_of_different_sizes_the_largest_two_neighbours_are_there_together():
    groups = model("zero3", 2, root=0, blocks=(1024, 2048, 512, 4096, 128))
    assert gathered_bytes(groups) == 4 * (512 + 4096)
    deeper = [dataclasses.replace(group, num_ahead=2) for group in groups]
    assert gathered_bytes(deeper) == 4 * (2048 + 512 + 4096)
    together = [dataclasses.replace(group, recomputed_in="a" if group.unit in (1, 2) else None) for group in groups]
    assert gathered_bytes(together) == 4 * (512 + 4096)
    assert gathered_bytes(together[:4]) == 4 * (1024 + 2048 + 512)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("fp64", 8), ("bf16", 2)])
def test_other_dtypes_weigh_what_their_elements_weigh(dtype, num_bytes):
    result = footprint(model("zero3", 2, dtype=dtype), rank=0)
    assert result.parameters == num_bytes * PSI // 2
    assert result.gathered == num_bytes * (2 * BLOCK + ROOT)


@given(st.integers(1, 1 << 40))
def test_a_size_class_is_at_most_an_eighth_larger(numel):
    rounded = size_class(numel)
    assert numel <= rounded <= numel * 9 / 8
    assert size_class(rounded) == rounded


def test_a_footprint_adds_up_and_shows_its_categories():
    result = Footprint(parameters=1000, gradients=2, optimizer=3, gathered=4, reduce=5)
    assert result.total == 1014
    assert sum(result.as_dict().values()) == result.total
    assert list(result.as_dict()) == [field.name for field in dataclasses.fields(Footprint)]
    assert str(result) == (
        "parameters 1,000, gradients 2, optimizer 3, gathered 4, reduce 5; 1,014 in all, before activations"
    )
