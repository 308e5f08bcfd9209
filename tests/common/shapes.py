"""Small models of transformers on meta tensors, one for each family of shapes, and what they are called with."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

#: Sizes by the names that configurations have for them; no two are equal, so that none can stand for another.
_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 136,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "image_size": 32,
    "patch_size": 8,
}

_OTHER_NAMES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 136},
    "t5": {
        "num_layers": 2,
        "num_decoder_layers": 3,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_heads": 8,
        "vocab_size": 136,
        "decoder_start_token_id": 0,
    },
    "opt": {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_attention_heads": 4,
        "vocab_size": 136,
        "max_position_embeddings": 32,
    },
}

_CLASSES = {"t5": "T5ForConditionalGeneration", "bert": "BertForMaskedLM", "vit": "ViTForImageClassification"}


def small_config(family: str, **changes: Any) -> Any:
    """A configuration with few parameters."""
    config = transformers.AutoConfig.for_model(family)
    fields = config.to_dict()
    sizes = _OTHER_NAMES.get(family) or {name: value for name, value in _SIZES.items() if name in fields}
    if fields.get("layer_types"):
        sizes["layer_types"] = fields["layer_types"][:3]
    if "qk_rope_head_dim" in fields:  # what is rotated is what transformers calls head_dim there
        sizes |= {
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 40,
            "q_lora_rank": 28,
            "kv_lora_rank": 12,
        }
        sizes |= {"first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 2, "topk_group": 1}
        sizes |= {"num_key_value_heads": 8}
    if family == "olmoe":
        sizes.pop("head_dim", None)
    return transformers.AutoConfig.for_model(family, **{**sizes, **changes})


def on_meta(config: Any, class_name: str = "") -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the content of its ``config.json``."""
    return built(config, class_name, device="meta")


def built(config: Any, class_name: str = "", *, device: str = "cpu") -> tuple[nn.Module, dict[str, Any]]:
    """The same on another device."""
    name = class_name or _CLASSES.get(config.model_type, "")
    with torch.device(device):
        model = getattr(transformers, name)(config) if name else transformers.AutoModelForCausalLM.from_config(config)
    return model, {**config.to_dict(), "architectures": [type(model).__name__]}


def example_batch(family: str, *, samples: int = 2, seq_len: int = 32) -> dict[str, Any]:
    """What the model is called with."""
    if family == "vit":
        return {"pixel_values": torch.zeros(samples, 3, 32, 32), "labels": torch.zeros(samples, dtype=torch.int64)}
    ids = torch.zeros(samples, seq_len, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    return batch if family == "bert" else {**batch, "use_cache": False}
