"""Hybrid sharding gives, to the last bit, what one process gives that adds inside each group first, then over them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from shardwise.comm.base import Done
from shardwise.comm.gloo import GlooComm
from shardwise.forms.inner import InnerShard
from shardwise.testing import run_on_ranks
from tests.parity import models
from tests.parity.training import PRESETS, VARIANTS, RankNumbers, Variant, differences, train_plain, train_ranks

HYBRID = ("hsdp", "hybrid_shard_grad_op")
PLAIN, SHARDED, UNSHARDED, CLIPS = VARIANTS
DEFERRED = Variant("defers", 3, "defer_replicate", max_norm=0.3)
#: What is run in `make test`; the other presets and variants are those of the long test.
QUICK = (("hsdp", SHARDED), ("hsdp", UNSHARDED), ("hsdp", CLIPS), ("hsdp", DEFERRED), ("hybrid_shard_grad_op", PLAIN))
EVERY = tuple(
    (preset, variant)
    for preset in (*PRESETS, *HYBRID)
    for variant in (*VARIANTS, DEFERRED)
    if variant is not DEFERRED or preset not in {"ddp", "zero1"}
)


@pytest.fixture(autouse=True)
def _one_thread():
    """Kernels cut sums by threads; the ranks have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_all(name: str, cases, options) -> list[RankNumbers]:
    """One run after the other; released slots are NaN in half of them."""
    return [
        train_ranks(name, preset, variant, is_debugging=place % 2 == 0, **options)
        for place, (preset, variant) in enumerate(cases)
    ]


def check(name: str, world: int, num_groups: int, cases, **options) -> None:
    options.setdefault("dp_replicate", num_groups)
    ranks = run_on_ranks(train_all, world, name, cases, options, timeout_s=250)
    for place, (preset, variant) in enumerate(cases):
        expected = train_plain(name, variant, world, num_groups)
        found = differences(expected, [results[place] for results in ranks])
        assert not found, f"{preset}, {variant.name}, {num_groups} groups of {world // num_groups}: {found}"


@pytest.mark.parametrize("name", ["tied", "odd", "frozen"])
def test_two_groups_of_two(name):
    check(name, 4, 2, QUICK)


@pytest.mark.parametrize(("world", "num_groups"), [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_axes_of_one_rank(world, num_groups):
    """One group is given as ``dp_shard``: with ``dp_replicate=1`` a hybrid strategy takes what is left."""
    cases = (("hsdp", SHARDED), ("hsdp", DEFERRED))
    check("odd", world, num_groups, cases, dp_replicate=1, dp_shard=world // num_groups)


def test_other_strategies_may_be_replicated_over_groups():
    check(
        "odd", 4, 2, (("ddp", PLAIN), ("zero1", UNSHARDED), ("zero2", SHARDED), ("zero2", DEFERRED), ("zero3", CLIPS))
    )


@pytest.mark.long
@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize(("world", "num_groups"), [(4, 2), (2, 2), (3, 3), (6, 2), (6, 3)])
def test_every_strategy_on_every_mesh(world, num_groups, name):
    check(name, world, num_groups, EVERY)


# -- kept sharded over an inner group


@pytest.mark.parametrize("name", ["tied", "odd"])
def test_a_unit_kept_over_two_of_four_ranks(name):
    cases = (("zero3", CLIPS), ("zero3", SHARDED), ("zero3", UNSHARDED), ("shard_grad_op", PLAIN))
    check(name, 4, 1, cases, reshard_after_forward=2)


@pytest.mark.long
@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize(("world", "num_groups", "inner"), [(4, 1, 2), (6, 1, 2), (6, 1, 3), (8, 2, 2)])
def test_units_kept_over_inner_groups_of_every_size(world, num_groups, inner, name):
    cases = [(p, v) for p, v in EVERY if p in {"zero3", "shard_grad_op", *HYBRID}]
    if num_groups == 1:
        cases = [(p, v) for p, v in cases if p not in HYBRID and v is not DEFERRED]
    check(name, world, num_groups, cases, reshard_after_forward=inner)


# -- with what else changes where gradients and parameters lie

OTHERS = (
    ("hsdp", {"is_flat": True, "dp_replicate": 2}),
    ("hsdp", {"is_flat": True, "is_in_backward": True, "dp_replicate": 2}),
    ("hsdp", {"granularity": "tensor", "merge_units": 1 << 16, "dp_replicate": 2}),
    ("hybrid_shard_grad_op", {"activation_checkpointing": "full", "dp_replicate": 2}),
    ("zero3", {"granularity": "tensor", "reshard_after_forward": 2}),
    ("zero3", {"activation_checkpointing": "full", "reshard_after_forward": 2}),
)


def train_others() -> list[RankNumbers]:
    return [train_ranks("tied", preset, PLAIN, **options) for preset, options in OTHERS]


def test_other_features_go_with_both_axes():
    ranks = run_on_ranks(train_others, 4, timeout_s=150)
    expected = {groups: train_plain("tied", PLAIN, 4, groups) for groups in (1, 2)}
    for place, (preset, options) in enumerate(OTHERS):
        found = differences(expected[options.get("dp_replicate", 1)], [results[place] for results in ranks])
        assert not found, f"{preset}, {options}: {found}"


# -- negative controls


def test_adding_over_the_groups_first_would_differ():
    """And so would any sum in rank order: the tests above tell the groupings apart."""
    flat, grouped, columns = (train_plain("gpt", PLAIN, *how).tensors for how in ((4, 1), (4, 2), (4, 4)))
    assert all(torch.equal(a, b) for a, b in zip(flat.values(), columns.values(), strict=True))
    assert not torch.equal(flat["blocks.0.mlp.up.weight"], grouped["blocks.0.mlp.up.weight"])
    deferred, sharded = (train_plain("gpt", Variant(mode, 2, mode), 4, 2) for mode in ("defer_replicate", "sharded"))
    name = "blocks.0.mlp.up.weight"
    assert not torch.equal(deferred.tensors[name], sharded.tensors[name])


def train_without_the_sum_over_the_groups() -> RankNumbers:
    all_reduce = GlooComm.all_reduce

    def divide_only(comm, buffer, *, unit, divisor=1):
        if comm.axis != "dp_replicate":
            return all_reduce(comm, buffer, unit=unit, divisor=divisor)
        buffer.div_(divisor)
        return Done()

    with mock.patch.object(GlooComm, "all_reduce", divide_only):
        return train_ranks("gpt", "hsdp", PLAIN, dp_replicate=2)


def train_without_keeping_the_inner_shard() -> RankNumbers:
    """Backward gathers inside the inner group whatever lies there: zeros, or an earlier step's parameters."""
    keep = InnerShard.keep

    def keep_once(inner, gathered, epoch):
        keep(inner, gathered, epoch) if inner.epoch < 0 else setattr(inner, "epoch", epoch)

    with mock.patch.object(InnerShard, "keep", keep_once):
        return train_ranks("gpt", "zero3", PLAIN, reshard_after_forward=2)


@pytest.mark.parametrize(
    ("train", "num_groups"), [(train_without_the_sum_over_the_groups, 2), (train_without_keeping_the_inner_shard, 1)]
)
def test_without_it_every_block_differs(train, num_groups):
    ranks = run_on_ranks(train, 4)
    expected = train_plain("gpt", PLAIN, 4, num_groups)
    found = differences(expected, ranks)
    trained = [name for name in expected.tensors if "blocks." in name]
    assert [name for name in trained if name not in found] == []
