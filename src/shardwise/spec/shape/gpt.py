"""The configuration of our GPT, named sizes, and the number of parameters. Arithmetic only: no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.shape.model import Attention, Block, Experts, Mlp, ModelShape
from shardwise.spec.text import did_you_mean

#: Mixtral's choice. Without experts another value has no effect, and is refused.
DEFAULT_EXPERTS_PER_TOKEN = 2


def _check_int(problems: list[str], name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        problems.append(f"{name}={value!r} is not a whole number of at least {least}")


def _count(items: list[str], noun: str = "problem") -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _meant(name: str, known: Any) -> str:
    return "\n " + (did_you_mean(name, known) or f" Use one of: {', '.join(known)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT and the choices that change its parameters or its forward.

    Attributes:
        num_layers: Number of blocks.
        hidden: Width of the residual stream.
        num_heads: Attention heads; divides ``hidden``.
        vocab_size: Number of token ids.
        seq_len: Longest sequence, the number of learned positions.
        ffn: Width of the feed-forward; ``None`` is ``4 * hidden``.
        tied: The output projection is the token embedding, one parameter with two names.
        bias: Linear layers and norms have biases.
        dropout: Dropout probability of embeddings, attention weights and the two outputs of a block.
        num_experts: Experts of the mixture that is each block's feed-forward; 0: a plain feed-forward.
        experts_per_token: Experts that a token is sent to.
        activation_checkpointing: Store only each block's input in forward, and recompute the block in backward.

    Raises:
        ConfigError: Values are wrong; every problem is listed.
    """

    num_layers: int
    hidden: int
    num_heads: int
    vocab_size: int
    seq_len: int
    ffn: int | None = None
    tied: bool = True
    bias: bool = True
    dropout: float = 0.0
    num_experts: int = 0
    experts_per_token: int = DEFAULT_EXPERTS_PER_TOKEN
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        problems = []
        for name in ("num_layers", "hidden", "num_heads", "vocab_size", "seq_len"):
            _check_int(problems, name, getattr(self, name), least=1)
        if self.ffn is not None:
            _check_int(problems, "ffn", self.ffn, least=1)
        problems.extend(
            f"{name}={getattr(self, name)!r} is not true or false"
            for name in ("tied", "bias", "activation_checkpointing")
            if not isinstance(getattr(self, name), bool)
        )
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout!r} is not a number from 0 up to, not including, 1")
        _check_int(problems, "num_experts", self.num_experts, least=0)
        _check_int(problems, "experts_per_token", self.experts_per_token, least=1)
        if not problems:
            if self.hidden % self.num_heads:
                problems.append(f"num_heads={self.num_heads} does not divide hidden={self.hidden}")
            if self.num_experts == 0 and self.experts_per_token != DEFAULT_EXPERTS_PER_TOKEN:
                problems.append(f"experts_per_token={self.experts_per_token} means nothing without num_experts")
            if 0 < self.num_experts < self.experts_per_token:
                problems.append(
                    f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}"
                )
        if problems:
            raise ConfigError(
                f"the model's configuration has {_count(problems)}:\n"
                + "".join(f"  - {problem}\n" for problem in problems)
                + "  Correct these fields of the model."
            )

    @property
    def ffn_hidden(self) -> int:
        """Width of the feed-forward; ``4 * hidden`` if ``ffn`` is ``None``."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once.

        With biases, ``ffn = 4h``, tied and without experts this is ``L(12h^2 + 13h) + (V + s)h + 2h``
        (Narayanan et al., SC'21, section 5.1, gives the same up to the final norm); untied adds ``Vh``, and without
        biases ``13h`` becomes ``2h`` and ``2h`` becomes ``h``.
        """
        h, f, b = self.hidden, self.ffn_hidden, int(self.bias)
        norm = h + b * h
        attention = 4 * h * h + b * 4 * h
        mlp = 2 * h * f + b * (f + h)
        if self.num_experts:
            mlp = self.num_experts * mlp + h * self.num_experts
        block = 2 * norm + attention + mlp
        embeddings = (self.vocab_size * (1 if self.tied else 2) + self.seq_len) * h
        return self.num_layers * block + embeddings + norm


#: Named sizes. ``gpt2`` to ``gpt2-xl``: Radford et al. 2019. ``gpt-175b``: Brown et al. 2020 with the 50K vocabulary
#: under which PyTorch's FSDP was measured; ``gpt-1t``: the same source, 1008B parameters (pytorch.org/blog,
#: "Introducing PyTorch Fully Sharded Data Parallel API", 2022; Narayanan et al., SC'21, table 1).
PRESETS: dict[str, GPTConfig] = {
    "gpt-nano": GPTConfig(num_layers=5, hidden=32, num_heads=2, vocab_size=64, seq_len=16),
    "gpt-tiny": GPTConfig(num_layers=6, hidden=64, num_heads=4, vocab_size=256, seq_len=64),
    "gpt-demo": GPTConfig(num_layers=6, hidden=128, num_heads=4, vocab_size=256, seq_len=128),
    "gpt2": GPTConfig(num_layers=12, hidden=768, num_heads=12, vocab_size=50257, seq_len=1024),
    "gpt2-medium": GPTConfig(num_layers=24, hidden=1024, num_heads=16, vocab_size=50257, seq_len=1024),
    "gpt2-large": GPTConfig(num_layers=36, hidden=1280, num_heads=20, vocab_size=50257, seq_len=1024),
    "gpt2-xl": GPTConfig(num_layers=48, hidden=1600, num_heads=25, vocab_size=50257, seq_len=1024),
    "gpt-175b": GPTConfig(num_layers=96, hidden=12288, num_heads=96, vocab_size=50000, seq_len=2048),
    "gpt-1t": GPTConfig(num_layers=128, hidden=25600, num_heads=160, vocab_size=50000, seq_len=2048),
}


def gpt_config(preset: str | GPTConfig, **overrides: Any) -> GPTConfig:
    """The configuration of ``preset`` with some fields replaced.

    Raises:
        ConfigError: The preset or a field is unknown, or values are wrong; every problem is listed.
    """
    if isinstance(preset, GPTConfig):
        base = preset
    elif preset in PRESETS:
        base = PRESETS[preset]
    else:
        raise ConfigError(f"unknown model preset {preset!r}.{_meant(str(preset), PRESETS)}")
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    unknown = [name for name in overrides if name not in fields]
    if unknown:
        lines = "".join(f"  - {name!r}{_meant(name, fields)}\n" for name in unknown)
        raise ConfigError(f"the model's configuration has {_count(unknown, 'unknown field')}:\n{lines}".rstrip())
    return dataclasses.replace(base, **overrides)


def gpt_shape(config: GPTConfig, name: str) -> ModelShape:
    """The shape of our GPT (``sw.models.gpt``)."""
    h, bias = config.hidden, config.bias
    mlp = Mlp(ffn=config.ffn_hidden, has_bias=bias, activation="gelu")
    block = Block(
        attention=Attention(
            heads=config.num_heads,
            head_dim=config.head_dim,
            kv_heads=config.num_heads,
            has_qkv_bias=bias,
            has_out_bias=bias,
            is_fused=True,
            has_dropout=config.dropout > 0,
        ),
        feed_forward=Experts(count=config.num_experts, per_token=config.experts_per_token, mlp=mlp)
        if config.num_experts
        else mlp,
        has_norm_bias=bias,
        norm="layer",
        has_dropout=config.dropout > 0,
    )
    return ModelShape(
        name=name,
        family="gpt",
        hidden=h,
        vocab=config.vocab_size,
        stacks=((config.num_layers, block),),
        seq_len=config.seq_len,
        embedding=(config.vocab_size + config.seq_len) * h,
        head=(1 + bias) * h + (0 if config.tied else config.vocab_size * h),
        is_tied=config.tied,
        norm="layer",
        has_dropout=config.dropout > 0,
    )
