"""The shape of a model from its Hugging Face ``config.json``, by arithmetic; one function for each kind of block."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.shape.model import Attention, Block, Experts, Latent, Mlp, ModelShape
from shardwise.spec.text import did_you_mean

Config = Mapping[str, Any]


def from_config(config: Config, name: str = "") -> ModelShape:
    """The shape of the model that a ``config.json`` describes.

    The head is the one that ``architectures`` names. Without that field it is a language-modelling head (ViT: a
    classification head). Missing fields have transformers' defaults. For a model of text and images only the language
    model is counted, without the image encoder, and the name says so.

    Args:
        config: The file's content.
        name: Name of the model in tables; ``""``: its family.

    Raises:
        ConfigError: The family is not known, or a field is missing.
    """
    family = str(config.get("model_type", ""))
    if family not in FAMILIES and (text := _language_model(config, family)) is not None:
        return from_config(text, f"{name or family} (language model alone)")
    if family not in FAMILIES and any(str(each).endswith("ForCausalLM") for each in config.get("architectures") or ()):
        return _unknown_decoder(config, name or family)
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES) or f" Known are: {', '.join(FAMILIES)}."
        raise ConfigError(
            f"model_type={family!r}: its shape is not known.\n "
            f"{hint}\n  Any other model: name a TrainSpec that makes it with `shardwise plan --spec`, or pass it to"
            " sw.trace_model(), which runs it on meta tensors."
        )
    try:
        return FAMILIES[family](config, name or family)
    except KeyError as error:
        raise ConfigError(
            f"the configuration of {name or family} has no field {error.args[0]!r}.\n"
            "  Save it with config.to_json_file(path, use_diff=False), which writes every field."
        ) from None


#: Integer fields that the configuration of an unknown decoder needs, so that its shape can be counted as a Llama's.
_USUAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")

#: Parts of field names that show that the blocks are not a Llama's: recurrences, convolutions, encoders.
_UNUSUAL = ("mamba", "ssm", "conv", "linear_", "lru_", "recurrent", "type_vocab", "per_layer", "indexer", "index_topk")


def _unknown_decoder(config: Config, name: str) -> ModelShape:
    """The shape of a causal language model of an unknown family, counted as a Llama's; the name says so.

    With ``kv_lora_rank`` in its configuration the model is counted as a DeepSeek-V3.

    Raises:
        ConfigError: A field of ``_USUAL`` is missing, or a field shows that the blocks are of another kind.
    """
    family = config.get("model_type", "")
    unusual = [key for key in config if any(part in key for part in _UNUSUAL) and config[key]]
    if unusual:
        raise ConfigError(
            f"model_type={family!r}: its shape is not known, and {unusual[0]} says that its blocks are not attention"
            " and feed-forwards alone.\n  Pass the model to sw.trace_model(), which runs it on meta tensors."
        )
    missing = [key for key in _USUAL if not isinstance(config.get(key), int)]
    if missing:
        raise ConfigError(
            f"model_type={family!r}: its shape is not known, and its configuration has no"
            f" {', '.join(missing)}, without which nothing can be counted.\n  Add these fields to it, or pass the model"
            " to sw.trace_model(), which runs it on meta tensors."
        )
    if isinstance(config.get("kv_lora_rank"), int):
        return _latent(config, f"{name} (counted as a DeepSeek-V3)")
    norm = "head" if config.get("use_qk_norm") else ""
    plain = not str(config.get("hidden_act", "silu")).startswith(("silu", "swish"))
    return _llama_like(qk_norm=norm, gated=not plain)(config, f"{name} (counted as a Llama)")


#: For families of text and images whose files do not name the family of their language model: that family.
_LANGUAGE_FAMILIES = {"gemma3": "gemma3_text", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}

#: Defaults of transformers' ``Gemma3TextConfig``, for the fields that ``text_config`` of a published gemma3 leaves out.
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def _language_model(config: Config, family: str) -> Config | None:
    """The configuration of the language model inside a model of text and images; ``None`` if no known one is found."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):  # older files have the language model's fields at the top, next to vision_config
        text = config if "vision_config" in config else {}
    language = _LANGUAGE_FAMILIES.get(family) or str(text.get("model_type", ""))
    if language not in FAMILIES or not text:
        return None
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    found: dict[str, Any] = {**tied, **text, "model_type": language}
    if language != "gemma3_text":
        return found
    found = {**_GEMMA3, **found}
    if not found.get("layer_types"):
        pattern = found.get("sliding_window_pattern", 6)
        found["layer_types"] = [
            "full_attention" if layer % pattern == 0 else "sliding_attention"
            for layer in range(1, found["num_hidden_layers"] + 1)
        ]
    return found


def _runs(blocks: Iterable[Block]) -> tuple[tuple[int, Block], ...]:
    return tuple((len(list(equal)), block) for block, equal in itertools.groupby(blocks))


def _causal(
    config: Config,
    name: str,
    blocks: Iterable[Block],
    *,
    norm_bias: bool = False,
    tied: bool = False,
    positions: int = 0,
    norm: str = "rms",
    drops: bool = False,
) -> ModelShape:
    """A causal language model, or a classifier made of one: an embedding, blocks, a norm, a head."""
    h, vocab, classes = config["hidden_size"], config["vocab_size"], _num_classes(config)
    is_tied = bool(config.get("tie_word_embeddings", tied)) and not classes
    return ModelShape(
        name=name,
        family=str(config["model_type"]),
        hidden=h,
        vocab=classes or vocab,
        stacks=_runs(blocks),
        seq_len=int(config.get("max_position_embeddings") or 2048),
        embedding=(vocab + positions) * h,
        head=(1 + norm_bias) * h + (0 if is_tied else (classes or vocab) * h),
        is_tied=is_tied,
        is_pooled=classes > 0,
        norm=norm,
        has_dropout=drops,
    )


def _num_classes(config: Config) -> int:
    """The number of classes of a decoder that classifies texts; 0 for a language model."""
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith("ForSequenceClassification"):
        return _num_labels(config)
    if re.search(r"For(?!CausalLM|ConditionalGeneration)[A-Z]", architecture):
        raise _unknown_head(architecture, "language models and ...ForSequenceClassification")
    return 0


def _num_labels(config: Config) -> int:
    return len(config.get("id2label") or {0: "", 1: ""})


def _windows(config: Config, default: str = "") -> list[int | None]:
    """For each layer, the size of its attention window in positions; ``None``: all positions."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    types = config.get("layer_types")
    if types:
        return [window if kind == "sliding_attention" else None for kind in types]
    uses = config.get("use_sliding_window", default == "all")
    return [window if uses else None] * layers


def _llama_like(
    *,
    qkv_bias: bool | str = "attention_bias",
    out_bias: bool | str = "attention_bias",
    qk_norm: str = "",
    num_norms: int = 2,
    tied: bool = False,
    window: str = "",
    fused: str = "",
    norm: str = "rms",
    plain: str = "",
    gated: bool = True,
) -> Callable[[Config, str], ModelShape]:
    """Make the function that computes shapes of a family with RMS norms, rotary positions and gated feed-forwards.

    Args:
        qkv_bias: Whether queries, keys and values have biases, or the name of the field with the answer. If the file
            lacks ``attention_bias``, gpt_oss has biases and every other family has none.
        out_bias: The same for the output projection.
        qk_norm: ``"head"``: a norm over each head of queries and keys; ``"all"``: over all heads together; ``""``:
            none.
        num_norms: Norms of a block.
        tied: Whether the head shares the embedding's weight if the file does not say.
        window: ``"all"``: every layer has the attention window if the file does not say which layers have it.
        fused: Projections that are one matrix product. ``"all"``: queries, keys and values, and also the two up
            projections. ``"mlp"``: only the two up projections.
        norm: Kind of the norms, as in ``Block``.
        plain: Reason why no fused kernel computes the attention, as in ``Attention``.
        gated: Whether the feed-forwards are gated.
    """

    def says(config: Config, what: object) -> bool:
        default = what == "attention_bias" and config["model_type"] == "gpt_oss"
        return bool(config.get(what, default)) if isinstance(what, str) else bool(what)

    def shape(config: Config, name: str) -> ModelShape:
        h, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or h // heads
        norms = {"": 0, "head": 2 * head_dim, "all": (heads + kv_heads) * head_dim}[qk_norm]
        blocks = [
            Block(
                attention=Attention(
                    heads=heads,
                    head_dim=head_dim,
                    kv_heads=kv_heads,
                    has_qkv_bias=says(config, qkv_bias),
                    has_out_bias=says(config, out_bias),
                    norm_numel=norms,
                    window=seen,
                    extra=heads if config["model_type"] == "gpt_oss" else 0,
                    has_rotary=True,
                    is_fused=fused == "all",
                    has_dropout=bool(config.get("attention_dropout")),
                    rotary_share=_rotary_share(config),
                    joins_rotary=config["model_type"] in {"phi3", "glm4"},
                    plain=plain,
                ),
                feed_forward=_feed_forward(
                    config, layer, has_bias=says(config, "mlp_bias"), is_fused=bool(fused), gated=gated
                ),
                num_norms=num_norms,
                num_last_norms=num_norms // 2 if num_norms == 4 else 0,
                norm=norm,
            )
            for layer, seen in enumerate(_windows(config, window))
        ]
        return _causal(config, name, blocks, tied=tied, norm=norm)

    return shape


def _latent(config: Config, name: str) -> ModelShape:
    """The shape of a DeepSeek-V3: multi-head latent attention, and mixtures of experts after the first layers."""
    heads, rotary, q_rank = config["num_attention_heads"], config["qk_rope_head_dim"], config.get("q_lora_rank") or 0
    latent = Latent(q_rank=q_rank, kv_rank=config["kv_lora_rank"], rotary_dim=rotary, v_dim=config["v_head_dim"])
    attention = Attention(
        heads=heads,
        head_dim=config["qk_nope_head_dim"] + rotary,
        kv_heads=heads,
        norm_numel=q_rank + latent.kv_rank,
        has_rotary=True,
        joins_rotary=True,
        rotary_share=rotary / (config["qk_nope_head_dim"] + rotary),
        latent=latent,
    )
    layers = range(config["num_hidden_layers"])
    forward = (_feed_forward(config, layer, has_bias=False, is_fused=False) for layer in layers)
    return _causal(config, name, [Block(attention=attention, feed_forward=each) for each in forward])


#: Activations of ``Mlp`` by transformers' names. Names that are not listed cost as much as ``"gelu"``, one kernel.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "relu": "relu",
}


def _rotary_share(config: Config, default: float = 1.0) -> float:
    """The fraction of each head that is rotated."""
    parameters = config.get("rope_parameters") or {}
    found = config.get("partial_rotary_factor") or config.get("rotary_pct") or parameters.get("partial_rotary_factor")
    return float(found or default)


def _activation(config: Config, default: str) -> str:
    name = config.get("hidden_act") or config.get("hidden_activation") or config.get("activation_function") or default
    return _ACTIVATIONS.get(str(name), "gelu")


def _feed_forward(config: Config, layer: int, *, has_bias: bool, is_fused: bool, gated: bool = True) -> Mlp | Experts:
    """The feed-forward of a layer: a mixture of experts if the configuration has one in this layer."""
    activation = _activation(config, "silu")
    count = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    step = config.get("decoder_sparse_step", 1)
    is_dense = not count or layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % step
    is_dense = is_dense or layer < config.get("first_k_dense_replace", 0)
    if is_dense:
        return Mlp(
            ffn=config["intermediate_size"],
            is_gated=gated,
            has_bias=has_bias,
            activation=activation,
            is_fused=is_fused,
        )
    is_oss = config["model_type"] == "gpt_oss"
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    has_gate = bool(config.get("shared_expert_intermediate_size"))
    shared = config.get("shared_expert_intermediate_size") or ffn * (config.get("n_shared_experts") or 0)
    return Experts(
        count=count,
        per_token=config["num_experts_per_tok"],
        mlp=Mlp(
            ffn=ffn,
            is_gated=gated,
            has_bias=is_oss,
            activation="clamped" if is_oss else activation,
            is_fused=True,
        ),
        shared=Mlp(ffn=shared, is_gated=True, activation=activation, is_replicated=has_gate) if shared else None,
        has_shared_gate=has_gate,
        has_router_bias=is_oss,
        has_wide_router="n_routed_experts" in config,
        has_wide_weights="n_routed_experts" in config or config["model_type"] == "mixtral",
    )


def _plain_block(
    h: int,
    heads: int,
    ffn: int,
    *,
    is_causal: bool,
    bias: bool = True,
    qkv_bias: bool = True,
    mlp_bias: bool = True,
    has_rotary: bool = False,
    is_fused: bool = False,
    activation: str,
    attention_dropout: float | None,
    dropout: float | None,
) -> Block:
    """A block of GPT-2, NeoX, OPT, BERT or ViT: layer norms, one projection up, biases."""
    return Block(
        attention=Attention(
            heads=heads,
            head_dim=h // heads,
            kv_heads=heads,
            has_qkv_bias=qkv_bias,
            has_out_bias=bias,
            is_causal=is_causal,
            has_rotary=has_rotary,
            is_fused=is_fused,
            has_dropout=bool(attention_dropout),
        ),
        feed_forward=Mlp(ffn=ffn, has_bias=mlp_bias, activation=activation),
        has_norm_bias=True,
        norm="layer",
        has_dropout=bool(dropout),
    )


def _gpt2(config: Config, name: str) -> ModelShape:
    h, layers = config["n_embd"], config["n_layer"]
    block = _plain_block(
        h,
        config["n_head"],
        config.get("n_inner") or 4 * h,
        is_causal=True,
        is_fused=True,
        activation=_activation(config, "gelu_new"),
        attention_dropout=config.get("attn_pdrop", 0.1),
        dropout=config.get("resid_pdrop", 0.1),
    )
    common = {
        **config,
        "hidden_size": h,
        "max_position_embeddings": config["n_positions"],
    }
    return _causal(
        common,
        name,
        [block] * layers,
        norm_bias=True,
        tied=True,
        positions=config["n_positions"],
        norm="layer",
        drops=bool(config.get("embd_pdrop", 0.1)),
    )


def _neox(config: Config, name: str) -> ModelShape:
    bias = bool(config.get("attention_bias", True))
    block = _plain_block(
        config["hidden_size"],
        config["num_attention_heads"],
        config["intermediate_size"],
        is_causal=True,
        bias=bias,
        qkv_bias=bias,
        has_rotary=True,
        is_fused=True,
        activation=_activation(config, "gelu"),
        attention_dropout=config.get("attention_dropout"),
        dropout=config.get("hidden_dropout"),
    )
    attention = dataclasses.replace(block.attention, rotary_share=_rotary_share(config, 0.25), joins_rotary=True)
    is_parallel = bool(config.get("use_parallel_residual", True))
    block = dataclasses.replace(block, attention=attention, is_parallel=is_parallel)
    return _causal(
        config,
        name,
        [block] * config["num_hidden_layers"],
        norm_bias=True,
        norm="layer",
        drops=bool(config.get("hidden_dropout")),
    )


def _opt(config: Config, name: str) -> ModelShape:
    h, heads, bias = config["hidden_size"], config["num_attention_heads"], bool(config.get("enable_bias", True))
    if config.get("word_embed_proj_dim", h) != h or not config.get("do_layer_norm_before", True):
        raise ConfigError(
            f"{name}: OPT with projected embeddings or norms after each part (350m alone has them) is not known.\n"
            "  Pass the model itself to sw.trace_model(), which runs it on meta tensors."
        )
    block = _plain_block(
        h,
        heads,
        config["ffn_dim"],
        is_causal=True,
        bias=bias,
        qkv_bias=bias,
        mlp_bias=bias,
        activation=_activation(config, "relu"),
        attention_dropout=config.get("attention_dropout"),
        dropout=config.get("dropout", 0.1),
    )
    positions = config["max_position_embeddings"] + 2  # the first two rows are never read
    return _causal(
        config,
        name,
        [block] * config["num_hidden_layers"],
        norm_bias=True,
        tied=True,
        positions=positions,
        norm="layer",
    )


def _t5(config: Config, name: str) -> ModelShape:
    h, heads, vocab = config["d_model"], config["num_heads"], config["vocab_size"]
    if _num_classes(config):
        raise _unknown_head(config["architectures"][0], "T5ForConditionalGeneration")
    projection, drops = str(config.get("feed_forward_proj", "relu")), bool(config.get("dropout_rate", 0.1))
    is_gated = projection.startswith("gated")
    activation = "gelu_new" if projection == "gated-gelu" else projection.rpartition("-")[2]
    mlp = Mlp(
        ffn=config["d_ff"],
        is_gated=is_gated,
        activation=_ACTIVATIONS.get(activation, "gelu"),
        has_dropout=drops,
    )
    cross = Attention(heads=heads, head_dim=config["d_kv"], kv_heads=heads, is_causal=False, has_dropout=drops)
    encoding = dataclasses.replace(cross, has_position_bias=True)
    decoding = dataclasses.replace(encoding, is_causal=True)
    table = config.get("relative_attention_num_buckets", 32) * heads  # in the first block of each stack
    encoders = [
        Block(attention=encoding, feed_forward=mlp, extra=0 if i else table, norm="t5", has_dropout=drops)
        for i in range(config["num_layers"])
    ]
    decoders = [
        Block(
            attention=decoding,
            feed_forward=mlp,
            cross=cross,
            num_norms=3,
            extra=0 if i else table,
            norm="t5",
            has_dropout=drops,
        )
        for i in range(config.get("num_decoder_layers") or config["num_layers"])
    ]
    is_tied = bool(config.get("tie_word_embeddings", True))
    return ModelShape(
        name=name,
        family="t5",
        hidden=h,
        vocab=vocab,
        stacks=_runs([*encoders, *decoders]),
        seq_len=int(config.get("n_positions") or 512),
        embedding=vocab * h,
        head=2 * h + (0 if is_tied else vocab * h),  # the norms at the end of both stacks
        is_tied=is_tied,
        num_encoder_blocks=len(encoders),
        norm="t5",
        has_dropout=drops,
    )


def _bert(config: Config, name: str) -> ModelShape:
    h, vocab = config["hidden_size"], config["vocab_size"]
    block = _plain_block(
        h,
        config["num_attention_heads"],
        config["intermediate_size"],
        is_causal=False,
        activation=_activation(config, "gelu"),
        attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
        dropout=config.get("hidden_dropout_prob", 0.1),
    )
    positions, types = config["max_position_embeddings"], config.get("type_vocab_size", 2)
    architecture = (config.get("architectures") or ["BertForMaskedLM"])[0]
    heads = {"BertModel": h * h + h, "BertForMaskedLM": h * h + h + 2 * h + vocab}
    labels = _num_labels(config)
    heads["BertForSequenceClassification"] = heads["BertModel"] + labels * (h + 1)
    return ModelShape(
        name=name,
        family="bert",
        hidden=h,
        vocab=vocab if architecture == "BertForMaskedLM" else labels,
        stacks=((config["num_hidden_layers"], block),),
        seq_len=positions,
        embedding=(vocab + positions + types + 2) * h,
        head=_head(architecture, heads),
        is_tied=architecture == "BertForMaskedLM",
        is_pooled=architecture != "BertForMaskedLM",
        head_dense=h,
        has_norm_before=True,
        norm="layer" if architecture == "BertForMaskedLM" else "",
        has_dropout=bool(config.get("hidden_dropout_prob", 0.1)),
    )


def _vit(config: Config, name: str) -> ModelShape:
    h, patch = config["hidden_size"], config["patch_size"]
    block = _plain_block(
        h,
        config["num_attention_heads"],
        config["intermediate_size"],
        is_causal=False,
        qkv_bias=bool(config.get("qkv_bias", True)),
        activation=_activation(config, "gelu"),
        attention_dropout=config.get("attention_probs_dropout_prob"),
        dropout=config.get("hidden_dropout_prob"),
    )
    patches = (config["image_size"] // patch) ** 2
    labels = _num_labels(config)
    architecture = (config.get("architectures") or ["ViTForImageClassification"])[0]
    heads = {"ViTForImageClassification": 2 * h + labels * (h + 1), "ViTModel": 2 * h + h * h + h}
    return ModelShape(
        name=name,
        family="vit",
        hidden=h,
        vocab=labels,
        stacks=((config["num_hidden_layers"], block),),
        seq_len=patches + 1,
        # the class token, a position for it and for each patch, and the projection of patches with its bias
        embedding=(1 + patches + 1 + config.get("num_channels", 3) * patch * patch + 1) * h,
        head=_head(architecture, heads),
        patch_numel=config.get("num_channels", 3) * patch * patch,
        is_pooled=True,
        head_dense=h if architecture == "ViTModel" else 0,
        norm="layer",
        has_dropout=bool(config.get("hidden_dropout_prob")),
    )


def _head(architecture: str, heads: Mapping[str, int]) -> int:
    if architecture not in heads:
        raise _unknown_head(architecture, ", ".join(heads), did_you_mean(architecture, heads))
    return heads[architecture]


def _unknown_head(architecture: str, known: str, hint: str = "") -> ConfigError:
    return ConfigError(
        f"architectures={architecture!r}: its head is not known.{hint}\n"
        f"  Known are {known}; or pass the model itself to sw.trace_model()."
    )


#: The function that computes the shape, by ``model_type``.
FAMILIES: dict[str, Callable[[Config, str], ModelShape]] = {
    "llama": _llama_like(),
    "mistral": _llama_like(qkv_bias=False, out_bias=False, window="all"),
    "qwen2": _llama_like(qkv_bias=True, out_bias=False),
    "qwen3": _llama_like(qk_norm="head"),
    "phi3": _llama_like(qkv_bias=False, out_bias=False, window="all", fused="all"),
    "granite": _llama_like(),
    "olmo2": _llama_like(qk_norm="all", norm="wide"),
    "glm4": _llama_like(qkv_bias="attention_bias", out_bias=False, num_norms=4, fused="mlp"),
    "gemma": _llama_like(tied=True, norm="wide"),
    "gemma2": _llama_like(num_norms=4, tied=True, norm="wide", plain="capped"),
    "gemma3_text": _llama_like(num_norms=4, qk_norm="head", tied=True, norm="wide"),
    "mixtral": _llama_like(qkv_bias=False, out_bias=False, window="all"),
    "qwen2_moe": _llama_like(qkv_bias="qkv_bias", out_bias=False),
    "qwen3_moe": _llama_like(qk_norm="head"),
    "olmoe": _llama_like(qk_norm="all"),
    "gpt_oss": _llama_like(norm="wide", plain="sinks"),
    "deepseek_v3": _latent,
    **dict.fromkeys(("cwm", "ministral", "ministral3", "smollm3"), _llama_like()),
    **dict.fromkeys(("exaone4", "hunyuan_v1_dense"), _llama_like(qk_norm="head")),
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "opt": _opt,
    "t5": _t5,
    "bert": _bert,
    "vit": _vit,
}
