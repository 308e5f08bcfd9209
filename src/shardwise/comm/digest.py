"""Digests of tensors, computed on their device: two numbers of 64 bits that detect different contents.

The bytes are read as words of 64 bits, in rows of ``ROW_WORDS``. A row is reduced to two sums modulo 2**64: the sum of
its words, each times an odd random factor of its position, and the same sum of the upper halves of its words. (In a
product modulo 2**64 only the lower half of a word is multiplied by all bits of the factor.) The sums are reduced in the
same way, until one row is left.

Integer sums are exact in every order, so that a digest is the same on every device. A single changed bit always changes
the sums of its row. Different contents, also permuted ones, have the same digest with a probability of about 2**-32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise.comm.dtype import memory_order
from shardwise.spec.layout import is_dense

ROW_WORDS = 1 << 14
#: Rows per operation: on a CPU they fit into the cache; other devices need few launches, and 32 MB of products.
_ROWS_ON_CPU, _ROWS_ON_DEVICE = 4, 256
_LAST_LEVEL = 8  # level of the sums over tensors


def digest_of(tensors: Sequence[Tensor]) -> Tensor:
    """Compute one digest, as :meth:`Digester.of`."""
    return Digester().of(tensors)


class Digester:
    """Computes digests. Stores the random factors, 128 KiB for each level and device."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
        """Compute two int64 numbers from the contents, dtypes and sizes of ``tensors``.

        Args:
            tensors: The tensors; their order matters.
            device: Device of the result; by default that of the tensors, so that the host does not wait.
        """
        non_empty = [tensor.detach() for tensor in tensors if tensor.numel()]
        header = hashlib.blake2b(repr([(tensor.dtype, tensor.numel()) for tensor in non_empty]).encode(), digest_size=8)
        target = device or (non_empty[0].device if non_empty else torch.device("cpu"))
        total = torch.zeros(2, dtype=torch.int64, device=target)
        if non_empty:
            sums = torch.cat([self._sums(_words(tensor), tensor.device, 0).to(target) for tensor in non_empty])
            total = self._sums(sums.split(ROW_WORDS), target, _LAST_LEVEL)
        return total + int.from_bytes(header.digest(), signed=True)

    def _sums(self, pieces: Iterable[Tensor], device: torch.device, level: int) -> Tensor:
        key = level, device
        if key not in self._tables:
            self._tables[key] = _table(level).to(device)
        table = self._tables[key]
        found: list[Tensor] = []
        for words in pieces:
            num_whole = words.numel() // ROW_WORDS * ROW_WORDS
            for part in (words[:num_whole].view(-1, ROW_WORDS), words[num_whole:].view(1, -1)):
                if part.numel():
                    factors = table[: part.shape[1]]
                    found.append(
                        torch.stack([_products(part, factors), _products(part >> 32, factors)], dim=1).view(-1)
                    )
        sums = torch.cat(found)
        return sums if sums.numel() == 2 else self._sums(sums.split(ROW_WORDS), device, level + 1)


def _words(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the memory of a tensor as words, in pieces of full rows; the last word is padded with zeros."""
    data = memory_order(tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()).view(torch.uint8)
    is_aligned = data.storage_offset() % 8 == 0
    rows = _ROWS_ON_CPU if data.device.type == "cpu" else _ROWS_ON_DEVICE
    for piece in data.split(rows * ROW_WORDS * 8):
        num_left = piece.numel() % 8
        whole = piece[: piece.numel() - num_left]
        if whole.numel():
            yield (whole if is_aligned else whole.clone()).view(torch.int64)
        if num_left:
            last = torch.zeros(8, dtype=torch.uint8, device=data.device)
            last[:num_left] = piece[-num_left:]
            yield last.view(torch.int64)


def _products(rows: Tensor, factors: Tensor) -> Tensor:
    """Compute ``rows @ factors`` modulo 2**64; CUDA has no integer matrix product."""
    return torch.mv(rows, factors) if rows.device.type == "cpu" else (rows * factors).sum(dim=1)


def _table(level: int) -> Tensor:
    generator = torch.Generator().manual_seed(level)
    limit = 1 << 62
    return torch.randint(-limit, limit, (ROW_WORDS,), dtype=torch.int64, generator=generator) * 2 + 1
