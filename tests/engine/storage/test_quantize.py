"""int8 blocks: how far off, the same again, and whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.engine.storage.packed import empty_packed, pack, unpack
from shardwise.spec.errors import PlanError
from shardwise.spec.quantize import BLOCK_NUMEL, Quantization, packed_bytes

CPU = torch.device("cpu")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def through(values: Tensor, form: str = "int8") -> tuple[Tensor, Tensor]:
    """The packed bytes of ``values``, and what is read from them."""
    packed = empty_packed(values.numel(), form, values.dtype, CPU)
    pack(values, packed, form)
    read = torch.full_like(values, 7.0)
    unpack(packed, read, form, values.dtype)
    return packed, read


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """A few blocks of any dtype, of any magnitude from the smallest subnormals on, with zeros among them."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        exponent = draw(st.floats(math.log2(info.smallest_normal) - 12, math.log2(info.max) - 1))
        row = torch.rand(BLOCK_NUMEL, generator=generator, dtype=torch.float64) * 2 - 1
        row *= torch.rand(BLOCK_NUMEL, generator=generator) < draw(st.sampled_from([0.0, 0.1, 1.0]))
        rows.append((row * 2.0**exponent).to(dtype))
    return torch.cat(rows)


@given(blocks())
def test_what_is_read_is_near_and_quantizing_it_again_changes_nothing(values: Tensor) -> None:
    packed, read = through(values)
    largest = values.view(-1, BLOCK_NUMEL).abs().amax(dim=1, keepdim=True).double()
    off = (values.double() - read.double()).abs().view(-1, BLOCK_NUMEL)
    info = torch.finfo(values.dtype)
    rounding = torch.maximum(largest * info.eps, torch.tensor(info.smallest_normal * info.eps, dtype=torch.float64))
    work_eps = 1e-15 if values.dtype is torch.float64 else 1e-6
    assert (off <= largest / 254 * (1 + 254 * work_eps) + rounding / 2).all()
    assert torch.equal(read.view(-1, BLOCK_NUMEL).abs().amax(dim=1), largest.squeeze(1).to(values.dtype))
    again, read_again = through(read)
    assert torch.equal(again, packed)
    assert torch.equal(read_again, read)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_code_of_every_scale_survives(dtype: torch.dtype) -> None:
    """All 255 codes, under 500 largest values with digits of their own."""
    codes = torch.cat([torch.arange(-127, 128), torch.tensor([0])])  # two blocks; each needs its largest value
    codes = torch.stack([codes[:BLOCK_NUMEL], codes[BLOCK_NUMEL:]])
    scales = torch.logspace(-3, 3, 500, dtype=torch.float64).to(dtype)
    for scale in scales:
        values = (codes.double() * (scale.double() / 127)).to(dtype)
        values[0, 0], values[1, -2] = -scale, scale
        packed, read = through(values.view(-1))
        assert torch.equal(packed[: codes.numel()].view(torch.int8), codes.view(-1).to(torch.int8))
        assert torch.equal(through(read)[0], packed)


def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not_touched() -> None:
    values = torch.randn(3 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(0))
    expected = through(values)[1]
    for bad in (float("inf"), float("-inf"), float("nan")):
        spoilt = values.clone()
        spoilt[BLOCK_NUMEL + 5] = bad
        read = through(spoilt)[1].view(3, -1)
        assert read[1].isnan().all()
        assert torch.equal(read[0], expected.view(3, -1)[0])
        assert torch.equal(read[2], expected.view(3, -1)[2])


def test_cuts_between_blocks_do_not_matter() -> None:
    values = torch.randn(64 * 1024, generator=torch.Generator().manual_seed(1))  # more than is worked on at a time
    whole = through(values)[1]
    cut = 37 * BLOCK_NUMEL
    assert torch.equal(torch.cat([through(values[:cut])[1], through(values[cut:])[1]]), whole)


def test_reading_into_another_dtype_rounds_to_the_first_one_before() -> None:
    values = torch.randn(BLOCK_NUMEL, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed, read = through(values)
    wide = torch.empty(BLOCK_NUMEL)
    unpack(packed, wide, "int8", torch.bfloat16)
    assert torch.equal(wide, read.float())


def test_bf16_is_a_cast() -> None:
    values = torch.randn(BLOCK_NUMEL, generator=torch.Generator().manual_seed(3))
    packed, read = through(values, "bf16")
    assert torch.equal(read, values.bfloat16().float())
    assert torch.equal(through(read, "bf16")[0], packed)


def test_bytes() -> None:
    assert packed_bytes(1024, "int8", "fp32") == 1024 + 8 * 4 + 224  # to a multiple of 256
    assert packed_bytes(1 << 20, "int8", "fp32") == (1 << 20) * (1 + 4 / 128)
    assert packed_bytes(1 << 20, "int8", "bf16") == (1 << 20) * (1 + 2 / 128)
    assert packed_bytes(1 << 20, "bf16", "fp32") == 2 << 20
    assert packed_bytes(0, "int8", "fp32") == 0
    assert through(torch.randn(1024))[0].numel() == packed_bytes(1024, "int8", "fp32")


def test_an_unknown_form_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"quantize_frozen='int4': expected one of 'none', 'int8', 'bf16'"):
        Quantization(frozen="int4")
