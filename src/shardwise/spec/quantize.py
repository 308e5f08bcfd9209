"""Quantized weights and gradients: the forms, and their sizes in bytes.

``int8``: blocks of ``BLOCK_NUMEL`` elements in the flat order of memory. A block is stored as its largest absolute
value ``a``, in the dtype of the elements, and a code ``q`` from -127 to 127 for each element. ``x`` is stored as
``q = round(127 x / a)`` and read as ``a q / 127``, off by at most ``a / 254`` plus the rounding of that dtype. ``a`` is
read back exactly, so quantizing the values that were read gives the same codes again. Parameters and slices begin at
multiples of a block, so blocks do not depend on the number of ranks.

``bf16``: a plain cast.

In a sum over N ranks each rank quantizes its gradients, and they are added in fp32. The mean is off by at most
``(a_0 + ... + a_(N-1)) / 254 N``, where ``a_r`` is the largest absolute value of rank r's block.

A packed slice consists of its codes and then the values ``a``, padded to a multiple of ``ALIGN_BYTES``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shardwise.spec.errors import PlanError
from shardwise.spec.granularity import round_up
from shardwise.spec.layout import ALIGN_BYTES, ReduceLayout
from shardwise.spec.precision import item_bytes

#: Elements that share one scale.
BLOCK_NUMEL = 128

#: Legal values of the plan's fields.
FROZEN_FORMS = ("none", "int8", "bf16")
SENT_FORMS = ("none", "int8")


def packed_bytes(numel: int, form: str, dtype: str) -> int:
    """Bytes of ``numel`` elements of ``dtype`` in a form. ``numel`` is a multiple of ``BLOCK_NUMEL``."""
    if form == "bf16":
        return round_up(numel * item_bytes("bf16"), ALIGN_BYTES)
    assert form == "int8"
    assert numel % BLOCK_NUMEL == 0
    return round_up(numel + numel // BLOCK_NUMEL * item_bytes(dtype), ALIGN_BYTES)


def packed_bounds(bounds: tuple[int, ...], form: str, dtype: str) -> tuple[int, ...]:
    """Byte offsets of slices that are packed one by one, from their offsets in elements."""
    sizes = (packed_bytes(stop - start, form, dtype) for start, stop in itertools.pairwise(bounds))
    return (0, *itertools.accumulate(sizes))


def summed_bounds(layout: ReduceLayout) -> tuple[int, ...]:
    """Offsets of the parts of a gradient buffer, one for each rank, which sums it over ranks.

    Parts are the slices. If every rank needs the full sum, they are equal parts rounded to blocks.
    """
    size = layout.group.size
    if layout.num_slices == size:
        return layout.bounds
    return tuple(rank * (layout.numel // BLOCK_NUMEL) // size * BLOCK_NUMEL for rank in range(size + 1))


@dataclass(frozen=True)
class Quantization:
    """Quantization in a plan.

    Attributes:
        frozen: Form in which frozen linear weights are stored and gathered.
        gather: Form in which all other parameters are gathered.
        reduce: Form in which gradients are sent.
    """

    frozen: str = "none"
    gather: str = "none"
    reduce: str = "none"

    def __post_init__(self) -> None:
        for field, value, forms in (
            ("quantize_frozen", self.frozen, FROZEN_FORMS),
            ("quantized_gather", self.gather, SENT_FORMS),
            ("quantized_reduce", self.reduce, SENT_FORMS),
        ):
            if value not in forms:
                shown = ", ".join(map(repr, forms))
                raise PlanError(f"{field}={value!r}: expected one of {shown}.\n  Set {field} to one of them.")

    def forms(
        self, *, frozen_as: str, is_float: bool, compute_dtype: str, is_sharded: bool
    ) -> tuple[str | None, str | None, str | None]:
        """The forms in which a group is stored, gathered and reduced; ``None``: in its dtypes, unpacked.

        Args:
            frozen_as: Form in which the group's frozen weights are stored; ``"none"``: their own dtype.
            is_float: The parameters are floating point.
            compute_dtype: Dtype of the gathered buffer.
            is_sharded: The master is sharded, and therefore gathered.
        """
        if frozen_as != "none":  # weights stored in the compute dtype are gathered without packing
            return frozen_as, None if frozen_as == compute_dtype else frozen_as, None
        is_sent_packed = is_float and is_sharded and self.gather != "none"
        is_reduced_packed = is_float and self.reduce != "none"
        return None, self.gather if is_sent_packed else None, self.reduce if is_reduced_packed else None


#: Nothing is quantized.
NO_QUANTIZATION = Quantization()
