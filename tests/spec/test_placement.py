"""The table of strategies: its rows, its spellings, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import PlacementError
from shardwise.spec.placement import ALIASES, PRESETS, Placement, Placements, canonical_name, resolve_strategy

R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD


@pytest.mark.parametrize(
    ("name", "parameter", "gradient", "optimizer", "reduction"),
    [
        ("ddp", R, R, R, "all_reduce"),
        ("zero1", R, P, S, "reduce_scatter"),
        ("zero2", R, S, S, "reduce_scatter"),
        ("shard_grad_op", S, S, S, "reduce_scatter"),
        ("zero3", S, S, S, "reduce_scatter"),
        ("hsdp", S, S, S, "reduce_scatter"),
        ("hybrid_shard_grad_op", S, S, S, "reduce_scatter"),
        ("data_parallel", R, R, R, "all_reduce"),
    ],
)
def test_a_preset_is_a_row_of_the_table(name, parameter, gradient, optimizer, reduction):
    row = PRESETS[name]
    assert (row.parameter, row.gradient, row.optimizer) == (parameter, gradient, optimizer)
    assert row.gradient_move == reduction
    assert row.shards_parameters == (parameter is S)
    assert row.shards_optimizer == (optimizer is S)
    assert row.pools_gradients == (gradient is S)


def test_the_rows_of_the_test_above_are_all_there_are():
    assert len(PRESETS) == 8


def test_rows_that_look_alike_differ_in_what_is_kept_and_where():
    kept = {name for name, row in PRESETS.items() if row.keeps_gathered}
    hybrid = {name for name, row in PRESETS.items() if row.is_hybrid}
    assert kept == {"shard_grad_op", "hybrid_shard_grad_op"}
    assert hybrid == {"hsdp", "hybrid_shard_grad_op"}
    assert [name for name, row in PRESETS.items() if row.is_threaded] == ["data_parallel"]
    assert len(set(PRESETS.values())) == len(PRESETS)


@given(st.sampled_from([*PRESETS, *ALIASES]), st.data())
def test_names_and_aliases_are_taken_in_any_case(name, data):
    spelling = "".join(data.draw(st.sampled_from([char.lower(), char.upper()])) for char in name)
    canonical = ALIASES.get(name, name)
    assert canonical_name(f" {spelling} ") == canonical
    assert resolve_strategy(spelling) is PRESETS[canonical]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("NO_SHARD", "ddp"),
        ("fsdp", "zero3"),
        ("FULL_SHARD", "zero3"),
        ("SHARD_GRAD_OP", "shard_grad_op"),
        ("HYBRID_SHARD", "hsdp"),
        ("_HYBRID_SHARD_ZERO2", "hybrid_shard_grad_op"),
    ],
)
def test_spellings_of_fsdp_are_known(alias, name):
    assert canonical_name(alias) == name


def test_a_row_is_its_own_strategy():
    row = Placements("replicate", "PARTIAL", Placement.SHARD)
    assert resolve_strategy(row) is row
    assert row == PRESETS["zero1"]


def test_the_default_row_is_zero3():
    assert Placements() == PRESETS["zero3"]


def test_an_unknown_strategy_is_refused_with_the_nearest_name():
    with pytest.raises(PlacementError, match=r"unknown strategy 'zeor3'.\n  Did you mean 'zero3'\? Known: ddp, zero1"):
        canonical_name("zeor3")
    with pytest.raises(PlacementError, match=r"unknown strategy 'xyz'.\n  Known: ddp"):
        canonical_name("xyz")


def test_a_strategy_that_is_no_text_is_refused():
    with pytest.raises(PlacementError, match=r"strategy must be a preset name or sw\.Placements.*, got int"):
        resolve_strategy(3)


LEGAL_ROWS = {(R, R, R), (R, P, S), (R, S, S), (S, S, S)}


@pytest.mark.parametrize("row", list(itertools.product(Placement, repeat=3)))
def test_only_the_four_rows_of_the_table_can_be_built(row):
    if row in LEGAL_ROWS:
        assert Placements(*row).parameter is row[0]
        return
    with pytest.raises(PlacementError, match=r"cannot be combined: the optimizer needs its gradient") as caught:
        Placements(*row)
    assert f"parameter={row[0]}, gradient={row[1]}, optimizer={row[2]}" in str(caught.value)
    assert "Legal (parameter, gradient, optimizer): replicate, replicate, replicate; " in str(caught.value)


def test_a_placement_that_is_none_is_refused():
    with pytest.raises(
        PlacementError, match=r"gradient='half'.*is not a placement.\n  Use one of: replicate, shard, partial"
    ):
        Placements(gradient="half")


def test_only_sharded_parameters_can_be_kept_gathered():
    with pytest.raises(PlacementError, match="keeps_gathered=True needs parameter='shard'"):
        Placements(R, R, R, keeps_gathered=True)
