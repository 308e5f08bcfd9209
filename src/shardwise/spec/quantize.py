"""Weights and gradients in fewer bytes: the forms there are, and what they take.

``int8``: blocks of ``BLOCK_NUMEL`` elements in the flat order of memory. A block is its largest absolute value ``a``,
in the dtype of the elements, and a code ``q`` from -127 to 127 for each: ``x`` is kept as ``q = round(127 x / a)`` and
read as ``a q / 127``, off by at most ``a / 254`` and the rounding of that dtype. ``a`` itself is read back exactly, so
quantizing what was read gives the same codes again: nothing is lost a second time, in whatever layout. Parameters and
slices begin at multiples of a block: blocks do not depend on the number of ranks.

``bf16``: a plain cast.

Packed, a slice is its codes, then the values ``a``, filled up to ``ALIGN_BYTES``.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.errors import PlanError
from shardwise.spec.layout import ALIGN_BYTES, round_up
from shardwise.spec.precision import item_bytes

#: Elements that share one scale.
BLOCK_NUMEL = 128

#: What a plan may say of each kind of quantization.
FROZEN_FORMS = ("none", "int8", "bf16")


def packed_bytes(numel: int, form: str, dtype: str) -> int:
    """Bytes of ``numel`` elements of ``dtype`` in a form. ``numel`` is a multiple of ``BLOCK_NUMEL``."""
    if form == "bf16":
        return round_up(numel * item_bytes("bf16"), ALIGN_BYTES)
    assert form == "int8"
    assert numel % BLOCK_NUMEL == 0
    return round_up(numel + numel // BLOCK_NUMEL * item_bytes(dtype), ALIGN_BYTES)


@dataclass(frozen=True)
class Quantization:
    """What of a plan is quantized.

    Attributes:
        frozen: Form in which frozen linear weights are held and gathered.
    """

    frozen: str = "none"

    def __post_init__(self) -> None:
        if self.frozen not in FROZEN_FORMS:
            shown = ", ".join(map(repr, FROZEN_FORMS))
            raise PlanError(
                f"quantize_frozen={self.frozen!r}: expected one of {shown}.\n  Set quantize_frozen to one of them."
            )


#: Nothing is quantized.
NO_QUANTIZATION = Quantization()
