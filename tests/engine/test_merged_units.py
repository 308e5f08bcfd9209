"""Small neighbours that travel as one unit: every scenario of single units holds for them as well, to the last bit."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import Block, Chain, compare_each, plain_loss, planned, sample
from tests.common.ranks import on_ranks, refusal
from tests.engine import (
    test_behaviour,
    test_different_paths,
    test_disagreement,
    test_pitfalls,
    test_released_units,
    test_side_doors,
)
from tests.engine import test_hybrid_ranks as test_hybrid
from tests.engine.extensions import test_activation_checkpointing, test_recomputation

#: A block of the oracle's chain has 916 bytes: pairs and one left over, or all five in one.
PAIRS, ALL = 2000, 1 << 30

SCENARIOS = {
    "orders": (test_released_units.orders,),
    "frozen": (test_released_units.frozen,),
    "several forwards": (test_released_units.several_forwards,),
    "branches": (test_released_units.branches,),
    "skips": (test_disagreement.skips,),
    "recomputation": (test_recomputation.recompute, False),
    "reentrant recomputation": (test_recomputation.recompute, True),
    "nested units": (test_recomputation.recompute_nested_units,),
    "two recomputed forwards": (test_recomputation.two_forwards,),
    "inner backwards": (test_recomputation.inner_backwards,),
    "outputs": (test_behaviour.outputs,),
    "evaluations": (test_behaviour.evaluations,),
    "requires_grad": (test_behaviour.switch,),
    "stateful": (test_behaviour.stateful,),
    "depth": (test_behaviour.depth,),
    "outputs of others": (test_pitfalls.outputs_of_others,),
    "repeated backwards": (test_pitfalls.repeated_backwards,),
    "exceptions": (test_pitfalls.exceptions,),
    "encoders": (test_pitfalls.encoders,),
    "containers": (test_pitfalls.containers,),
    "used flags": (test_pitfalls.used_flags,),
    "side doors": (test_side_doors.hide, True),
    "branching": (test_disagreement.branch,),
    "different paths": (test_different_paths.differ,),
    "layer drop": (test_different_paths.drops,),
    "activation checkpointing": (test_activation_checkpointing.every_way,),
}
NESTED_REENTRANT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
QUICK = ("orders", "frozen", "skips", "recomputation", "reentrant recomputation", "evaluations", "used flags")


def run_merged(names, limit, only):
    for name in names:
        scenario, *args = SCENARIOS[name]
        with planned(only=only, merge_units=limit):
            scenario(*args)


@NESTED_REENTRANT
def test_pairs_of_units_train_like_one_process():
    run_on_ranks(run_merged, 2, QUICK, PAIRS, ("zero2", "zero3"), timeout_s=150)


@NESTED_REENTRANT
@pytest.mark.long
@pytest.mark.parametrize("limit", [PAIRS, ALL])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_scenario_holds_for_merged_units(name, world, limit):
    run_on_ranks(run_merged, world, (name,), limit, None, timeout_s=150)


@pytest.mark.long
@on_ranks(4, timeout_s=150)
def test_merged_units_may_be_sharded_and_replicated():
    with planned(merge_units=PAIRS):
        test_hybrid.test_ranks_may_use_different_parameters_and_units_on_either_axis.__wrapped__()


# -- what is merged


def units_of(model: nn.Module, **options: object) -> list[str]:
    sw.parallelize(model, sw.ParallelPlan(**options))
    return [unit.name for unit in sw.summary(model).units]


class Mixture(nn.Module):
    """A chain, alternatives, and a chain inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.by_name = nn.ModuleDict({"a": Block(), "b": Block()})
        self.left, self.right = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        picked = self.experts[int(x.sum() > 0)]
        return self.right(self.left(self.by_name["a"](picked(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x)


def frozen_front() -> nn.Module:
    model = Chain(num_blocks=6)
    model.blocks[:3].requires_grad_(requires_grad=False)
    return model


@on_ranks(1)
def test_neighbours_in_a_chain_are_merged_but_no_alternatives_no_parents_and_nothing_across_kinds():
    blocks = sw.wrap_by_class({Block})
    deep = Chain(Tower, 2)
    nested = Chain(Tower, 2)
    found = {
        "off": units_of(Chain(), merge_units=False),
        "few": units_of(Chain()),
        "many": units_of(Chain(num_blocks=48)),
        "pairs": units_of(Chain(), merge_units=PAIRS),
        "all": units_of(Chain(), merge_units=ALL),
        "mixture": units_of(Mixture(), auto_wrap_policy=blocks, merge_units=ALL),
        "inner": units_of(deep, auto_wrap_policy=blocks, merge_units=ALL),
        "nested": units_of(nested, auto_wrap_policy=sw.wrap_by_class({Block, Tower}), merge_units=ALL),
        "frozen": units_of(frozen_front(), merge_units=ALL),
        "casts": units_of(
            Chain(num_blocks=4),
            merge_units=ALL,
            mp_policy=sw.PrecisionPolicy(overrides={"blocks.3": sw.PrecisionPolicy(param_dtype="fp32")}),
        ),
    }
    five = [f"blocks.{index}" for index in range(5)]
    assert found["off"] == found["few"] == ["root", *five]
    assert found["many"] == ["root", *(f"blocks.{first}-{first + 5}" for first in range(0, 48, 6))]
    assert found["pairs"] == ["root", "blocks.0-1", "blocks.2-3", "blocks.4"]
    assert found["all"] == ["root", "blocks.0-4"]
    assert found["mixture"] == [
        "root",
        "layers.0-3",
        *(f"experts.{index}" for index in range(3)),
        "by_name.a",
        "by_name.b",
        "left",
        "right",
    ]
    assert found["inner"] == ["root", "blocks.0.chain.0-2", "blocks.1.chain.0-2"]
    assert found["nested"] == ["root", "blocks.0", "blocks.0.chain.0-2", "blocks.1", "blocks.1.chain.0-2"]
    assert found["frozen"] == ["root", "blocks.0-2", "blocks.3-5"]
    assert found["casts"] == ["root", "blocks.0-2", "blocks.3"]


def look_at_a_merged_model():
    model = sw.parallelize(Chain(num_blocks=48))
    for step in range(2):
        plain_loss(model, 0, step).backward()
        model.zero_grad()
    with sw.record_collectives(model) as events:
        plain_loss(model, 0, 2).backward()
    summary = sw.summary(model)
    return str(summary), summary.units[1], [(event.kind, event.unit) for event in events]


def test_the_summary_and_the_collectives_tell_what_travels_together():
    (text, unit, events), _ = run_on_ranks(look_at_a_merged_model, 2)
    assert unit.type_name == "6 x Block"
    assert [name for name, _, _ in unit.groups[0].parameters][:1] == ["blocks.0.up.weight"]
    assert len(unit.groups[0].parameters) == 24
    assert re.search(r"\n  blocks\.0-5 +6 x Block ", text)
    assert "root blocks.0-5 blocks.6-11" in text
    assert len(events) == 9 + 7 + 9  # gathers of forward, of backward but for the last unit and the root, reductions
    assert ("reduce_scatter", "blocks.42-47") in events


@on_ranks(2)
def test_a_module_of_a_merged_unit_is_refused_outside_of_its_own_call():
    """Modules of a merged unit are refused outside of their member, and are plain modules inside."""
    model = sw.parallelize(Chain(), sw.ParallelPlan(merge_units=ALL))
    texts = []

    def call_a_neighbours_part(module, args):
        texts.append(refusal(StateError, model.blocks[1].up, args[0]))

    hook = model.blocks[0].register_forward_pre_hook(call_a_neighbours_part)
    x = sample(0, 0)
    model(x)
    hook.remove()
    alone, whole = model.blocks[2](x), model(x)
    unit = probe(model).units[1]
    assert not unit.shows_whole_parameters
    assert not unit.num_open_forwards
    alone.sum().backward()
    whole.sum().backward()
    assert len(texts) == 1
    assert " of 'blocks.1.up." in texts[0]
    assert "Compute in the forward of its unit 'blocks.1'" in texts[0]


def members_alone(model, rank, step):
    """Each block is called by itself, in another order in every step."""
    x = sample(rank, step)
    for index in ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (4, 2, 0, 1, 3), (1, 0, 3, 2, 4))[step]:
        x = model.blocks[index](x)
    return x.square().mean()


@on_ranks(2)
def test_members_may_be_called_by_themselves_and_in_any_order():
    for limit in (PAIRS, ALL):
        compare_each(Chain, members_alone, ("zero2", "shard_grad_op", "zero3"), merge_units=limit)
