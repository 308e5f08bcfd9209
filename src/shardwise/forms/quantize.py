"""Flat tensors to packed bytes and back: the arithmetic of ``spec.quantize``.

Every operation is a division, product or rounding of single elements, so the result is the same on every rank and for
every cut at block boundaries. ``127 * (1 / 127)`` is exactly 1 in fp32 and in fp64: reading multiplies by the
reciprocal, which kernels do alike everywhere, and gives back the largest value of a block as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.comm.dtype import dtype_name
from shardwise.spec.quantize import BLOCK_NUMEL, packed_bytes

#: Elements that are worked on at a time: temporaries stay in a CPU's cache, and small beside a slot on a GPU.
_CHUNK_NUMEL = {"cpu": 1 << 15, "cuda": 1 << 22}


def empty_packed(numel: int, form: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bytes for ``numel`` elements of ``dtype``."""
    return torch.zeros(packed_bytes(numel, form, dtype_name(dtype)), dtype=torch.uint8, device=device)


def pack(source: Tensor, packed: Tensor, form: str) -> None:
    """Quantize ``source`` (flat, a multiple of a block) into ``packed``.

    A block with an inf or nan in it is read back as nan throughout.
    """
    if form == "bf16":
        packed.view(torch.bfloat16)[: source.numel()].copy_(source)
        return
    if not source.numel():
        return  # no bytes: they may begin anywhere, also where no scale could
    codes, scales = _split(packed, source.numel(), source.dtype)
    work = torch.float64 if source.dtype is torch.float64 else torch.float32
    for part in _parts(source):
        values = source[part].view(-1, BLOCK_NUMEL).to(work)
        largest = values.abs().amax(dim=1, keepdim=True)
        scales[part.start // BLOCK_NUMEL : part.stop // BLOCK_NUMEL].copy_(largest.squeeze(1))
        scaled = values.div_(largest) if values.data_ptr() != source[part].data_ptr() else values / largest
        # A block of zeros has become nan, as has one with an inf: its codes are 0.
        codes[part].view(-1, BLOCK_NUMEL).copy_(scaled.mul_(127).round_().nan_to_num_(0.0))


def unpack(packed: Tensor, target: Tensor, form: str, dtype: torch.dtype) -> None:
    """Read what :func:`pack` made of elements of ``dtype`` into ``target``: rounded to ``dtype``, then cast."""
    if form == "bf16":
        target.copy_(packed.view(torch.bfloat16)[: target.numel()])
        return
    if not target.numel():
        return
    codes, scales = _split(packed, target.numel(), dtype)
    for part in _parts(target):
        target[part].view(-1, BLOCK_NUMEL).copy_(_read(codes, scales, part).to(dtype))


def _read(codes: Tensor, scales: Tensor, part: slice) -> Tensor:
    """A range of blocks in the dtype that is computed in, one row each."""
    work = torch.float64 if scales.dtype is torch.float64 else torch.float32
    largest = scales[part.start // BLOCK_NUMEL : part.stop // BLOCK_NUMEL].to(work)
    return codes[part].view(-1, BLOCK_NUMEL).to(work).mul_(1 / 127).mul_(largest.unsqueeze(1))


def sum_packed(terms: Sequence[Tensor], out: Tensor, dtype: torch.dtype, divisor: float) -> None:
    """Add up int8 blocks of ``dtype`` in order, in fp32 (fp64 for fp64), divide, and round into ``out``."""
    if not out.numel():
        return  # terms of no bytes: they may begin anywhere, also where no scale could
    split = [_split(term, out.numel(), dtype) for term in terms]
    for part in _parts(out):
        total = _read(*split[0], part)
        for codes, scales in split[1:]:
            total += _read(codes, scales, part)
        if divisor != 1:
            total /= divisor
        out[part].view(-1, BLOCK_NUMEL).copy_(total)


def codes_of(packed: Tensor, numel: int, form: str) -> Tensor:
    """One element of ``packed`` for each of the ``numel`` that it stands for: the codes, or the cast values."""
    return packed.view(torch.bfloat16)[:numel] if form == "bf16" else packed[:numel].view(torch.int8)


def _split(packed: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes, and the largest absolute value of every block."""
    num_bytes = numel // BLOCK_NUMEL * dtype.itemsize
    return packed[:numel].view(torch.int8), packed[numel : numel + num_bytes].view(dtype)


def _parts(flat: Tensor) -> Iterator[slice]:
    """Ranges to work on one after the other; none where there are no values."""
    if flat.is_meta:
        return
    step = _CHUNK_NUMEL.get(flat.device.type, 1 << 22)
    for start in range(0, flat.numel(), step):
        yield slice(start, min(start + step, flat.numel()))
