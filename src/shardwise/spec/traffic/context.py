"""Context parallelism: how a sequence is divided over the ranks of ``cp``, and the bytes that a step sends there.

A sequence is cut into ``2 * size`` chunks. Rank ``r`` has chunk ``r`` and chunk ``2 * size - 1 - r``: one early and one
late. Under causal attention every rank then has the same work, while with one run of positions for each rank the first
rank would be idle most of the time (Brandon et al., "Striped Attention", arXiv 2311.09431; Llama 3 was trained with
these pairs, arXiv 2407.21783, section 3.3.2). With ``size=2``::

    chunk    0  1  2  3
    rank     0  1  1  0

A query attends to its own rank's keys causally. All queries of a rank attend to the early half of the keys of each
lower rank, and the late half of its queries attends to all keys of each higher rank. So half of the scores with every
other rank's block are computed; the other half is masked.

With n ranks, a layer's forward sends n - 1 blocks, each the keys and values of tokens / n positions. Its backward
sends them again, and n - 1 blocks of gradients, in fp32 if activations have 16 bit. A rank thus sends
``3 (n - 1) * 2 * tokens / n * kv_width`` elements for each layer and step. That grows linearly with the length of the
sequence; the computation of attention, with which sending overlaps, grows with the square of the length.
"""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """The part of a rank's queries that attend to a block, and the keys that they attend to.

    Attributes:
        rows: The queries.
        columns: The keys.
        is_causal: Each query attends only to keys up to its own position.
    """

    rows: slice
    columns: slice
    is_causal: bool


def chunks_of(size: int, rank: int) -> tuple[int, int]:
    """The two chunks of a rank, the early one first."""
    return rank, 2 * size - 1 - rank


def padded_length(length: int, size: int, multiple: int = 1) -> int:
    """Round ``length`` up, so that each of ``size`` ranks gets an even multiple of ``multiple`` positions."""
    step = 2 * size * multiple
    return -(-length // step) * step


def own_ranges(length: int, size: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two ranges of positions of a rank, for a length divisible by ``2 * size``."""
    each = length // (2 * size)
    early, late = ((chunk * each, (chunk + 1) * each) for chunk in chunks_of(size, rank))
    return early, late


def ring_part(rank: int, source: int, length: int, *, is_causal: bool) -> Part:
    """The queries of ``rank`` and keys of ``source`` whose scores attention needs; both have ``length`` positions."""
    everything = slice(0, length)
    if not is_causal or source == rank:
        return Part(everything, everything, is_causal)
    half = length // 2
    if source < rank:
        return Part(everything, slice(0, half), is_causal=False)
    return Part(slice(half, length), everything, is_causal=False)
