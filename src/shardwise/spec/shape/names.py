"""Well-known models by name, with the fields of their published ``config.json``.

Sources: the model cards and configurations on the Hugging Face hub under the organisations meta-llama, mistralai, Qwen,
google, google-bert, EleutherAI, facebook and google-t5; T5 also Raffel et al. 2020. GPT-2 and GPT-3 are presets of our
GPT (``spec.shape.gpt``): ``gpt2`` means the same model in ``plan`` and in ``train``.
"""

from __future__ import annotations

from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.shape.families import from_config
from shardwise.spec.shape.model import ModelShape
from shardwise.spec.text import did_you_mean


def _causal(family: str, *sizes: int, **more: Any) -> dict[str, Any]:
    hidden, layers, heads, kv, ffn, vocab, positions = sizes
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


def _oss(layers: int, experts: int) -> dict[str, Any]:
    return _causal(
        *("gpt_oss", 2880, layers, 64, 8, 2880, 201088, 131072),
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


def _t5(width: int, layers: int, heads: int, head_dim: int, ffn: int) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": width,
        "d_kv": head_dim,
        "d_ff": ffn,
        "num_heads": heads,
        "num_layers": layers,
        "vocab_size": 32128,
    }


def _bert(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    }


def _vit(hidden: int, layers: int, heads: int, patch: int) -> dict[str, Any]:
    return {
        "model_type": "vit",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "image_size": 224,
        "patch_size": patch,
        "id2label": dict.fromkeys(range(1000), ""),
    }


_TIED = {"tie_word_embeddings": True}
_QWEN3 = {"head_dim": 128}

#: Configurations by name.
KNOWN: dict[str, dict[str, Any]] = {
    "llama-2-7b": _causal("llama", 4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _causal("llama", 5120, 40, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _causal("llama", 8192, 80, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _causal("llama", 4096, 32, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _causal("llama", 8192, 80, 64, 8, 28672, 128256, 8192),
    "llama-3.1-8b": _causal("llama", 4096, 32, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _causal("llama", 8192, 80, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": _causal("llama", 16384, 126, 128, 8, 53248, 128256, 131072),
    "llama-3.2-1b": _causal("llama", 2048, 16, 32, 8, 8192, 128256, 131072, **_TIED),
    "llama-3.2-3b": _causal("llama", 3072, 28, 24, 8, 8192, 128256, 131072, **_TIED),
    "mistral-7b": _causal("mistral", 4096, 32, 32, 8, 14336, 32000, 32768, sliding_window=4096),
    "mixtral-8x7b": _causal(
        "mixtral", 4096, 32, 32, 8, 14336, 32000, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "mixtral-8x22b": _causal(
        "mixtral", 6144, 56, 48, 8, 16384, 32000, 65536, num_local_experts=8, num_experts_per_tok=2
    ),
    "gpt-oss-20b": _oss(24, 32),
    "gpt-oss-120b": _oss(36, 128),
    "deepseek-v3": _causal(
        *("deepseek_v3", 7168, 61, 128, 128, 18432, 129280, 163840),
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    "qwen2.5-0.5b": _causal("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, **_TIED),
    "qwen2.5-1.5b": _causal("qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, **_TIED),
    "qwen2.5-3b": _causal("qwen2", 2048, 36, 16, 2, 11008, 151936, 32768, **_TIED),
    "qwen2.5-7b": _causal("qwen2", 3584, 28, 28, 4, 18944, 152064, 131072),
    "qwen2.5-14b": _causal("qwen2", 5120, 48, 40, 8, 13824, 152064, 131072),
    "qwen2.5-32b": _causal("qwen2", 5120, 64, 40, 8, 27648, 152064, 131072),
    "qwen2.5-72b": _causal("qwen2", 8192, 80, 64, 8, 29568, 152064, 131072),
    "qwen3-0.6b": _causal("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-1.7b": _causal("qwen3", 2048, 28, 16, 8, 6144, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-4b": _causal("qwen3", 2560, 36, 32, 8, 9728, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-8b": _causal("qwen3", 4096, 36, 32, 8, 12288, 151936, 40960, **_QWEN3),
    "qwen3-14b": _causal("qwen3", 5120, 40, 40, 8, 17408, 151936, 40960, **_QWEN3),
    "qwen3-32b": _causal("qwen3", 5120, 64, 64, 8, 25600, 151936, 40960, **_QWEN3),
    "qwen3-30b-a3b": _causal(
        "qwen3_moe",
        2048,
        48,
        32,
        4,
        6144,
        151936,
        40960,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        **_QWEN3,
    ),
    "qwen3-235b-a22b": _causal(
        "qwen3_moe",
        4096,
        94,
        64,
        4,
        12288,
        151936,
        40960,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        **_QWEN3,
    ),
    "gemma-2b": _causal("gemma", 2048, 18, 8, 1, 16384, 256000, 8192, head_dim=256, **_TIED),
    "gemma-7b": _causal("gemma", 3072, 28, 16, 16, 24576, 256000, 8192, head_dim=256, **_TIED),
    "gemma-2-2b": _causal("gemma2", 2304, 26, 8, 4, 9216, 256000, 8192, head_dim=256, **_TIED),
    "gemma-2-9b": _causal("gemma2", 3584, 42, 16, 8, 14336, 256000, 8192, head_dim=256, **_TIED),
    "gemma-2-27b": _causal("gemma2", 4608, 46, 32, 16, 36864, 256000, 8192, head_dim=128, **_TIED),
    "gpt-neox-20b": _causal("gpt_neox", 6144, 44, 64, 64, 24576, 50432, 2048),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    "t5-small": _t5(512, 6, 8, 64, 2048),
    "t5-base": _t5(768, 12, 12, 64, 3072),
    "t5-large": _t5(1024, 24, 16, 64, 4096),
    "t5-3b": _t5(1024, 24, 32, 128, 16384),
    "t5-11b": _t5(1024, 24, 128, 128, 65536),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "vit-base": _vit(768, 12, 12, 16),
    "vit-large": _vit(1024, 24, 16, 16),
    "vit-huge": _vit(1280, 32, 16, 14),
}


#: Suffixes of names on the hub that describe fine-tuning or the file format, and do not change the shape.
_ENDINGS = ("-hf", "-instruct", "-chat", "-it", "-base", "-v0.1")


def plain_name(name: str) -> str:
    """The name in lower case, without the organisation and without parts that do not change the shape.

    ``meta-llama/Meta-Llama-3-8B-Instruct`` and ``meta-llama/Llama-2-7b-chat-hf`` are ``llama-3-8b`` and ``llama-2-7b``.
    """
    plain = name.lower().rpartition("/")[2].removeprefix("meta-")
    while plain not in KNOWN and plain.endswith(_ENDINGS):
        plain = plain[: -len(next(ending for ending in _ENDINGS if plain.endswith(ending)))]
    return plain


def is_known(name: str) -> bool:
    """Whether :func:`known_shape` knows the name."""
    return plain_name(name) in KNOWN


def known_shape(name: str) -> ModelShape:
    """The shape of a well-known model.

    Raises:
        ConfigError: The name is not known.
    """
    plain = plain_name(name)
    if plain not in KNOWN:
        hint = did_you_mean(plain, KNOWN) or f" Known are: {', '.join(KNOWN)}."
        raise ConfigError(f"model {name!r} is not known.\n {hint}\n  Or give the path of a folder with a config.json.")
    return from_config(KNOWN[plain], plain)
