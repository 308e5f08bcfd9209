"""Samples of which some tokens are hidden and are to be found again (Devlin et al., "BERT", 2019, 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.train.data.rows import Rows, Samples

#: Of the tokens of a sample this part is learned; of these 8 in 10 are hidden, 1 is replaced, and 1 stays.
_LEARNED, _HIDDEN, _REPLACED = 0.15, 0.8, 0.1


@dataclass(frozen=True, slots=True)
class MaskedSamples:
    """Samples with hidden tokens. Which they are depends on the seed and the sample alone.

    Attributes:
        whole: The samples.
        seq_len: Tokens of each.
        mask: The id that stands for a hidden token.
        vocab_size: Ids that replace others are below.
        seed: Of the choices.
    """

    whole: Samples
    seq_len: int
    mask: int
    vocab_size: int
    seed: int

    @property
    def num_samples(self) -> int:
        """As many as there are."""
        return self.whole.num_samples

    @property
    def num_tokens(self) -> int:
        """As many as there are."""
        return self.whole.num_tokens

    @property
    def _num_learned(self) -> int:
        return max(1, round(_LEARNED * self.seq_len))

    def num_targets(self, indices: Iterable[int]) -> int:
        """The same number of each."""
        return self._num_learned * sum(1 for _ in indices)

    def rows(self, indices: Sequence[int]) -> Rows:
        """These samples."""
        inputs = self.whole.rows(indices).inputs.copy()
        targets = np.full_like(inputs, -100)
        for row, index in enumerate(indices):
            key = np.array([self.seed, 2], np.uint64)
            draw = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], np.uint64)))
            places = draw.permutation(self.seq_len)[: self._num_learned]
            targets[row, places] = inputs[row, places]
            fate = draw.random(len(places))
            inputs[row, places[fate < _HIDDEN]] = self.mask
            other = places[(fate >= _HIDDEN) & (fate < _HIDDEN + _REPLACED)]
            inputs[row, other] = draw.integers(0, self.vocab_size, len(other))
        return Rows(inputs, targets)
