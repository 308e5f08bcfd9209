"""Every strategy gives, to the last bit, what one plain process gives that adds up the same microbatches."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import distributed

from shardwise.comm.base import Done
from shardwise.comm.gloo import GlooComm
from shardwise.engine.group import Group
from shardwise.testing import run_on_ranks
from tests.parity import models
from tests.parity.training import PRESETS, VARIANTS, RankNumbers, Variant, differences, train_plain, train_ranks


@pytest.fixture(autouse=True)
def _one_thread():
    """Kernels cut sums by threads; the ranks have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_every_way(name: str) -> dict[tuple[str, str], RankNumbers]:
    """Every preset and variant, one after the other.

    Released slots are NaN in half of them, and in half of them the optimizer sees flat tensors: each combination of
    these two in some world.
    """
    results, world = {}, distributed.get_world_size()
    for turn, variant in enumerate(VARIANTS):
        for place, preset in enumerate(PRESETS):
            is_debugging = (turn + place + world) % 2 == 0
            is_flat = (turn + place + world // 2) % 2 == 0
            results[preset, variant.name] = train_ranks(
                name, preset, variant, is_debugging=is_debugging, is_flat=is_flat
            )
    return results


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_every_strategy_is_bitwise_equal_to_one_process(world, name):
    """Megatron-LM#6660: a group of one rank doubles gradients. DeepSpeed#8280: empty parameters (``odd``)."""
    ranks = run_on_ranks(train_every_way, world, name, timeout_s=150)
    for variant in VARIANTS:
        expected = train_plain(name, variant, world)
        assert min(expected.norms) > 0
        for preset in PRESETS:
            found = differences(expected, [results[preset, variant.name] for results in ranks])
            assert not found, f"{preset}, {variant.name}: {found}"


def train_merged(name: str, variants: tuple[Variant, ...]) -> dict[tuple[str, str], RankNumbers]:
    """Every preset with blocks that travel in pairs or more."""
    limit = models.merge_limit(name)
    return {
        (preset, variant.name): train_ranks(name, preset, variant, is_debugging=place % 2 == 0, merge_units=limit)
        for variant in variants
        for place, preset in enumerate(PRESETS)
    }


def merged_is_equal(name: str, world: int, variants: tuple[Variant, ...]) -> None:
    ranks = run_on_ranks(train_merged, world, name, variants, timeout_s=150)
    for variant in variants:
        expected = train_plain(name, variant, world)
        for preset in PRESETS:
            found = differences(expected, [results[preset, variant.name] for results in ranks])
            assert not found, f"{preset}, {variant.name}: {found}"


@pytest.mark.parametrize("name", models.NAMES)
def test_units_that_travel_together_are_bitwise_equal_to_one_process(name):
    merged_is_equal(name, 2, VARIANTS[:1])


@pytest.mark.long
@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_units_that_travel_together_are_bitwise_equal_to_one_process_in_every_way(world, name):
    merged_is_equal(name, world, VARIANTS)


def test_clipping_is_at_work():
    expected = train_plain("gpt", VARIANTS[-1], 2)
    assert max(expected.norms) > VARIANTS[-1].max_norm


# -- negative controls: what the tests above would not notice proves nothing


def train_without_gathering_for_backward() -> RankNumbers:
    """Backward finds in the slots whatever the last unit has left there."""
    gather = Group.gather

    def skip_in_backward(group):
        engine = group.unit.engine()
        return Done() if engine.is_in_backward else gather(group)

    with mock.patch.object(Group, "gather", skip_in_backward):
        return train_ranks("gpt", "zero3", VARIANTS[0])


def test_without_the_gather_for_backward_every_block_differs():
    ranks = run_on_ranks(train_without_gathering_for_backward, 2)
    expected = train_plain("gpt", VARIANTS[0], 2)
    found = differences(expected, ranks)
    trained = [name for name in expected.tensors if "blocks." in name]
    assert len(trained) == 3 * 12 * models.NUM_BLOCKS
    assert [name for name in trained if name not in found] == []


def train_with_a_reciprocal() -> list[RankNumbers]:
    """Gradients are multiplied by 1/N instead of divided by N."""
    reduce_scatter, all_reduce = GlooComm.reduce_scatter, GlooComm.all_reduce

    def scaled_reduce_scatter(comm, buffer, out, *, unit, divisor=1, cuts=None):
        reduce_scatter(comm, buffer, out, unit=unit, cuts=cuts).wait()
        out.mul_(1 / divisor)
        return Done()

    def scaled_all_reduce(comm, buffer, *, unit, divisor=1):
        all_reduce(comm, buffer, unit=unit).wait()
        buffer.mul_(1 / divisor)
        return Done()

    with (
        mock.patch.object(GlooComm, "reduce_scatter", scaled_reduce_scatter),
        mock.patch.object(GlooComm, "all_reduce", scaled_all_reduce),
    ):
        return [train_ranks("gpt", preset, VARIANTS[0]) for preset in ("ddp", "zero3")]


def test_multiplying_by_a_third_differs_from_dividing_by_three():
    ranks = run_on_ranks(train_with_a_reciprocal, 3)
    expected = train_plain("gpt", VARIANTS[0], 3)
    for index in range(2):
        found = differences(expected, [results[index] for results in ranks])
        assert "blocks.0.mlp.up.weight" in found
        assert "optimizer/blocks.0.mlp.up.weight/exp_avg" in found


def test_the_two_groupings_of_accumulation_differ():
    sharded, unsharded = (
        train_plain("gpt", Variant(mode, 2, mode), 3).tensors["blocks.0.mlp.up.weight"]
        for mode in ("sharded", "unsharded")
    )
    assert not torch.equal(sharded, unsharded)
