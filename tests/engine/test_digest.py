"""Digests of tensors tell contents apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.comm import digest
from shardwise.comm.digest import ROW_WORDS, digest_of

#: Bytes: within a word, a row, several rows, several pieces of rows, and with ends that fill no word.
SIZES = (1, 7, 8, 9, 8 * ROW_WORDS - 1, 8 * ROW_WORDS + 3, 8 * ROW_WORDS * 9 + 5)


def content(num_bytes: int) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


def digest_in_python(data: bytes) -> list[int]:
    """Word by word, as the module's docstring says, without the header."""

    def sums(words: list[int], level: int) -> list[int]:
        table = digest._table(level).tolist()
        found = []
        for start in range(0, len(words), ROW_WORDS):
            row = words[start : start + ROW_WORDS]
            terms = [[(word >> shift) * table[place] for place, word in enumerate(row)] for shift in (0, 32)]
            found += [signed(sum(each)) for each in terms]
        return found if len(found) == 2 else sums(found, level + 1)

    padded = data + bytes(-len(data) % 8)
    # What fills no word is a row of its own.
    whole = [int.from_bytes(padded[at : at + 8], "little", signed=True) for at in range(0, len(data) // 8 * 8, 8)]
    assert len(data) % 8 == 0
    return sums(sums(whole, 0), digest._LAST_LEVEL)


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("num_words", [1, 3, ROW_WORDS + 1, 2 * ROW_WORDS])
def test_it_is_the_sum_that_is_described(num_words: int) -> None:
    data = content(8 * num_words)
    found, empty = digest_of([data]), digest_of([torch.zeros_like(data)])
    assert (found - empty).tolist() == [signed(n) for n in digest_in_python(data.numpy().tobytes())]


@given(size=st.sampled_from(SIZES), place=st.integers(0, 1 << 40), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_one_bit_is_seen(size: int, place: int, bit: int) -> None:
    data = content(size)
    before = digest_of([data])
    data[place % size] ^= 1 << bit
    assert not torch.equal(digest_of([data]), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_swapped_elements_are_seen(dtype: torch.dtype) -> None:
    values = torch.zeros(3 * ROW_WORDS, dtype=dtype)
    values[5] = 1
    seen = set()
    for place in (4, 5, 6, 7, 8, ROW_WORDS, ROW_WORDS + 5, 2 * ROW_WORDS + 5):
        values.zero_()
        values[place] = 1
        seen.add(tuple(digest_of([values]).tolist()))
    assert len(seen) == 8


def test_powers_of_two_that_change_places_are_seen() -> None:
    """Their bits differ in a few upper ones, which meet a few lower bits of the factors."""
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(300):
        values = torch.tensor([1.0, 2.0, -1.0, 4.0]).repeat(100)[torch.randperm(400, generator=generator)]
        seen.add(tuple(digest_of([values]).tolist()))
    assert len(seen) == 300


def test_order_dtype_size_and_division_of_tensors_are_seen() -> None:
    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    variants = [[a, b], [b, a], [torch.cat([a, b])], [a], [a.to(torch.float64)], [a.view(torch.int32)], [], [a, a]]
    variants += [[torch.cat([a, torch.zeros(1)])], [torch.zeros(6)], [torch.zeros(7)]]
    assert len({tuple(digest_of(tensors).tolist()) for tensors in variants}) == len(variants)


def test_where_a_tensor_lies_in_its_storage_does_not_matter() -> None:
    values = content(ROW_WORDS * 8 * 5 + 40)
    for offset in (1, 2, 8):
        moved = torch.cat([torch.zeros(offset, dtype=torch.uint8), values])[offset:]
        assert torch.equal(digest_of([moved]), digest_of([values]))
    matrix = torch.randn(30, 20)
    assert torch.equal(digest_of([matrix.t().contiguous().t()]), digest_of([matrix.t().contiguous()]))  # as it lies
    assert torch.equal(digest_of([matrix[:, ::2]]), digest_of([matrix[:, ::2].contiguous()]))


def test_other_devices_sum_otherwise_and_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = content(8 * ROW_WORDS * 9 + 5)
    expected = digest_of([data])
    monkeypatch.setattr(digest, "_products", lambda rows, factors: (rows * factors).sum(dim=1))
    monkeypatch.setattr(digest, "_ROWS_ON_CPU", digest._ROWS_ON_DEVICE)
    assert torch.equal(digest_of([data]), expected)
