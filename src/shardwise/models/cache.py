"""What a model has computed of the tokens it has seen, so that each new token costs one position only.

Rows of unequal length are padded on the left: all end in the same column, and each new column is a token of every row.
Padding has keys and values too, which no token looks at.

Shape suffixes: ``B`` batch, ``T`` new tokens, ``K`` all tokens so far, ``H`` heads (of this rank), ``D`` head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.spec.errors import StateError


class KeyValueCache:
    """Keys and values by layer. A model that holds some layers, or some heads, fills those.

    Args:
        capacity: Columns at most.
        padding: Columns of padding before each row; empty where there are none.

    Attributes:
        length: Columns so far, those of the forward under way included.
        mask: What the new tokens look at, (B, 1, T, K); ``None``: as ``is_causal`` says.
        is_causal: The new tokens are the first ones, and each looks at itself and all before.
    """

    def __init__(self, capacity: int, padding: Sequence[int] = ()) -> None:
        self.length = 0
        self.mask: Tensor | None = None
        self.is_causal = True
        self._capacity = capacity
        self._padding = tuple(padding) if any(padding) else ()
        self._padding_B: Tensor | None = None
        self._num_new = 0
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, tokens: Tensor) -> Tensor:
        """Make room for ``tokens`` (B, T); returns their positions, (B, T) or (1, T). Once in each forward.

        Raises:
            StateError: There is no room.
        """
        T, device = tokens.shape[1], tokens.device
        first, self._num_new = self.length, T
        if first + T > self._capacity:
            raise StateError(
                f"a cache for {self._capacity} tokens holds {first}: {T} more do not fit.\n  Make a larger one."
            )
        self.length += T
        self.is_causal, self.mask = first == 0 and T > 1 and not self._padding, None
        columns_T = torch.arange(first, self.length, device=device)
        if not self._padding:
            if first and T > 1:
                self.mask = (torch.arange(self.length, device=device) <= columns_T[:, None])[None, None]
            return columns_T[None]
        if self._padding_B is None:
            self._padding_B = torch.tensor(self._padding, device=device)
        columns_K = torch.arange(self.length, device=device)
        is_text_BK = columns_K >= self._padding_B[:, None]
        is_before_TK = columns_K <= columns_T[:, None]
        is_self_TK = columns_K == columns_T[:, None]  # padding looks at itself: a softmax over nothing is not a number
        self.mask = ((is_text_BK[:, None] & is_before_TK) | is_self_TK)[:, None]
        return (columns_T - self._padding_B[:, None]).clamp_(min=0)

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the new tokens' keys and values of a layer; returns those of all tokens, (B, H, K, D)."""
        if layer not in self._held:
            B, H, _, D = k_BHTD.shape
            shape = (B, H, self._capacity, D)
            self._held[layer] = k_BHTD.new_empty(shape), v_BHTD.new_empty(shape)
        whole = self._held[layer]
        for held, new in zip(whole, (k_BHTD, v_BHTD), strict=True):
            held[:, :, self.length - self._num_new : self.length] = new
        k_BHKD, v_BHKD = (held[:, :, : self.length] for held in whole)
        return k_BHKD, v_BHKD

    @property
    def num_bytes(self) -> int:
        """Of all keys and values, room for tokens to come included."""
        return sum(tensor.nbytes for pair in self._held.values() for tensor in pair)
