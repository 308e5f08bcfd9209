"""Choosing the next token from logits: the largest, or a sample.

A sample depends only on the seed, the row and the number of the token. It is computed by inverting the distribution in
float64, and is the same on every rank, under every layout, and for any other rows in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for choosing the next token."""

    temperature: float = 0.0  # divisor of logits; 0 takes the largest logit
    top_k: int | None = None  # sample from this number of the most likely tokens
    top_p: float | None = None  # sample from the smallest set of most likely tokens with this total probability

    def __post_init__(self) -> None:
        """Check the values."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature={self.temperature}: expected 0 or more.\n  0 takes the likeliest token.")
        if self.top_k is not None and (isinstance(self.top_k, bool) or self.top_k < 1):
            raise ConfigError(f"top_k={self.top_k}: expected at least 1.\n  Leave it out to draw among all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: expected above 0 and at most 1.\n  Leave it out for all tokens.")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no meaning at temperature=0, which takes the likeliest token.\n"
                    "  Set temperature=1 to draw, or leave it out."
                )

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """Return the probability of each token, (B, V), float64; at temperature 0 one for the largest logit.

        Among equal logits the smaller id comes first.
        """
        logits_BV = logits_BV.double()
        if self.temperature == 0:
            return torch.zeros_like(logits_BV).scatter_(-1, logits_BV.argmax(dim=-1, keepdim=True), 1.0)
        below_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)  # avoids infinities at small temperatures
        p_BV = (below_BV / self.temperature).softmax(dim=-1)
        if self.top_k is None and self.top_p is None:
            return p_BV
        sorted_BV, ids_BV = p_BV.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            sorted_BV[:, self.top_k :] = 0
            sorted_BV /= sorted_BV.sum(dim=-1, keepdim=True)
        if self.top_p is not None:
            before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
            sorted_BV = sorted_BV.masked_fill(before_BV >= self.top_p, 0)
        return torch.zeros_like(p_BV).scatter_(-1, ids_BV, sorted_BV)

    def choose(self, logits_BV: Tensor, draws_B: Tensor | None = None) -> Tensor:
        """Choose the next token of each row, (B,). It is always in the vocabulary, even if logits are NaN.

        ``draws_B`` has a number in [0, 1) for each row, float64; not needed at temperature 0.
        """
        if self.temperature == 0:
            return logits_BV.argmax(dim=-1)
        assert draws_B is not None
        edges_BV = self.probabilities(logits_BV).cumsum(dim=-1)
        total_B = edges_BV[:, -1]
        below_B = torch.nextafter(total_B, torch.zeros_like(total_B))  # the product may be rounded up
        at_B = torch.minimum(draws_B.to(total_B.device) * total_B, below_B)
        return torch.searchsorted(edges_BV, at_B[:, None], right=True).squeeze(-1).clamp_(max=edges_BV.shape[-1] - 1)


class RngStreams:
    """A stream of uniform random numbers for each row of a batch, with seed and row number as the key."""

    def __init__(self, seed: int, rows: Iterable[int]) -> None:
        keys = (np.array([seed % (1 << 64), row], np.uint64) for row in rows)
        self._rows = [np.random.Generator(np.random.Philox(key=key)) for key in keys]

    def next(self) -> Tensor:
        """Return a number in [0, 1) for each row; (B,), float64, on the CPU."""
        return torch.tensor([row.random() for row in self._rows], dtype=torch.float64)
