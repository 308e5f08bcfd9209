"""Which small units travel together, decided by arithmetic over the model: the same on every rank.

An exchange takes a fixed time however little it carries: between two processes on one machine over Gloo 0.3 ms and
more, in which 1 MB could have been sent. A model of many small blocks therefore waits for messages, not for bytes. Over
NCCL a collective of n ranks passes slices round in n - 1 steps of some microseconds each, however small a slice is.
Blocks that follow one another become one unit: one flat buffer, one gather, one reduction for all of them.

The price is memory: a unit is live as a whole. So large units are left alone, and a model is never cut into fewer than
``LEAST_UNITS`` pieces of equal size: the live units stay the same small part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Units are merged up to this many bytes of parameters: over Gloo a message of that size takes several times the fixed
#: cost.
MERGED_BYTES = 1 << 21

#: On CUDA they are merged up to this many bytes for each rank, if that is more: at 50 GB/s a slice of that size takes
#: 20 microseconds, a few times a step's fixed cost.
MERGED_SLICE_BYTES = 1 << 20

#: A merged unit holds at most this part of the model's parameters.
LEAST_UNITS = 8


@dataclass(frozen=True, slots=True)
class Mergeable:
    """A unit that may be merged with those beside it.

    Attributes:
        name: Its qualified name.
        chain: The chain of modules that it is a member of; only members of one chain are merged, in their order.
            ``None``: it stays alone (it encloses other units, or may be left out by a rank).
        kind: What its groups are (dtypes, trainability): units of different kinds are not merged, so that each group
            of the merged unit holds something of every member.
        num_bytes: Of its parameters.
    """

    name: str
    chain: str | None
    kind: object
    num_bytes: int


def default_limit(total_bytes: int, *, device_type: str = "cpu", num_ranks: int = 1) -> int:
    """The most bytes of a merged unit in a model with ``total_bytes`` of parameters.

    Args:
        total_bytes: Of all parameters.
        device_type: Of the device that computes.
        num_ranks: Ranks over which a unit is sharded.
    """
    worthwhile = MERGED_BYTES if device_type == "cpu" else max(MERGED_BYTES, MERGED_SLICE_BYTES * num_ranks)
    return min(worthwhile, total_bytes // LEAST_UNITS)


def merge(units: Sequence[Mergeable], limit: int) -> list[tuple[str, ...]]:
    """The names of the units that travel together, each unit in exactly one tuple, in order.

    Runs of neighbours are cut into as few parts of at most ``limit`` bytes as they need, of about equal size: units of
    one size share slots.
    """
    merged: list[tuple[str, ...]] = []
    start = 0
    for index, unit in enumerate(units):
        following = units[index + 1] if index + 1 < len(units) else None
        is_end = following is None or unit.chain is None or (unit.chain, unit.kind) != (following.chain, following.kind)
        if is_end:
            merged += _cut(units[start : index + 1], limit)
            start = index + 1
    return merged


def _cut(run: Sequence[Mergeable], limit: int) -> list[tuple[str, ...]]:
    total = sum(unit.num_bytes for unit in run)
    target = -(-total // max(1, -(-total // limit))) if limit > 0 else 0
    parts: list[list[str]] = []
    held = 0
    for unit in run:
        if parts and held < target and held + unit.num_bytes <= limit:
            parts[-1].append(unit.name)
            held += unit.num_bytes
        else:
            parts.append([unit.name])
            held = unit.num_bytes
    return [tuple(part) for part in parts]


def merged_name(names: Sequence[str]) -> str:
    """What a merged unit is called: ``blocks.0-5`` for ``blocks.0`` to ``blocks.5``."""
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1].rpartition('.')[2]}"
