"""Short linear summaries of tensors, and the parts of a tensor that a rank may have.

A sketch is a tensor's product with :data:`SIZE` fixed random directions. Equal tensors have bitwise equal sketches.
Otherwise the root mean square of the sketches' difference estimates the norm of the tensors' difference (Johnson and
Lindenstrauss). Sketches are linear: the sketch of a sum is the sum of the sketches. So ranks can find out that their
tensors are terms of a sum without sending a tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.dtype import as_real
from shardwise.spec.slice import even_ranges
from shardwise.spec.styles import near_even_range
from shardwise.spec.traffic.context import own_ranges, padded_length

#: Numbers in a sketch.
SIZE = 16
#: Length of the directions. Each row of so many elements uses the same directions with different signs.
_ROW = 4096
#: Rows that are converted to fp64 at a time.
_NUM_ROWS = 256


def sketch(tensor: Tensor) -> Tensor:
    """The sketch of a tensor, fp64, on its device: (SIZE,)."""
    flat = as_real(tensor.detach()).reshape(-1)
    directions = _directions(flat.device)
    signs = _signs(flat.numel() // _ROW + 1, flat.device)
    total = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
    whole = flat.numel() // _ROW
    for start in range(0, whole, _NUM_ROWS):
        stop = min(start + _NUM_ROWS, whole)
        rows = flat[start * _ROW : stop * _ROW].double().view(-1, _ROW)
        total += (rows @ directions * signs[start:stop]).sum(0)
    tail = flat[whole * _ROW :].double()
    return total + tail @ directions[: tail.numel()] * signs[whole]


def distance(left: Tensor, right: Tensor) -> float:
    """An estimate of the norm of the difference of two tensors, from their sketches."""
    return (left - right).square().mean().sqrt().item()


@functools.lru_cache(maxsize=4)
def _directions(device: torch.device) -> Tensor:
    return torch.randn(_ROW, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)


@functools.lru_cache(maxsize=64)
def _signs(count: int, device: torch.device) -> Tensor:
    drawn = torch.randint(0, 2, (count, SIZE), generator=torch.Generator().manual_seed(2))
    return (2 * drawn - 1).double().to(device)


@dataclass(frozen=True)
class Part:
    """A part of a tensor, and the division that gives it to a rank.

    Attributes:
        label: Description for messages; empty for the full tensor.
        axis: The mesh axes that divide the tensor, joined by ``x``.
        places: Positions of the part by dimension.
    """

    label: str = ""
    axis: str = ""
    places: tuple[tuple[int, Tensor], ...] = ()

    def take(self, whole: Tensor) -> Tensor:
        """The part of ``whole``."""
        for dim, places in self.places:
            whole = whole.index_select(dim, places.to(whole.device))
        return whole


def parts(whole: Sequence[int], shape: Sequence[int], at: Mapping[str, tuple[int, int]]) -> list[Part]:
    """The parts with ``shape`` of a tensor with shape ``whole`` in one process that a rank may have.

    ``at`` has the size of each axis, and the rank's position on it. The result is the full tensor if the shapes are
    equal, and empty if no division of dimensions explains ``shape``.
    """
    if tuple(whole) == tuple(shape):
        return [Part()]
    if len(whole) != len(shape):  # a plan may only have flattened dimensions
        return [Part()] if math.prod(whole) == math.prod(shape) else []
    divided = [dim for dim, (size, own) in enumerate(zip(whole, shape, strict=True)) if size != own]
    choices = [list(_divisions(dim, whole[dim], shape[dim], at)) for dim in divided]
    return [
        Part(
            ", ".join(label for label, _, _ in chosen),
            " x ".join(dict.fromkeys(axis for _, axis, _ in chosen)),
            tuple((dim, places) for dim, (_, _, places) in zip(divided, chosen, strict=True)),
        )
        for chosen in itertools.islice(itertools.product(*choices), 64)
    ]


def _divisions(dim: int, size: int, own: int, at: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, str, Tensor]]:
    """Label, axis and positions of every way in which axes leave ``own`` of ``size`` positions to this rank."""
    tp, tp_rank = at.get("tp", (1, 0))
    cp, cp_rank = at.get("cp", (1, 0))
    everything = torch.arange(size)
    if tp > 1:
        if own * tp == size:
            for blocks in (blocks for blocks in range(1, 9) if size % (blocks * tp) == 0):
                packed = f" of each of {blocks} blocks" if blocks > 1 else ""
                ranges = even_ranges(size, tp, tp_rank, blocks=blocks)
                yield f"dim {dim} by tp{packed}", "tp", torch.cat([everything[a:b] for a, b in ranges])
        else:
            start, stop = near_even_range(size, tp, tp_rank)
            if stop - start == own:
                yield f"dim {dim} by tp, unevenly", "tp", everything[start:stop]
        groups = size // own if own and size % own == 0 else 0  # heads that several ranks have
        if 1 < groups < tp and tp % groups == 0:
            start = tp_rank // (tp // groups) * own
            yield f"dim {dim} by tp, in copies", "tp", everything[start : start + own]
    if cp > 1 and size == padded_length(size, cp):  # with padding, ranks' tensors differ from one process
        places = torch.cat([everything[start:stop] for start, stop in own_ranges(size, cp, cp_rank)])
        if own == len(places):
            yield f"dim {dim} by cp", "cp", places
        elif own * tp == len(places):
            yield f"dim {dim} by cp and tp", "cp x tp", places[tp_rank * own : (tp_rank + 1) * own]
