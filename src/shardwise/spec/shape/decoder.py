"""Shapes of language models by their sizes, and of our GPT."""

from __future__ import annotations

from shardwise.spec.errors import ConfigError
from shardwise.spec.shape.gpt import GPTConfig
from shardwise.spec.shape.model import Attention, Block, Experts, Mlp, ModelShape


def decoder(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    seq_len: int,
    kv_heads: int,
    ffn: int,
    is_gated: bool,
    is_tied: bool,
) -> ModelShape:
    """As ``ModelShape.decoder``."""
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": vocab,
        "seq_len": seq_len,
    }
    problems = [
        f"{name}={value!r}; expected a whole number of at least 1"
        for name, value in sizes.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    if not problems and hidden % heads:
        problems.append(f"heads={heads} does not divide hidden={hidden}")
    if not problems and heads % kv_heads:
        problems.append(f"kv_heads={kv_heads} does not divide heads={heads}")
    if problems:
        raise ConfigError("ModelShape.decoder:\n" + "\n".join(f"  - {problem}" for problem in problems))
    if not is_gated and kv_heads == heads:
        config = GPTConfig(
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            vocab_size=vocab,
            seq_len=seq_len,
            ffn=ffn,
            tied=is_tied,
        )
        return gpt_shape(config, "decoder")
    block = Block(
        attention=Attention(heads=heads, head_dim=hidden // heads, kv_heads=kv_heads, has_rotary=True),
        feed_forward=Mlp(ffn=ffn, is_gated=is_gated, activation="silu" if is_gated else "gelu"),
    )
    return ModelShape(
        name="decoder",
        family="llama",
        hidden=hidden,
        vocab=vocab,
        stacks=((layers, block),),
        seq_len=seq_len,
        embedding=vocab * hidden,
        head=hidden + (0 if is_tied else vocab * hidden),
        is_tied=is_tied,
    )


def gpt_shape(config: GPTConfig, name: str = "gpt") -> ModelShape:
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
