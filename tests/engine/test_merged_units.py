"""Small neighbours that travel as one unit: every scenario of single units holds for them as well, to the last bit."""

from __future__ import annotations

import inspect
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
    "orders": (test_released_units.test_units_that_run_more_than_once_find_their_data_again,),
    "frozen": (test_released_units.test_frozen_units_and_frozen_parts_of_units_have_data_but_no_gradients,),
    "several forwards": (test_released_units.test_several_forwards_may_come_before_a_backward,),
    "branches": (test_released_units.test_parallel_branches_and_dense_connections_are_right,),
    "skips": (test_disagreement.test_from_the_second_step_on_a_rank_may_skip_whole_units,),
    "recomputation": (test_recomputation.test_blocks_segments_and_submodules_can_be_recomputed, False),
    "reentrant recomputation": (test_recomputation.test_blocks_segments_and_submodules_can_be_recomputed, True),
    "nested units": (test_recomputation.test_units_in_recomputed_units_can_be_recomputed,),
    "two recomputed forwards": (
        test_recomputation.test_a_whole_model_can_be_recomputed_and_two_recomputed_forwards_share_one_backward,
    ),
    "inner backwards": (test_recomputation.test_a_backward_inside_backward_does_not_end_the_outer_one,),
    "outputs": (test_behaviour.test_outputs_may_be_tuples_dicts_dataclasses_objects_and_nests_of_them,),
    "evaluations": (test_behaviour.test_forwards_without_grad_may_come_before_between_inside_and_after,),
    "requires_grad": (test_behaviour.test_requires_grad_may_be_switched_between_steps,),
    "stateful": (test_behaviour.test_batch_norm_recurrent_nets_and_buffers_written_in_forward_are_right,),
    "depth": (test_behaviour.test_forwards_may_leave_units_out_and_backward_may_end_early,),
    "outputs of others": (
        test_pitfalls.test_a_parent_that_returns_its_childs_output_and_inputs_handed_through_are_right,
    ),
    "repeated backwards": (test_pitfalls.test_a_graph_can_be_run_backward_again_and_gradients_may_be_undefined,),
    "exceptions": (test_pitfalls.test_after_an_exception_in_forward_or_backward_the_next_step_is_right,),
    "encoders": (test_pitfalls.test_an_encoder_can_be_called_without_the_root,),
    "containers": (test_pitfalls.test_auto_takes_only_modules_that_are_called,),
    "used flags": (test_pitfalls.test_ranks_may_use_different_parameters_of_a_unit_and_unused_ones_keep_no_gradient,),
    "side doors": (test_side_doors.test_hidden_values_and_losses_kept_on_modules_are_right_in_every_step, True),
    "branching": (test_disagreement.test_a_model_may_branch_by_its_input,),
    "different paths": (test_different_paths.test_ranks_may_run_different_parts_of_a_model_from_the_first_step_on,),
    "layer drop": (test_different_paths.test_ranks_may_leave_out_different_layers_of_a_list_from_the_first_step_on,),
    "activation checkpointing": (
        test_activation_checkpointing.test_every_policy_gives_the_numbers_of_no_recomputation_dropout_included,
    ),
}
NESTED_REENTRANT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
QUICK = ("orders", "frozen", "skips", "recomputation", "reentrant recomputation", "evaluations", "used flags")


def run_merged(names, limit, only):
    for name in names:
        scenario, *args = SCENARIOS[name]
        with planned(only=only, merge_units=limit):
            inspect.unwrap(scenario)(*args)


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
    assert "blocks.0.up.weight" in [name for name, _, _ in unit.groups[0].parameters]
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
    assert "A module of its unit 'blocks.1' was called from outside of that unit's forward" in texts[0]


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
