"""Context parallelism: how a sequence is divided over the ranks of ``cp``, and what a step sends there.

A sequence is cut into ``2 * size`` chunks, of which rank ``r`` holds chunk ``r`` and chunk ``2 * size - 1 - r``: one
early and one late. Under causal attention every rank then has the same work, where runs of equal length would leave the
first rank idle most of the time (Brandon et al., "Striped Attention", arXiv 2311.09431; the pairs are those of Llama
3's training, arXiv 2407.21783, section 3.3.2). With ``size=2``::

    chunk    0  1  2  3
    rank     0  1  1  0

A query attends to its own rank's keys causally. All queries of a rank attend to the early half of the keys of each rank
below, and the late half of its queries to all keys of each rank above. So half of the scores of every other rank's
block are computed; the other half lies in the future.

With n ranks, a layer's forward sends n - 1 blocks, each the keys and values of tokens / n positions. Its backward
sends them once more, and n - 1 blocks of gradients, in fp32 where activations have 16 bit. A rank so sends
``3 (n - 1) * 2 * tokens / n * kv_width`` elements for each layer and step. That grows with the length of the sequence;
the computation of attention, beside which blocks are sent, grows with its square.
"""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """The part of a rank's queries that attend to a block, and the keys that they attend to.

    Attributes:
        rows: The queries.
        columns: The keys.
        is_causal: Each row attends to its own column and those before.
    """

    rows: slice
    columns: slice
    is_causal: bool


def chunks_of(size: int, rank: int) -> tuple[int, int]:
    """The two chunks of a rank, the early one first."""
    return rank, 2 * size - 1 - rank


def padded_length(length: int, size: int, multiple: int = 1) -> int:
    """The least length of at least ``length`` of which each of ``size`` ranks gets an even multiple of ``multiple``."""
    step = 2 * size * multiple
    return -(-length // step) * step


def own_ranges(length: int, size: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two ranges of positions of a rank, for a length that ``2 * size`` divides."""
    each = length // (2 * size)
    early, late = ((chunk * each, (chunk + 1) * each) for chunk in chunks_of(size, rank))
    return early, late


def part_of(rank: int, source: int, length: int, *, is_causal: bool) -> Part:
    """The part of ``rank``'s queries and of ``source``'s keys, both of ``length`` positions, that attention needs."""
    everything = slice(0, length)
    if not is_causal or source == rank:
        return Part(everything, everything, is_causal)
    half = length // 2
    if source < rank:
        return Part(everything, slice(0, half), is_causal=False)
    return Part(slice(half, length), everything, is_causal=False)
