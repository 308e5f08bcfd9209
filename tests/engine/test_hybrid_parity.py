"""Hybrid sharding gives, to the last bit, what one process gives that adds inside each group first, then over them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from shardwise.comm.base import Done
from shardwise.comm.gloo import GlooComm
from shardwise.engine.storage.inner import Inner
from shardwise.testing import RankFailure, run_on_ranks
from tests.common import models
from tests.common.oracle import PRESETS
from tests.common.ranks import on_ranks
from tests.common.training import VARIANTS, Variant, train

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


def train_all(name: str, cases, options) -> None:
    """One run after the other; released slots are NaN in half of them."""
    for place, (preset, variant) in enumerate(cases):
        train(name, preset, variant, is_debugging=place % 2 == 0, **options)


def check(name: str, world: int, num_groups: int, cases, **options) -> None:
    options.setdefault("dp_replicate", num_groups)
    run_on_ranks(train_all, world, name, cases, options, timeout_s=250)


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


@on_ranks(4, timeout_s=150)
def test_other_features_go_with_both_axes() -> None:
    for preset, options in OTHERS:
        train("tied", preset, PLAIN, **options)


# -- negative controls


@on_ranks(4)
def test_adding_over_the_groups_first_would_differ() -> None:
    """And so would any sum in rank order: the tests above tell the groupings apart.

    One weight of the plain process after each.
    """
    deferred, sharded = (Variant(mode, 2, mode) for mode in ("defer_replicate", "sharded"))
    ways = ((PLAIN, 1), (PLAIN, 4), (PLAIN, 2), (deferred, 2), (sharded, 2))  # and groups
    trained = [train("gpt", "hsdp", variant, steps=2, dp_replicate=1, dp_shard=4 // groups) for variant, groups in ways]
    flat, columns, grouped, deferred, sharded = [result.plain.blocks[0].mlp.up.weight.detach() for result in trained]
    assert torch.equal(flat, columns)
    assert not torch.equal(flat, grouped)
    assert not torch.equal(deferred, sharded)


def train_without_the_sum_over_the_groups() -> None:
    all_reduce = GlooComm.all_reduce

    def divide_only(comm, buffer, *, unit, divisor=1):
        if comm.axis != "dp_replicate":
            return all_reduce(comm, buffer, unit=unit, divisor=divisor)
        buffer.div_(divisor)
        return Done()

    with mock.patch.object(GlooComm, "all_reduce", divide_only):
        train("gpt", "hsdp", PLAIN, dp_replicate=2)


def test_without_the_sum_over_the_groups_every_gradient_differs():
    with pytest.raises(RankFailure, match="step 0, backward 0: gradients are off") as caught:
        run_on_ranks(train_without_the_sum_over_the_groups, 4)
    trained = [name for name, _ in models.build("gpt").named_parameters()]
    assert [name for name in trained if f"'{name}'" not in str(caught.value)] == []


def train_without_keeping_the_inner_shard() -> None:
    """Backward gathers inside the inner group whatever lies there: zeros, or an earlier step's parameters."""
    keep = Inner.keep

    def keep_once(inner, group):
        keep(inner, group) if inner.kept_epoch < 0 else setattr(inner, "kept_epoch", group.epoch)

    with mock.patch.object(Inner, "keep", keep_once):
        train("gpt", "zero3", PLAIN, reshard_after_forward=2)


def test_without_keeping_the_inner_shard_the_second_backward_differs():
    with pytest.raises(RankFailure, match="step 1, backward 0: gradients are off") as caught:
        run_on_ranks(train_without_keeping_the_inner_shard, 4)
    kept = [name for name, _ in models.build("gpt").named_parameters() if name.startswith("blocks.0.")]
    assert [name for name in kept if f"'{name}'" not in str(caught.value)] == []
