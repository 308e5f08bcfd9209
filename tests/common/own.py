"""What a rank holds of a parameter or gradient."""

from __future__ import annotations

from torch import Tensor


def own(tensor: Tensor) -> Tensor:
    """This rank's elements as a plain tensor over the same memory, under every strategy."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
