"""Small units travel together: neighbours of one chain and kind, up to a limit, in parts of about equal size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.module_chain import LEAST_UNITS, MERGED_BYTES, Mergeable, default_limit, merge, merged_name


def chain(*sizes: int, name: str = "blocks", kind: object = "fp32") -> list[Mergeable]:
    return [Mergeable(f"{name}.{index}", name, kind, size) for index, size in enumerate(sizes)]


def lengths(parts: list[tuple[str, ...]]) -> list[int]:
    return [len(part) for part in parts]


UNITS = st.lists(
    st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from(["fp32", "bf16"]), st.integers(0, 50)), max_size=30
).map(lambda rows: [Mergeable(f"{chain}.{i}", chain, kind, size) for i, (chain, kind, size) in enumerate(rows)])


@given(UNITS, st.integers(0, 200))
def test_every_unit_is_in_one_part_in_order_and_no_part_crosses_chains_or_kinds_or_exceeds_the_limit(units, limit):
    by_name = {unit.name: unit for unit in units}
    parts = merge(units, limit)
    assert [name for part in parts for name in part] == [unit.name for unit in units]
    for part in parts:
        members = [by_name[name] for name in part]
        assert len(members) == 1 or sum(unit.num_bytes for unit in members) <= limit
        assert len({(unit.chain, unit.kind) for unit in members}) == 1
        assert len(members) == 1 or members[0].chain is not None


@given(st.integers(1, 60), st.integers(1, 100), st.integers(1, 2000))
def test_units_of_one_size_make_parts_of_one_size_and_at_most_one_rest(count, size, limit):
    found = lengths(merge(chain(*[size] * count), limit))
    assert len(set(found[:-1])) <= 1
    assert found[-1] <= found[0]
    assert max(found) * size <= max(limit, size)


def test_without_a_limit_every_unit_stays_by_itself():
    assert lengths(merge(chain(1, 1, 1), 0)) == [1, 1, 1]
    assert merge([], 100) == []


def test_a_large_unit_stays_alone_between_small_ones():
    assert lengths(merge(chain(10, 10, 90, 10, 10), 50)) == [2, 1, 2]


def test_the_host_case_of_48_blocks_becomes_8_units_of_6():
    block, root = 199_936, 135_680
    assert lengths(merge(chain(*[block] * 48), default_limit(48 * block + root))) == [6] * 8


@pytest.mark.parametrize("count", [1, 2, 5, 8, 15])
def test_a_model_of_few_blocks_is_not_merged_by_default(count):
    assert lengths(merge(chain(*[1000] * count), default_limit(1000 * count))) == [1] * count


def test_by_default_no_merged_unit_is_larger_than_a_part_of_the_model_or_a_fixed_number_of_bytes():
    assert default_limit(LEAST_UNITS * 1000) == 1000
    assert default_limit(1 << 40) == MERGED_BYTES
    for count, size in itertools.product((16, 48, 200), (1000, 50_000, 3_000_000)):
        parts = merge(chain(*[size] * count), default_limit(count * size))
        assert len(parts) >= LEAST_UNITS
        assert max(lengths(parts)) * size <= max(MERGED_BYTES, size)


def test_on_cuda_units_are_merged_further_the_more_ranks_pass_slices_round():
    limits = [default_limit(1 << 40, device_type="cuda", num_ranks=ranks) for ranks in (1, 2, 8, 64)]
    assert limits == [MERGED_BYTES, MERGED_BYTES, 8 << 20, 64 << 20]
    assert default_limit(1 << 24, device_type="cuda", num_ranks=64) == (1 << 24) // LEAST_UNITS


def test_a_merged_unit_is_named_by_its_first_and_last():
    assert merged_name(["blocks.3"]) == "blocks.3"
    assert merged_name(["blocks.3", "blocks.4", "blocks.5"]) == "blocks.3-5"
    assert merged_name(["features.conv1", "features.conv2"]) == "features.conv1-conv2"
