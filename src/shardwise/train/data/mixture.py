"""A mixture of several sources with weights: from which source a sample is taken, and which of its samples it is.

The sources are apportioned by Webster's method (Balinski and Young, "Fair Representation", 1982). Sample ``k`` of a
source with the share ``w`` of the weights is due at ``(k + 1/2) / w``, and samples are taken in the order of these
times; if several are due together, the earliest source is first. So the source at a global position depends only on the
weights and the position, in exact arithmetic. At every point of the sequence each count is within half a sample of a
common multiple of its weight, so every global batch contains the sources in their shares. A random draw would give
these shares only on average.

The samples of each source are taken in the source's own order (see ``sampler``), with separate epochs: sample ``k`` of
source ``s`` is ``permutation(seed + s, k // num_samples)[k % num_samples]``. A small source starts again while a large
one is still in its first epoch.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from shardwise.train.data.rows import Rows, Samples, concatenate
from shardwise.train.data.sampler import Sampler, permute


class Apportionment:
    """The order in which sources are taken, by Webster's method. Weights are exact as written: 0.1 is a tenth."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(repr(weight)) for weight in weights]
        shares = [int(weight * math.lcm(*(each.denominator for each in exact))) for weight in exact]
        multiple = math.lcm(*shares)
        self._halves = [multiple // share for share in shares]  # half the time between samples of a source
        self._time_of_sample = Fraction(2 * multiple, sum(shares))

    def due(self, source: int, number: int) -> int:
        """Return the time at which a source's sample ``number`` is due, in units in which all times are integers."""
        return (2 * number + 1) * self._halves[source]

    def due_before(self, time: int) -> list[int]:
        """Return the number of samples of each source that are due before a time."""
        return [(time + half - 1) // (2 * half) for half in self._halves]

    def counts_before(self, position: int) -> list[int]:
        """Return the number of samples of each source among the first ``position``."""
        early = max(position - len(self._halves), 0)  # each source is at most half a sample ahead of its share
        counts = self.due_before(math.floor(early * self._time_of_sample))
        while sum(counts) < position:
            counts[self.next_source(counts)] += 1
        return counts

    def next_source(self, counts: Sequence[int]) -> int:
        """Return the source of the next sample after ``counts`` of each source have been taken."""
        return min(range(len(counts)), key=lambda source: self.due(source, counts[source]))


@dataclass(frozen=True, slots=True)
class MixedSamples:
    """Samples of several sources in one numbering: those of the first source, then of the second, and so on."""

    parts: Sequence[Samples]
    names: Sequence[str]
    weights: Sequence[float]
    seq_len: int
    counts: Sequence[int]  # number of samples of each part that are used, evenly spread over the part
    _ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(itertools.accumulate(self.counts)))

    @property
    def num_samples(self) -> int:
        """Number of samples of all sources."""
        return self._ends[-1]

    @property
    def has_positions(self) -> bool:
        """Whether a source separates documents. Rows of the other sources are then one document each."""
        return any(getattr(part, "has_positions", False) for part in self.parts)

    def begin(self, source: int) -> int:
        """Return the number of a source's first sample."""
        return self._ends[source] - self.counts[source]

    def place(self, index: int) -> tuple[int, int]:
        """Return the source of a sample, and the sample's number within the source."""
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        source = bisect.bisect_right(self._ends, index)
        return source, (index - self.begin(source)) * self.parts[source].num_samples // self.counts[source]

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return the rows of these samples."""
        found = [self.parts[source].rows([number]) for source, number in map(self.place, indices)]
        return concatenate(found, has_positions=self.has_positions)

    def num_targets(self, indices: Iterable[int]) -> int | None:
        """Return the number of learned tokens of these samples; ``None``: all, if all sources learn all tokens."""
        if all(part.num_targets(()) is None for part in self.parts):
            return None
        mine: list[list[int]] = [[] for _ in self.parts]
        for source, number in map(self.place, indices):
            mine[source].append(number)
        counts = [part.num_targets(numbers) for part, numbers in zip(self.parts, mine, strict=True)]
        return sum(
            len(numbers) * self.seq_len if count is None else count for numbers, count in zip(mine, counts, strict=True)
        )

    def shares(self, indices: Sequence[int]) -> dict[str, tuple[float, float]]:
        """Return for each source, as ``share_NAME``, its number of these samples and the number of all."""
        sources = [self.place(index)[0] for index in indices]
        return {f"share_{name}": (sources.count(source), len(sources)) for source, name in enumerate(self.names)}


def mixed(
    parts: Sequence[Samples], names: Sequence[str], weights: Sequence[float], seq_len: int, *, is_held_out: bool
) -> MixedSamples:
    """Combine the samples of several sources: all of them, or for held-out data as many as the weights allow."""
    counts = [part.num_samples for part in parts]
    if is_held_out:
        order = Apportionment(weights)
        counts = order.due_before(min(order.due(source, count) for source, count in enumerate(counts)))
    return MixedSamples(parts, names, weights, seq_len, counts)


@dataclass(slots=True)
class MixedSampler(Sampler):
    """The samples of one rank of a mixture, step by step. Its state is the same as that of a ``Sampler``."""

    samples: MixedSamples = field(kw_only=True)
    _order: Apportionment = field(init=False)
    _counts: list[int] = field(init=False)
    _next: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._order = Apportionment(self.samples.weights)
        self._counts = self._order.counts_before(0)

    def sample(self, position: int) -> int:
        """Return the sample at a global position."""
        if position != self._next:
            self._counts = self._order.counts_before(position)
        source = self._order.next_source(self._counts)
        number, size = self._counts[source], self.samples.counts[source]
        self._counts[source], self._next = number + 1, position + 1
        return self.samples.begin(source) + permute(number, size, self.seed + source)
