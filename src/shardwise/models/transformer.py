"""A GPT: pre-norm blocks, learned positions, fused query-key-value projection, GELU. One plain ``nn.Module``.

The model does not depend on sharding. :class:`KeyValueCache` stores the keys and values of earlier tokens, so that a
new token is computed for one position only. Rows of unequal length are padded on the left: all rows end in the same
column, and each new column has a token of every row. Padding also has keys and values, to which no token attends.

Shape suffixes: ``B`` batch, ``T`` sequence, ``C`` hidden, ``H`` heads, ``D`` head width, ``A`` all heads (``H`` times
``D``), ``F`` feed-forward width, ``E`` experts, ``K`` experts per token, ``V`` vocabulary.

Every module that owns parameters initializes them in its ``reset_parameters`` without reading values. A model built on
``meta`` and materialized later (``module.to_empty``, then ``reset_parameters`` of every module in the order of
``modules()``) therefore has the same values as a directly constructed one under the same seed. ``to_empty`` breaks
ties, as for any module; ``parallelize`` keeps them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.spec.errors import ConfigError, StateError
from shardwise.spec.shape.gpt import GPTConfig

INIT_STD = 0.02


class Linear(nn.Linear):
    """A linear layer with GPT-2's initialization: weights normal(0, ``std``), biases zero."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, std: float, device: torch.device | str | None
    ) -> None:
        self.std = std  # first, because nn.Linear's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=bias, device=device)

    def reset_parameters(self) -> None:
        """Draw new random values."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TiedHead(nn.Linear):
    """The output projection whose weight is the token embedding's parameter, which the embedding initializes."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
        self.weight = embedding.weight

    def reset_parameters(self) -> None:
        """Do nothing, because the embedding initializes the weight."""


class Embedding(nn.Embedding):
    """An embedding with GPT-2's initialization: normal(0, 0.02)."""

    def reset_parameters(self) -> None:
        """Draw new random values."""
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Causal self-attention over ``num_heads`` heads."""

    def __init__(self, config: GPTConfig, *, device: torch.device | str | None) -> None:
        super().__init__()
        hidden = config.hidden
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.dropout = config.dropout
        self.qkv = Linear(hidden, 3 * hidden, bias=config.bias, std=INIT_STD, device=device)
        self.out = Linear(hidden, hidden, bias=config.bias, std=_residual_std(config), device=device)

    def forward(self, x_BTC: Tensor, cache: KeyValueCache | None = None, layer: int = 0) -> Tensor:
        """Attend to earlier positions, including those of layer ``layer`` in the cache: (B, T, C) to (B, T, C)."""
        q_BTA, k_BTA, v_BTA = self.qkv(x_BTC).chunk(3, dim=-1)
        B, T, A = q_BTA.shape
        q_BHTD, k_BHTD, v_BHTD = (
            t_BTA.view(B, T, self.num_heads, self.head_dim).transpose(1, 2) for t_BTA in (q_BTA, k_BTA, v_BTA)
        )
        if cache is None:
            y_BHTD = self.attend(q_BHTD, k_BHTD, v_BHTD)
        else:
            k_BHTD, v_BHTD = cache.extend(layer, k_BHTD, v_BHTD)
            rate = self.dropout if self.training else 0.0
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, cache.mask, rate, cache.is_causal)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, A))

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        """Attend from each position to itself and earlier ones. Context parallelism replaces this method by a ring."""
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=rate, is_causal=True)


class FeedForward(nn.Module):
    """Up projection, GELU (tanh form, as GPT-2), down projection."""

    def __init__(self, config: GPTConfig, *, device: torch.device | str | None) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.ffn_hidden, bias=config.bias, std=INIT_STD, device=device)
        self.down = Linear(config.ffn_hidden, config.hidden, bias=config.bias, std=_residual_std(config), device=device)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Transform each position separately: (B, T, C) to (B, T, C)."""
        y_BTF = F.gelu(self.up(x_BTC), approximate="tanh")
        return self.down(y_BTF)


class MixtureOfExperts(nn.Module):
    """Several feed-forwards; each token's output is the weighted sum of the ``experts_per_token`` chosen ones.

    The weights are the softmax over the chosen experts' scores (Mixtral, arXiv 2401.04088, section 2.1). This is the
    dense form: every expert computes every token, with weight zero if it was not chosen. It costs ``num_experts /
    experts_per_token`` times the arithmetic of the sparse form, but no shape depends on data, so it runs on ``meta``
    and compiles. An expert that no token chose gets zero gradients instead of none.
    """

    def __init__(self, config: GPTConfig, *, device: torch.device | str | None) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = Linear(config.hidden, config.num_experts, bias=False, std=INIT_STD, device=device)
        self.experts = nn.ModuleList(FeedForward(config, device=device) for _ in range(config.num_experts))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Transform each position separately: (B, T, C) to (B, T, C)."""
        return self.mix(x_BTC, self.weigh(x_BTC))

    def choose(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, best first, and their weights, both (B, T, K)."""
        top_BTK, chosen_BTK = self.router(x_BTC).topk(self.experts_per_token, dim=-1)
        return chosen_BTK, top_BTK.softmax(dim=-1)

    def weigh(self, x_BTC: Tensor) -> Tensor:
        """Return the weight of each expert, (B, T, E); zero if it was not chosen."""
        chosen_BTK, weights_BTK = self.choose(x_BTC)
        return weights_BTK.new_zeros(*weights_BTK.shape[:-1], len(self.experts)).scatter(-1, chosen_BTK, weights_BTK)

    def mix(self, x_BTC: Tensor, weight_BTE: Tensor) -> Tensor:
        """Return the weighted sum of all experts' outputs, (B, T, C)."""
        y_BTC = torch.zeros_like(x_BTC)
        for expert, weight_BT in zip(self.experts, weight_BTE.unbind(dim=-1), strict=True):
            y_BTC = y_BTC + weight_BT.unsqueeze(-1) * expert(x_BTC)
        return y_BTC


class Block(nn.Module):
    """One pre-norm transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: GPTConfig, *, device: torch.device | str | None) -> None:
        super().__init__()
        feed_forward = MixtureOfExperts if config.num_experts else FeedForward
        self.attention_norm = nn.LayerNorm(config.hidden, bias=config.bias, device=device)
        self.attention = Attention(config, device=device)
        self.mlp_norm = nn.LayerNorm(config.hidden, bias=config.bias, device=device)
        self.mlp = feed_forward(config, device=device)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, cache: KeyValueCache | None = None, layer: int = 0) -> Tensor:
        """Transform (B, T, C) to (B, T, C)."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), cache, layer))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))


class Loss(nn.Module):
    """Returns logits unchanged, or their mean cross-entropy if targets are given."""

    def forward(self, logits_BTV: Tensor, targets: Tensor | None = None) -> Tensor:
        """Reduce (B, T, V) and (B, T) to a scalar in fp32 or wider."""
        if targets is None or logits_BTV.dim() == 0:  # already computed by the head (engine.extensions.chunked_loss)
            return logits_BTV
        if logits_BTV.dtype in {torch.float16, torch.bfloat16}:
            logits_BTV = logits_BTV.float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten().long())


class GPT(nn.Module):
    """Token ids to logits, or to the mean cross-entropy if targets are given.

    Attributes:
        config: Its shape.
    """

    def __init__(self, config: GPTConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.hidden, device=device)
        self.position_embedding = Embedding(config.seq_len, config.hidden, device=device)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, device=device) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden, bias=config.bias, device=device)
        self.lm_head = (
            TiedHead(self.token_embedding)
            if config.tied
            else Linear(config.hidden, config.vocab_size, bias=False, std=INIT_STD, device=device)
        )
        self.loss = Loss()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: Ids (B, T), int64 or int32, ``T`` at most ``config.seq_len``. Ids are not compared with the
                vocabulary here, because the host would wait for the device.
            targets: The next ids (B, T); -100 leaves a position out.
            positions: Positions of the tokens in their sequence (T,); ``None``: 0, 1, 2, ...
            cache: Keys and values of earlier tokens, to which those of ``tokens`` are appended.

        Returns:
            Logits (B, T, V), with a cache only those of the last ``num_logits`` positions, usually one; with targets
            the mean cross-entropy over all positions, in fp32 or wider, 0-dim.

        Raises:
            ConfigError: The ids have a wrong dtype or shape, or the sequence is longer than the model's positions.
        """
        self.check(tokens, targets)
        if cache is not None:
            return self._continue(tokens, cache)
        positions_T = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x_BTC = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions_T))
        for block in self.blocks:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                # Without dropout a block uses no random numbers, so the generators' state need not be saved.
                x_BTC = checkpoint(block, x_BTC, use_reentrant=False, preserve_rng_state=self.config.dropout > 0)
            else:
                x_BTC = block(x_BTC)
        return self.loss(self.lm_head(self.final_norm(x_BTC)), targets)

    def _continue(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        positions_BT = cache.begin(tokens)
        x_BTC = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions_BT))
        for layer, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, cache, layer)
        return self.loss(self.lm_head(self.final_norm(x_BTC[:, -cache.num_logits :])))

    def check(self, tokens: Tensor, targets: Tensor | None = None) -> None:
        """Refuse ids of a wrong dtype or shape, or too long sequences.

        Raises:
            ConfigError: As :meth:`forward`.
        """
        for name, ids in (("tokens", tokens), ("targets", targets)):
            if ids is None:
                continue
            if ids.dtype not in {torch.int64, torch.int32}:
                raise ConfigError(f"{name} have dtype {ids.dtype}, expected token ids.\n  Use {name}.long().")
            if ids.dim() != 2:
                raise ConfigError(
                    f"{name} have shape {tuple(ids.shape)}, expected (batch, seq).\n  Add the missing dimension."
                )
        if targets is not None and targets.shape != tokens.shape:
            raise ConfigError(
                f"targets have shape {tuple(targets.shape)}, tokens {tuple(tokens.shape)}.\n"
                "  Give one target for every token."
            )
        if tokens.shape[1] > self.config.seq_len:
            raise ConfigError(
                f"a sequence of {tokens.shape[1]} tokens is longer than the model's {self.config.seq_len} positions.\n"
                "  Shorten the sequence, or build the model with a larger seq_len."
            )


def _residual_std(config: GPTConfig) -> float:
    """Standard deviation for the 2 projections per block that add to the residual stream. Keeps its variance."""
    return INIT_STD / math.sqrt(2 * config.num_layers)


class KeyValueCache:
    """Keys and values by layer. A model with only some layers or heads fills only those.

    Args:
        capacity: Maximum number of columns.
        padding: Columns of padding before each row; empty if there are none.

    Attributes:
        length: Number of columns so far, including those of the running forward.
        mask: The columns to which each new token attends, (B, 1, T, K); ``None``: given by ``is_causal``.
        is_causal: Whether the new tokens are the first ones, and each attends to itself and all earlier ones.
        by_layer: Keys and values of each layer, with room for further tokens.
        num_logits: Number of last positions for which a forward returns logits.
    """

    def __init__(self, capacity: int, padding: Sequence[int] = ()) -> None:
        self.length = 0
        self.num_logits = 1
        self.mask: Tensor | None = None
        self.is_causal = True
        self._capacity = capacity
        self._padding = tuple(padding) if any(padding) else ()
        self._padding_B: Tensor | None = None
        self._num_new = 0
        self.by_layer: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, tokens: Tensor) -> Tensor:
        """Make room for ``tokens`` (B, T); return their positions, (B, T) or (1, T). Called once in each forward.

        Raises:
            StateError: The capacity is exceeded.
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
        is_self_TK = columns_K == columns_T[:, None]  # padding attends to itself, because a softmax over nothing is NaN
        self.mask = ((is_text_BK[:, None] & is_before_TK) | is_self_TK)[:, None]
        return (columns_T - self._padding_B[:, None]).clamp_(min=0)

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values of a layer; return those of all tokens, (B, H, K, D)."""
        if layer not in self.by_layer:
            B, H, _, D = k_BHTD.shape
            shape = (B, H, self._capacity, D)
            self.by_layer[layer] = k_BHTD.new_empty(shape), v_BHTD.new_empty(shape)
        buffers = self.by_layer[layer]
        for buffer, new in zip(buffers, (k_BHTD, v_BHTD), strict=True):
            buffer[:, :, self.length - self._num_new : self.length] = new
        k_BHKD, v_BHKD = (buffer[:, :, : self.length] for buffer in buffers)
        return k_BHKD, v_BHKD

    @classmethod
    def join(cls, parts: Sequence[tuple[KeyValueCache, Sequence[int]]], room: int) -> KeyValueCache:
        """Combine rows of several caches into one cache, with room for ``room`` more columns.

        Args:
            parts: Caches with the same layers, each with the rows that are taken from it, in order.
            room: Number of columns for further tokens.
        """
        columns = [cache.text_lengths(rows) for cache, rows in parts]
        length = max(map(max, columns))
        result = cls(length + room, [length - own for each in columns for own in each])
        result.length = length
        for layer in parts[0][0].by_layer:
            pieces = [(cache.by_layer[layer], rows, cache.length) for cache, rows in parts]
            k_BHKD, v_BHKD = (
                join_columns([(pair[side][:, :, :end], rows) for pair, rows, end in pieces], length, room)
                for side in (0, 1)
            )
            result.by_layer[layer] = k_BHKD, v_BHKD
        return result

    def text_lengths(self, rows: Sequence[int]) -> list[int]:
        """Return the number of columns without padding, for some rows."""
        return [self.length - (self._padding[row] if self._padding else 0) for row in rows]

    @property
    def is_padded(self) -> bool:
        """Whether some rows are padded."""
        return bool(self._padding)

    @property
    def room(self) -> int:
        """Number of columns that still fit."""
        return self._capacity - self.length

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, including room for further tokens."""
        return sum(tensor.nbytes for pair in self.by_layer.values() for tensor in pair)


class NoCache(KeyValueCache):
    """A single forward that stores nothing and returns the logits of the last ``num_logits`` positions."""

    def __init__(self, num_logits: int) -> None:
        super().__init__(sys.maxsize)
        self.num_logits = num_logits

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the given keys and values."""
        del layer
        return k_BHTD, v_BHTD


def join_columns(parts: Sequence[tuple[Tensor, Sequence[int]]], length: int, room: int) -> Tensor:
    """Combine rows of tensors (B, H, K, D) into one tensor of ``length`` columns, plus ``room`` uninitialized columns.

    The last columns of all parts are aligned. A shorter row starts with zeros, which a padding mask hides;
    uninitialized values could be NaN, and zero times NaN is NaN.
    """
    first = parts[0][0]
    count = sum(len(rows) for _, rows in parts)
    result = first.new_empty(count, first.shape[1], length + room, first.shape[3])
    row = 0
    for source, rows in parts:
        target = result[row : row + len(rows)]
        num_columns = min(length, source.shape[2])
        target[:, :, : length - num_columns] = 0
        columns = source[:, :, source.shape[2] - num_columns :]
        is_all = list(rows) == list(range(source.shape[0]))
        target[:, :, length - num_columns : length] = (
            columns if is_all else columns[torch.tensor(rows, device=source.device)]
        )
        row += len(rows)
    return result
