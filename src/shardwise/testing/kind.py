"""Classification of differences between two tensors: how the wrong one could result from the right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.dtype import as_real

#: Kinds of differences, as in messages.
SCALED, MISSING_SUM, DOUBLED_SUM, PERMUTED = "scaled", "missing sum", "doubled sum", "permuted"
SHIFTED, ROUNDING, MISSING, NOT_FINITE, OTHER = "shifted", "rounding", "missing", "not finite", "other"

#: Largest relative differences that rounding to a narrower dtype may cause.
_NARROW = {"bf16": 2.0**-8, "fp16": 2.0**-11}
#: Largest relative difference that rounding of the computing dtype may cause.
_ROUNDING = 1e-5
#: Most slices of a dimension that are compared with each other.
_MAX_SLICES = 2048
#: Largest distance of equal slices, relative to their norm.
_NEAR = 1e-3


class Kind(NamedTuple):
    """The kind of a difference, and a sentence about it."""

    name: str
    text: str


def scaled(factor: float, sizes: Mapping[str, int]) -> tuple[Kind, list[str]]:
    """The kind of a tensor that is wrong by a factor, and the names of the ``sizes`` that equal the factor."""
    for how, value in ((" times", factor), ("/", 1 / factor)):
        names = [name for name, size in sizes.items() if size > 1 and abs(value - size) < 1e-2 * size]
        if names:
            size = sizes[names[0]]
            shown = f"{size} times" if how == " times" else f"1/{size} of"
            done = "summed" if how == " times" else "divided"
            text = f"{shown} that of one process, and {size} is the size of {' and of '.join(names)}"
            return Kind(SCALED, f"{text}: {done} once too often"), names
    return Kind(SCALED, f"{factor:.4g} times that of one process"), []


def of_tensors(got: Tensor, part: Tensor, whole: Tensor, tables: Sequence[tuple[str, Tensor]]) -> Kind:
    """The kind of the difference between a rank's tensor ``got`` and the right one, the ``part`` of ``whole``.

    ``tables`` are parameters of the module, by name.
    """
    got, part, whole = (_real(tensor) for tensor in (got, part, whole))
    if torch.equal(got, part):
        return Kind(OTHER, "equal in a second run of the step: memory that nobody wrote, or a race")
    if not got.isfinite().all():
        return Kind(NOT_FINITE, "not finite")
    if not got.any():
        return Kind(MISSING, "zero, or no gradient at all")
    relative = ((got - part).norm() / part.norm().clamp_min(1e-300)).item()
    shown = f"{relative:.1e} of the norm"
    if relative < _ROUNDING:
        return Kind(ROUNDING, shown)
    return (
        _counted(got - part, tables)
        or _moved(got, part, whole)
        or _moved_rows(got, part, tables)
        or _narrow(got, relative, shown)
        or _by_rows(got, part)
        or Kind(OTHER, f"{shown}, in no pattern that is known")
    )


def _real(tensor: Tensor) -> Tensor:
    return as_real(tensor).detach().double().cpu()


def _narrow(got: Tensor, relative: float, shown: str) -> Kind | None:
    """A difference that rounding to 16 bits may cause."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if torch.equal(got.to(dtype).double(), got) and relative < 16 * _NARROW[name]:
            return Kind(ROUNDING, f"rounded to {name}: {shown}")
    if relative < _NARROW["bf16"]:
        near = "bf16" if relative > _NARROW["fp16"] else "fp16"
        return Kind(ROUNDING, f"{shown}, as if computed in {near}")
    return None


def _counted(gap: Tensor, tables: Sequence[tuple[str, Tensor]]) -> Kind | None:
    """A difference that is the same multiple of a bias in all rows."""
    for name, table in ((name, _real(table)) for name, table in tables if table.dim() == 1):
        if gap.shape[-1:] != table.shape or not table.any():
            continue
        factor = (gap @ table / (table @ table)).mean()
        if (gap - factor * table).norm() < _NEAR * gap.norm():
            return Kind(DOUBLED_SUM, f"{name} is in it {factor.item() + 1:.3g} times in place of once")
    return None


def _moved(got: Tensor, part: Tensor, whole: Tensor) -> Kind | None:
    """Right slices at wrong places."""
    if got.dim() != whole.dim():
        return None
    for dim in range(got.dim()):
        others = [size for d, size in enumerate(whole.shape) if d != dim]
        source = whole if [size for d, size in enumerate(got.shape) if d != dim] == others else part
        if max(got.shape[dim], source.shape[dim]) > _MAX_SLICES or source.shape[dim] < 2:
            continue
        expected, found = _places(part, source, dim), _places(got, source, dim)
        if (found < 0).any() or (expected < 0).any() or torch.equal(expected, found):
            continue
        return _named(expected, found, dim)
    return None


def _named(expected: Tensor, found: Tensor, dim: int) -> Kind:
    is_wrong = expected != found
    offsets = (found - expected)[is_wrong].unique()
    which = f"{int(is_wrong.sum())} of {len(found)} slices of dim {dim}"
    if len(offsets) == 1:
        return Kind(SHIFTED, f"{which} are those {abs(int(offsets)):d} {'further' if offsets > 0 else 'before'}")
    order = ", ".join(map(str, found[:8].tolist())) + (", ..." if len(found) > 8 else "")
    if set(found.tolist()) == set(expected.tolist()):
        return Kind(PERMUTED, f"{which} are at other places: {order}")
    return Kind(SHIFTED, f"{which} are others of the whole tensor: {order}")


def _places(some: Tensor, source: Tensor, dim: int) -> Tensor:
    """The index in ``source`` of each slice of ``some`` along ``dim``; -1 if there is none, or several."""
    left, right = (each.movedim(dim, 0).reshape(each.shape[dim], -1) for each in (some, source))
    gaps = torch.cdist(left, right)
    allowed = _NEAR * left.norm(dim=1, keepdim=True).clamp_min(1e-300)
    is_near = gaps <= allowed
    return torch.where(is_near.sum(1) == 1, gaps.argmin(1), -1)


def _moved_rows(got: Tensor, part: Tensor, tables: Sequence[tuple[str, Tensor]]) -> Kind | None:
    """Rows of a table (an embedding) that belong to different ids."""
    for name, table in tables:
        if table.dim() != 2 or got.dim() < 2 or got.shape[-1:] != table.shape[-1:] or len(table) > _MAX_SLICES:
            continue
        rows, right = got.flatten(0, -2), part.flatten(0, -2)
        is_wrong = (rows - right).norm(dim=1) > _NEAR * right.norm(dim=1)
        is_zero = is_wrong & ~rows.any(dim=1)
        is_moved = is_wrong & ~is_zero
        if not is_wrong.any():
            continue
        zero = f"{int(is_zero.sum())} of {len(rows)} rows are zero"
        if not is_moved.any():
            return Kind(MISSING, zero)
        found, expected = (_places(each[is_moved], _real(table), 0) for each in (rows, right))
        if (expected < 0).any() or (found < 0).any():
            continue
        offsets = ", ".join(map(str, (found - expected).unique().tolist()))
        text = f"{int(is_moved.sum())} of {len(rows)} rows are those of other ids of {name}, moved by {offsets}"
        return Kind(SHIFTED, f"{text}; {zero}" if is_zero.any() else text)
    return None


def _by_rows(got: Tensor, part: Tensor) -> Kind | None:
    """Rows with a factor each, or of which only some are wrong."""
    if got.dim() < 2:
        return None
    rows, right = got.flatten(0, -2), part.flatten(0, -2)
    is_wrong = (rows - right).norm(dim=1) > _NEAR * right.norm(dim=1)
    some, others = rows[is_wrong], right[is_wrong]
    which = f"{int(is_wrong.sum())} of {len(rows)} rows"
    if not some.any():
        return Kind(MISSING, f"{which} are zero")
    if rows.shape[1] > 1:
        factors = (some * others).sum(1) / others.square().sum(1).clamp_min(1e-300)
        if ((some - factors[:, None] * others).norm(dim=1) < 1e-2 * some.norm(dim=1)).all():
            return Kind(SCALED, f"{which} are scaled, by {factors.min().item():.3g} to {factors.max().item():.3g}")
    if is_wrong.all():
        return None
    return Kind(OTHER, f"{which} differ")
