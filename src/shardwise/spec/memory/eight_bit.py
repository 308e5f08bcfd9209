"""Optimizer state of ``torchao.optim.AdamW8bit`` for a parameter (github.com/pytorch/ao, ``torchao/optim``).

If a rank's piece of a parameter has at least 4,096 elements and consists of complete blocks, both moments are codes of
one byte, with an fp32 scale for each block and a table of the 256 values of a code. Other state is in fp32.
"""

from __future__ import annotations

#: Elements that share a scale, the optimizer's default.
BLOCK = 256
#: Parameters with fewer elements have state in fp32.
LEAST = 4096
_TABLE_BYTES = 4 * 256

#: State of a large parameter, as a number of fp32 tensors of the parameter's size.
TENSORS = 2 * (1 + 4 / BLOCK) / 4


def eight_bit_bytes(_name: str, numel: int, item: int) -> int:
    """Bytes of the state of a parameter, a ``spec.memory.footprint.StateBytes``."""
    if numel < LEAST or numel % BLOCK:
        return 2 * numel * item + 4
    return 2 * (numel + 4 * (numel // BLOCK) + _TABLE_BYTES) + 4
