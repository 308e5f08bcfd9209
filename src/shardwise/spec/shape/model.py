"""A model as blocks of attention and feed-forward, with the number of its parameters.

``h`` is the width of the residual stream, ``f`` that of a feed-forward, ``d`` that of a head.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.granularity import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values come from narrow vectors.

    Attributes:
        q_rank: Width of the vector from which queries are projected; 0: the residual stream itself.
        kv_rank: Width of the vector from which keys and values are projected.
        rotary_dim: Width of the rotated part of each query head; all heads share one rotated part of the keys.
        v_dim: Width of a head's values.
    """

    q_rank: int
    kv_rank: int
    rotary_dim: int
    v_dim: int

    def products(self, hidden: int, heads: int, head_dim: int) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of its linear layers, the output projection last."""
        width = heads * head_dim
        queries = ((hidden, self.q_rank), (self.q_rank, width)) if self.q_rank else ((hidden, width),)
        made = heads * (head_dim - self.rotary_dim + self.v_dim)
        rest = ((hidden, self.kv_rank + self.rotary_dim), (self.kv_rank, made), (heads * self.v_dim, hidden))
        return queries + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of a block.

    Attributes:
        heads: Heads of the queries.
        head_dim: Width of one head.
        kv_heads: Heads of keys and values; ``heads / kv_heads`` query heads share one.
        has_qkv_bias: Queries, keys and values have biases.
        has_out_bias: The output projection has a bias.
        norm_numel: Parameters of norms of queries and keys.
        is_causal: A position attends only to itself and earlier positions.
        window: Most positions that a position attends to; ``None``: all.
        extra: Other parameters: attention sinks.
        has_rotary: Queries and keys have rotary position embeddings.
        is_fused: Queries, keys and values are one matrix product, not three.
        has_dropout: Attention weights are dropped out in training.
        rotary_share: Fraction of each head that is rotated.
        joins_rotary: A concatenation joins the rotated part and the rest of each head, even if the rest is empty.
        plain: Reason why no fused kernel computes the attention: ``"capped"`` scores, or attention ``"sinks"``;
            ``""``: a fused kernel does.
        has_position_bias: A learned number for each head and pair of positions is added to the scores, as in T5.
        latent: Latent attention that replaces the plain projections to queries, keys and values.
    """

    heads: int
    head_dim: int
    kv_heads: int
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    norm_numel: int = 0
    is_causal: bool = True
    window: int | None = None
    extra: int = 0
    has_rotary: bool = False
    is_fused: bool = False
    has_dropout: bool = False
    has_position_bias: bool = False
    rotary_share: float = 1.0
    joins_rotary: bool = False
    plain: str = ""
    latent: Latent | None = None

    @property
    def q_width(self) -> int:
        """Width of the queries, and of the output projection's input without latent attention."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def norms_all_heads(self) -> bool:
        """Whether each norm of queries or keys reads all heads together, as in OLMo 2."""
        return self.norm_numel not in {0, 2 * self.head_dim}

    def has_mask(self, key_len: int) -> bool:
        """Whether a fused kernel reads a mask of the window; keys and values are then repeated for every head."""
        return not self.plain and self.window is not None and self.window < key_len

    def saves_scores(self, key_len: int, itemsize: int, cp: int) -> bool:
        """Whether scores are saved because in fp32 no fused kernel of torch takes fewer heads of keys than of queries.

        The ring of ``cp`` repeats keys and values itself.
        """
        is_grouped = self.kv_heads < self.heads and not self.has_mask(key_len)
        return itemsize == 4 and is_grouped and cp == 1 and not self.plain

    def num_keys(self, key_len: int) -> int:
        """Keys whose scores a query computes: those in the window, which only fused kernels leave out."""
        return key_len if self.window is None or self.plain else min(self.window, key_len)

    def num_parameters(self, hidden: int) -> int:
        """Parameters: ``2 h (q + kv)``, biases, norms and ``extra``."""
        weights = 2 * hidden * (self.q_width + self.kv_width)
        if self.latent is not None:
            weights = sum(a * b for a, b in self.latent.products(hidden, self.heads, self.head_dim))
        biases = self.has_qkv_bias * (self.q_width + 2 * self.kv_width) + self.has_out_bias * hidden
        return weights + biases + self.norm_numel + self.extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A feed-forward: an up projection (two if gated), an activation, and a down projection.

    Attributes:
        ffn: Width between the two projections.
        is_gated: The activation of one up projection is multiplied by a second up projection.
        has_bias: The projections have biases.
        activation: ``"silu"``, ``"gelu"`` (one kernel), ``"gelu_new"`` (transformers' formula of eight kernels),
            ``"relu"``, or ``"clamped"``, gpt-oss's gate.
        is_fused: The two up projections of a gated feed-forward are one matrix product.
        has_dropout: The input of the down projection is dropped out in training, as in T5.
        is_replicated: ``tp`` does not divide it: the shared expert of Qwen2-MoE.
    """

    ffn: int
    is_gated: bool = False
    has_bias: bool = False
    activation: str = "silu"
    is_fused: bool = False
    has_dropout: bool = False
    is_replicated: bool = False

    @property
    def up_width(self) -> int:
        """Output width of the up projections together."""
        return self.ffn * (1 + self.is_gated)

    def num_parameters(self, hidden: int) -> int:
        """Parameters: ``2 h f`` or, if gated, ``3 h f``, and biases."""
        return hidden * (self.up_width + self.ffn) + self.has_bias * (self.up_width + hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: a router chooses some of many feed-forwards for each token.

    Attributes:
        count: Number of experts.
        per_token: Experts that a token is sent to.
        mlp: One expert.
        shared: A shared expert, which processes every token in addition; ``None``: there is none.
        has_shared_gate: A projection to one number scales the shared expert's output.
        has_router_bias: The router has biases.
        has_wide_router: The router computes in fp32.
        has_wide_weights: Outputs of experts are multiplied by weights in fp32.
    """

    count: int
    per_token: int
    mlp: Mlp
    shared: Mlp | None = None
    has_shared_gate: bool = False
    has_router_bias: bool = False
    has_wide_router: bool = False
    has_wide_weights: bool = False

    def expert_parameters(self, hidden: int) -> int:
        """Parameters of all routed experts. Expert parallelism divides them over ranks."""
        return self.count * self.mlp.num_parameters(hidden)

    def num_parameters(self, hidden: int, *, is_active: bool = False) -> int:
        """Parameters of the mixture; ``is_active`` counts only the experts that one token is sent to."""
        routed = (self.per_token if is_active else self.count) * self.mlp.num_parameters(hidden)
        shared = self.shared.num_parameters(hidden) if self.shared is not None else 0
        router = self.count * (hidden + self.has_router_bias)
        return routed + shared + router + self.has_shared_gate * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer of a transformer.

    Attributes:
        attention: Self-attention.
        feed_forward: A feed-forward, or a mixture of experts.
        cross: Cross-attention, as in a T5 decoder; ``None``: there is none.
        num_norms: Norms of width ``h``.
        has_norm_bias: Norms have biases in addition to weights.
        extra: Other parameters: a table of relative positions.
        num_last_norms: Norms applied to the outputs of attention and feed-forward; no matrix product reads these norms'
            outputs.
        is_parallel: Attention and feed-forward read the same input, as in GPT-NeoX.
        norm: Kind of the norms: ``"rms"``, ``"layer"``, ``"wide"`` (an RMS norm that multiplies by its weight in
            fp32), or ``"t5"`` (an RMS norm that multiplies its input in the input's own dtype).
        has_dropout: Outputs of attention and feed-forward are dropped out in training.
    """

    attention: Attention
    feed_forward: Mlp | Experts
    cross: Attention | None = None
    num_norms: int = 2
    has_norm_bias: bool = False
    extra: int = 0
    norm: str = "rms"
    has_dropout: bool = False
    num_last_norms: int = 0
    is_parallel: bool = False

    def num_parameters(self, hidden: int, *, is_active: bool = False) -> int:
        """Parameters of the block; ``is_active`` counts only the experts that one token is sent to."""
        experts = self.feed_forward
        forward = (
            experts.num_parameters(hidden, is_active=is_active)
            if isinstance(experts, Experts)
            else experts.num_parameters(hidden)
        )
        cross = self.cross.num_parameters(hidden) if self.cross is not None else 0
        norms = self.num_norms * (1 + self.has_norm_bias) * hidden
        return self.attention.num_parameters(hidden) + cross + forward + norms + self.extra


def _above(module: str) -> Any:
    """Import a sibling module that itself imports this one; constructors of shapes need the table of families."""
    return importlib.import_module(f"shardwise.spec.shape.{module}")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer: its blocks, embeddings and head.

    Attributes:
        name: Name of the model in tables.
        family: The configuration's ``model_type``, or ``gpt`` for our GPT.
        hidden: Width of the residual stream.
        vocab: Number of token ids and of the head's outputs; for a classifier, the number of classes; 0: no head and no
            embedding.
        stacks: Runs of equal blocks in order, as (number of blocks, block). Encoder blocks come before decoder blocks.
        seq_len: Longest sequence that the model was made for.
        embedding: Parameters of the embeddings before the first block.
        head: Parameters of the head and the final norms, without a weight that the embedding shares.
        is_tied: The head's weight is the embedding's.
        num_encoder_blocks: Encoder blocks of a model with an encoder and a decoder.
        patch_numel: Elements of an image patch, if each position is a patch; sequences then always have ``seq_len``
            positions. 0: positions are token ids.
        is_pooled: The head reads one position of each sequence, not all of them.
        head_dense: Width of a dense layer between the last block and the head; 0: there is none.
        has_norm_before: A norm follows the embedding, as in BERT.
        norm: Kind of the last norm, as in ``Block``; ``""``: there is none.
        has_dropout: Embeddings are dropped out in training.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    stacks: tuple[tuple[int, Block], ...]
    seq_len: int
    embedding: int
    head: int
    is_tied: bool = False
    num_encoder_blocks: int = 0
    patch_numel: int = 0
    is_pooled: bool = False
    head_dense: int = 0
    has_norm_before: bool = False
    norm: str = "rms"
    has_dropout: bool = False

    @classmethod
    def from_config(cls, source: object, name: str = "") -> ModelShape:
        """The shape of an existing model, by arithmetic, without network access.

        Example::

            sw.ModelShape.from_config("llama-3-8b")
            sw.ModelShape.from_config("path/to/folder").num_parameters

        Args:
            source: A well-known name (``llama-3-8b``, ``qwen3-30b-a3b``, ``gpt-175b``, ...), the path of a Hugging Face
                folder or of its ``config.json``, the content of such a file, a configuration object of transformers, or
                a ``GPTConfig``.
            name: Name of the model in tables; ``""``: the source's name.

        Raises:
            ConfigError: The name is not known, the file cannot be read, its family is not known, or a field is missing.
        """
        return _above("find").find_shape(source, name)

    @classmethod
    def decoder(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        vocab: int,
        seq_len: int,
        kv_heads: int | None = None,
        ffn: int | None = None,
        gated: bool = True,
        tied: bool = False,
    ) -> ModelShape:
        """The shape of a language model from its sizes.

        With ``gated`` it is that of a Llama (RMS norms, rotary positions, no biases), otherwise that of a GPT-2 without
        dropout (layer norms, learned positions, biases).

        Args:
            layers: Number of blocks.
            hidden: Width of the residual stream.
            heads: Heads of the queries; divides ``hidden``.
            vocab: Number of token ids.
            seq_len: Longest sequence.
            kv_heads: Heads of keys and values; ``None``: ``heads``.
            ffn: Width of the feed-forward; ``None``: ``4 * hidden``.
            gated: The feed-forward is gated.
            tied: The head's weight is the embedding's.

        Raises:
            ConfigError: A value is not an integer of at least 1, or does not divide another as it must.
        """
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq_len": seq_len}
        kv_heads = sizes["kv_heads"] = heads if kv_heads is None else kv_heads
        problems = [
            f"{name}={value!r}; expected a whole number of at least 1"
            for name, value in (sizes if ffn is None else sizes | {"ffn": ffn}).items()
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if not problems and hidden % heads:
            problems.append(f"heads={heads} does not divide hidden={hidden}")
        if not problems and heads % kv_heads:
            problems.append(f"kv_heads={kv_heads} does not divide heads={heads}")
        if problems:
            raise ConfigError("ModelShape.decoder:\n" + "\n".join(f"  - {problem}" for problem in problems))
        ffn = 4 * hidden if ffn is None else ffn
        if not gated and kv_heads == heads:
            gpt = _above("gpt")
            sizes = {"num_layers": layers, "hidden": hidden, "num_heads": heads, "vocab_size": vocab}
            return gpt.gpt_shape(gpt.GPTConfig(**sizes, seq_len=seq_len, ffn=ffn, tied=tied), "decoder")
        block = Block(
            attention=Attention(heads=heads, head_dim=hidden // heads, kv_heads=kv_heads, has_rotary=True),
            feed_forward=Mlp(ffn=ffn, is_gated=gated, activation="silu" if gated else "gelu"),
        )
        return cls(
            name="decoder",
            family="llama",
            hidden=hidden,
            vocab=vocab,
            stacks=((layers, block),),
            seq_len=seq_len,
            embedding=vocab * hidden,
            head=hidden + (0 if tied else vocab * hidden),
            is_tied=tied,
        )

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block in order."""
        return tuple(block for count, block in self.stacks for _ in range(count))

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return sum(count for count, _ in self.stacks)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return self._total(is_active=False)

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that take part in processing one token: only ``per_token`` experts of each mixture."""
        return self._total(is_active=True)

    def padded(self, multiple: int) -> tuple[int, ModelShape]:
        """The vocabulary, and the shape with a vocabulary rounded up to a multiple; parameter counts stay unpadded."""
        return self.vocab, dataclasses.replace(self, vocab=round_up(self.vocab, multiple))

    def _total(self, *, is_active: bool) -> int:
        blocks = sum(count * block.num_parameters(self.hidden, is_active=is_active) for count, block in self.stacks)
        return self.embedding + blocks + self.head
