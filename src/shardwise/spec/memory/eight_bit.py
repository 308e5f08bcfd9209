"""Optimizer state of ``torchao.optim.AdamW8bit`` for a parameter (github.com/pytorch/ao, ``torchao/optim``).

Both moments are codes of one byte, with a scale in fp32 for each block and a table of the 256 values of a code, where
the parameter (the piece of it on a rank) has at least 4,096 elements and consists of whole blocks. Others are in fp32.
"""

from __future__ import annotations

#: Elements that share a scale, as the optimizer has it by default.
BLOCK = 256
#: Parameters with fewer elements keep their state in fp32.
LEAST = 4096
_TABLE_BYTES = 4 * 256

#: State of a large parameter in tensors of its size in fp32.
TENSORS = 2 * (1 + 4 / BLOCK) / 4


def eight_bit_bytes(_name: str, numel: int, item: int) -> int:
    """Bytes of the state of a parameter, as ``spec.memory.footprint.StateBytes``."""
    if numel < LEAST or numel % BLOCK:
        return 2 * numel * item + 4
    return 2 * (numel + 4 * (numel // BLOCK) + _TABLE_BYTES) + 4
