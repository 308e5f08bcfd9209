"""The mesh: rank and coordinate are inverse, groups partition the world, errors show the arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import MeshError
from shardwise.spec.mesh import AXES, Mesh

sizes = st.integers(1, 4)
meshes = st.builds(Mesh, pp=sizes, dp_replicate=sizes, dp_shard=sizes, cp=sizes, tp=sizes)


@given(meshes)
def test_rank_and_coordinate_are_inverse_on_every_rank(mesh: Mesh) -> None:
    seen = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(coordinate) for coordinate in seen] == list(range(mesh.world_size))
    assert len({tuple(coordinate.values()) for coordinate in seen}) == mesh.world_size
    assert all(tuple(coordinate) == AXES for coordinate in seen)


@given(meshes)
def test_the_groups_of_every_axis_partition_the_world(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.size(axis)}


@given(meshes, st.data())
def test_a_group_holds_its_rank_at_the_rank_s_own_position(mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    for axis in AXES:
        assert mesh.group(axis, rank)[mesh.coordinate(rank)[axis]] == rank


@given(meshes)
def test_the_innermost_axis_has_neighbouring_ranks(mesh: Mesh) -> None:
    assert mesh.group("tp", 0) == tuple(range(mesh.tp))


@given(meshes)
def test_ranks_that_share_samples_share_the_data_parallel_rank(mesh: Mesh) -> None:
    counts = [0] * mesh.data_parallel_size
    for rank in range(mesh.world_size):
        counts[mesh.data_parallel_rank(rank)] += 1
    assert set(counts) == {mesh.world_size // mesh.data_parallel_size}


@given(sizes, sizes, sizes, st.integers(1, 16))
def test_minus_one_takes_what_is_left(pp: int, cp: int, tp: int, rest: int) -> None:
    assert Mesh.build(pp * cp * tp * rest, pp=pp, cp=cp, tp=tp).dp_shard == rest


def test_the_drawn_example_holds() -> None:
    mesh = Mesh(pp=2, dp_shard=2, tp=2)
    assert [mesh.coordinate(rank)["dp_shard"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert mesh.group("pp", 3) == (3, 7)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_product_that_misses_the_world_shows_the_arithmetic_and_two_ways_out() -> None:
    with pytest.raises(MeshError) as caught:
        Mesh.build(8, dp_shard=3, tp=2)
    assert str(caught.value) == (
        "axes dp_shard=3 * tp=2 make 6 ranks, but the world has 8.\n  Set dp_shard=4, or launch 6 ranks."
    )


def test_one_axis_alone_is_named_in_the_singular() -> None:
    with pytest.raises(MeshError) as caught:
        Mesh.build(2, dp_shard=3)
    assert (
        str(caught.value) == "axis dp_shard=3 makes 3 ranks, but the world has 2.\n  Set dp_shard=2, or launch 3 ranks."
    )


def test_others_that_do_not_divide_the_world_leave_no_dp_shard() -> None:
    with pytest.raises(
        MeshError, match="axes pp=2 \\* tp=2 make groups of 4 ranks, which do not divide the world of 6"
    ):
        Mesh.build(6, pp=2, tp=2)


@pytest.mark.parametrize("size", [0, -2, 1.5, True, "2"])
def test_sizes_are_positive_integers(size: object) -> None:
    with pytest.raises(MeshError, match="axis tp has size"):
        Mesh.build(4, tp=size)  # type: ignore[arg-type]


def test_unknown_axes_and_outside_ranks_are_refused() -> None:
    mesh = Mesh(dp_shard=2)
    with pytest.raises(MeshError, match="unknown mesh axis 'dp'"):
        mesh.group("dp", 0)
    with pytest.raises(MeshError, match="rank 2 is outside the world of 2"):
        mesh.coordinate(2)
    with pytest.raises(MeshError, match="position 2 is outside axis dp_shard of size 2"):
        mesh.rank({"dp_shard": 2})
    assert isinstance(MeshError("x"), ValueError)


def test_the_ranks_that_share_a_model_are_in_the_order_of_the_mesh() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert mesh.data_parallel_group(0) == mesh.data_parallel_group(6) == (0, 2, 4, 6)
    assert mesh.data_parallel_group(11) == (9, 11, 13, 15)
    assert [mesh.data_parallel_rank(rank) for rank in mesh.data_parallel_group(9)] == [0, 1, 2, 3]


def test_inner_groups_are_runs_of_neighbours_on_dp_shard() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=6)
    assert mesh.inner_group(0, 2) == (0, 1)
    assert mesh.inner_group(5, 3) == (3, 4, 5)
    assert mesh.inner_group(9, 2) == (8, 9)
    with pytest.raises(MeshError, match="inner groups of 4 ranks do not divide dp_shard=6"):
        mesh.inner_group(0, 4)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=4, ep=2), Mesh(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4)])
def test_ranks_with_the_same_experts_and_those_with_other_ones_make_up_a_shard_group(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        same, others = mesh.expert_shard_group(rank), mesh.inner_group(rank, mesh.ep)
        assert set(same) & set(others) == {rank}
        assert len(same) * len(others) == mesh.shard_size
        assert {other for each in same for other in mesh.inner_group(each, mesh.ep)} == set(mesh.shard_group(rank))
        assert all(mesh.expert_shard_group(other) == same for other in same)
    assert Mesh(dp_shard=4, ep=2).expert_shard_group(3) == (1, 3)
    assert str(Mesh(dp_shard=4, ep=2)) == "dp_shard=4 (ep=2)"


def test_experts_are_divided_over_ranks_that_share_parameters_only() -> None:
    with pytest.raises(MeshError, match=r"ep=4 does not divide the dp_shard=2 \* cp=1 = 2 ranks.*\n.*one of 1, 2"):
        Mesh.build(4, dp_replicate=2, ep=4)
    with pytest.raises(MeshError, match="axis ep has size 0"):
        Mesh(ep=0)
