"""Models of others, unchanged from their packages: small random ones from their configurations alone, no download.

Five layers where the family has layers, so that units are released; dropout is on where the family has it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

#: Marks tests whose ranks build these models.
PRELOAD = pytest.mark.preload("transformers.models.t5.modeling_t5", "transformers.generation")
PRELOAD_ALL = pytest.mark.preload(*PRELOAD.args, "einops", "torch.testing._internal.common_fsdp")

VOCAB = 41  # divided by no number of ranks that is tested
SEQ = 7
PAD, EOS, IMAGE = 1, 2, 3  # no ordinary tokens
NUM_LAYERS = 5


@dataclass(frozen=True)
class Family:
    """A model and how it is trained.

    Attributes:
        package: Where it comes from: the name of the distribution.
        model: Name of the class.
        build: Builds it, with the same weights each time; with ignored parameters, for the rank that is given.
        loss: From the model, the rank and the step to the loss on that rank's data of that step.
        sizes: Of its configuration.
        classes: Class names of its blocks, for wrapping by class.
        options: Fields of the plan that it needs.
    """

    package: str
    model: str
    build: Callable[..., nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    classes: tuple[str, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Of the package, as it is installed; without what tells builds of one version apart."""
        return metadata.version(self.package).partition("+")[0]

    @property
    def wrappings(self) -> dict[str, dict[str, Any]]:
        """The ways in which it is wrapped, by name, as fields of the plan: as it comes, and every block by itself."""
        by_class = {"auto_wrap_policy": {"by_class": list(self.classes)}, "merge_units": False}
        return {"auto": {**self.options}, ", ".join(self.classes): {**by_class, **self.options}}


# -- data


def _generator(rank: int, step: int, salt: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 * salt + 100 * step + rank)


def tokens(rank: int, step: int, salt: int = 0, length: int = SEQ) -> Tensor:
    """Two rows of ordinary tokens; no two calls give the same."""
    return torch.randint(4, VOCAB, (2, length), generator=_generator(rank, step, salt))


def numbers(rank: int, step: int, *shape: int) -> Tensor:
    """Random numbers of a shape: images, spectrograms, features."""
    return torch.randn(*shape, generator=_generator(rank, step, 5))


def _language_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(input_ids=tokens(rank, step), labels=tokens(rank, step, 1)).loss


def _image_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    logits = model(numbers(rank, step, 2, 3, 16, 16))
    return F.cross_entropy(getattr(logits, "logits", logits), tokens(rank, step)[:, 0] % 10)


def _speech_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(input_features=numbers(rank, step, 2, 8, 2 * SEQ), labels=tokens(rank, step, 1)).loss


def image_prompt(rank: int, step: int) -> dict[str, Tensor]:
    """A text that begins with an image of four patches."""
    text = torch.cat([torch.full((2, 4), IMAGE), tokens(rank, step)], dim=1)
    return {"input_ids": text, "pixel_values": numbers(rank, step, 2, 3, 16, 16)}


def _image_text_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    prompt = image_prompt(rank, step)
    labels = prompt["input_ids"].masked_fill(prompt["input_ids"] == IMAGE, -100)
    return model(**prompt, labels=labels).loss


def patch_prompt(rank: int, step: int) -> dict[str, Tensor]:
    """The same for a model that takes images as rows of patches: one of four by four, merged two by two."""
    text = torch.cat([torch.full((2, 4), IMAGE), tokens(rank, step)], dim=1)
    return {
        "input_ids": text,
        "pixel_values": numbers(rank, step, 2 * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (text == IMAGE).int(),
    }


def _patch_text_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    prompt = patch_prompt(rank, step)
    labels = prompt["input_ids"].masked_fill(prompt["input_ids"] == IMAGE, -100)
    return model(**prompt, labels=labels).loss


# -- transformers


def _transformers(
    model: str,
    config: str,
    sizes: Mapping[str, Any],
    *classes: str,
    loss: Callable[[nn.Module, int, int], Tensor] = _language_loss,
) -> Family:
    build = functools.partial(build_transformers, model, config, sizes)
    return Family("transformers", model, build, loss, classes, sizes)


def build_transformers(model: str, config: str, sizes: Mapping[str, Any], **more: Any) -> nn.Module:
    """A model of the transformers library from its class, the class of its configuration, and sizes."""
    library = importlib.import_module("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that nobody would train
        made = getattr(library, config)(**_configs(library, sizes), **more)
        torch.manual_seed(1)
        return getattr(library, model)(made).train()


def _configs(library: ModuleType, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, where those of a part are made the part's own configuration."""
    return {
        key: getattr(library, value["class"])(**{k: v for k, v in value.items() if k != "class"})
        if isinstance(value, dict) and "class" in value
        else value
        for key, value in sizes.items()
    }


_SPECIAL = {"pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS}
_DECODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    **_SPECIAL,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
_ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_VISION = {"image_size": 16, "patch_size": 4}
_SPEECH = {
    "d_model": 16,
    "encoder_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": VOCAB,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "decoder_start_token_id": EOS,
    **_SPECIAL,
}

#: The sizes of the models by which ``generate`` and layer dropping are tested.
GPT2 = {
    "n_embd": 16,
    "n_layer": NUM_LAYERS,
    "n_head": 2,
    "vocab_size": VOCAB,
    "n_positions": 64,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
LLAMA = {**_DECODER, "tie_word_embeddings": True}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_heads": 2,
    "vocab_size": VOCAB,
    "num_layers": NUM_LAYERS,
    "decoder_start_token_id": PAD,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
_DROPS = {"encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2}
BART = {**_SPEECH, "max_position_embeddings": 64, "forced_eos_token_id": None}
WHISPER = {
    **_SPEECH,
    "num_mel_bins": 8,
    "max_source_positions": SEQ,
    "max_target_positions": 64,
    "begin_suppress_tokens": None,
}


# -- vit-pytorch


def _vit_pytorch(model: str, file: str, block: str, sizes: Mapping[str, Any]) -> Family:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return getattr(_vit_pytorch_file(file), model)(**sizes).train()

    return Family("vit-pytorch", model, build, _image_loss, (block,), sizes)


@functools.cache
def _vit_pytorch_file(name: str) -> ModuleType:
    """One file of the package. The package as a whole would import torchvision, which this file does not need."""
    package = importlib.util.find_spec("vit_pytorch")
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location(f"vit_pytorch.{name}", Path(package.origin).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_PATCHES = {"image_size": 16, "num_classes": 10}


# -- PyTorch's own test models


def _torch(model: str, *blocks: str, **options: Any) -> Family:
    def build(rank: int = 0) -> nn.Module:
        tests = importlib.import_module("torch.testing._internal.common_fsdp")
        group, mode = tests.DummyProcessGroup(rank, distributed.get_world_size()), tests.FSDPInitMode.NO_FSDP
        torch.manual_seed(1)
        alike = {"deterministic": True} if "ignored" in options else {}  # but for what is each rank's own
        return getattr(tests, model).init(group, mode, tests.DEVICEInitMode.DEVICE_NEVER, **alike).train()

    return Family("torch", model, build, _torch_loss, blocks, options=options)


def _torch_loss(model: Any, rank: int, step: int) -> Tensor:
    """The test model's own loss, on data of this rank and step instead of the same at every step."""
    *inputs, last = model.get_input(torch.device("cpu"))
    if last.is_floating_point():
        batch: tuple[Tensor, ...] = (numbers(rank, step, *last.shape),)
    else:
        batch = tuple(
            tokens(rank, step, salt, each.numel())[0].view(each.shape) % 23 for salt, each in enumerate((*inputs, last))
        )
    return model.get_loss(batch, model(*batch))


def _mlp_stack() -> nn.Module:
    torch.manual_seed(1)
    return importlib.import_module("torch.testing._internal.common_fsdp").MLPStack(mlp_dim=7)


def _mlp_stack_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(numbers(rank, step, 3, 7)).sum()


# -- all of them

FAMILIES: dict[str, Family] = {
    "GPT-2": _transformers("GPT2LMHeadModel", "GPT2Config", GPT2, "GPT2Block"),
    "Llama": _transformers("LlamaForCausalLM", "LlamaConfig", LLAMA, "LlamaDecoderLayer"),
    "Qwen3": _transformers("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}, "Qwen3DecoderLayer"),
    "Gemma 2": _transformers(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_DECODER, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
        "Gemma2DecoderLayer",
    ),
    "Mixtral": _transformers(
        "MixtralForCausalLM", "MixtralConfig", {**_DECODER, **_EXPERTS, "num_local_experts": 3}, "MixtralDecoderLayer"
    ),
    "Qwen3 MoE": _transformers(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_DECODER, **_EXPERTS, "num_experts": 5, "moe_intermediate_size": 12, "head_dim": 8, "mlp_only_layers": [0]},
        "Qwen3MoeDecoderLayer",
    ),
    "DeepSeek-V3": _transformers(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_DECODER,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "q_lora_rank": 6,
            "kv_lora_rank": 5,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
        "DeepseekV3DecoderLayer",
    ),
    "T5": _transformers("T5ForConditionalGeneration", "T5Config", T5, "T5Block"),
    "BART": _transformers("BartForConditionalGeneration", "BartConfig", BART, "BartEncoderLayer", "BartDecoderLayer"),
    "BART, LayerDrop": _transformers(
        "BartForConditionalGeneration", "BartConfig", {**BART, **_DROPS}, "BartEncoderLayer", "BartDecoderLayer"
    ),
    "BERT": _transformers(
        "BertForMaskedLM",
        "BertConfig",
        {**_ENCODER, "vocab_size": VOCAB, "max_position_embeddings": 16},
        "BertLayer",
    ),
    "ViT": _transformers(
        "ViTForImageClassification",
        "ViTConfig",
        {**_ENCODER, **_VISION, "num_labels": 10},
        "ViTLayer",
        loss=_image_loss,
    ),
    "Whisper": _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        "WhisperEncoderLayer",
        "WhisperDecoderLayer",
        loss=_speech_loss,
    ),
    "Whisper, LayerDrop": _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**WHISPER, **_DROPS},
        "WhisperEncoderLayer",
        "WhisperDecoderLayer",
        loss=_speech_loss,
    ),
    "LLaVA": _transformers(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": {
                "class": "CLIPVisionConfig",
                "hidden_size": 12,
                "intermediate_size": 24,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "projection_dim": 8,
                "image_size": 16,
                "patch_size": 8,
            },
            "text_config": {"class": "LlamaConfig", **_DECODER},
            "image_token_index": IMAGE,
            "image_seq_length": 4,
        },
        "CLIPEncoderLayer",
        "LlamaDecoderLayer",
        loss=_image_text_loss,
    ),
    "Qwen2-VL": _transformers(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "vision_config": {
                "depth": 4,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
                "temporal_patch_size": 2,
            },
            "text_config": {**_DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
            "image_token_id": IMAGE,
            "vision_start_token_id": 0,
        },
        "Qwen2VLVisionBlock",
        "Qwen2VLDecoderLayer",
        loss=_patch_text_loss,
    ),
    "DeepViT": _vit_pytorch(
        "DeepViT",
        "deepvit",
        "Residual",
        {
            **_PATCHES,
            "patch_size": 8,
            "dim": 16,
            "depth": NUM_LAYERS,
            "heads": 2,
            "mlp_dim": 24,
            "dim_head": 8,
            "dropout": 0.1,
        },
    ),
    "CrossViT": _vit_pytorch(
        "CrossViT",
        "cross_vit",
        "PreNorm",
        {
            **_PATCHES,
            "sm_dim": 12,
            "lg_dim": 16,
            "sm_patch_size": 4,
            "sm_enc_depth": 2,
            "sm_enc_heads": 2,
            "sm_enc_mlp_dim": 20,
            "sm_enc_dim_head": 8,
            "lg_patch_size": 8,
            "lg_enc_depth": 2,
            "lg_enc_heads": 2,
            "lg_enc_mlp_dim": 24,
            "lg_enc_dim_head": 8,
            "cross_attn_depth": 2,
            "cross_attn_heads": 2,
            "cross_attn_dim_head": 8,
            "depth": 2,
        },
    ),
    "CaiT": _vit_pytorch(
        "CaiT",
        "cait",
        "LayerScale",
        {
            **_PATCHES,
            "patch_size": 8,
            "dim": 16,
            "depth": NUM_LAYERS,
            "cls_depth": 2,
            "heads": 2,
            "mlp_dim": 24,
            "dim_head": 8,
            "dropout": 0.1,
            "layer_dropout": 0.2,
        },
    ),
    "NestedWrappedModule": _torch("NestedWrappedModule", "Linear"),
    "AlwaysWrapNestedWrappedModule": _torch("AlwaysWrapNestedWrappedModule", "Linear", "Sequential"),
    "NonUniformReqGradNWM": _torch("NonUniformReqGradNWM", "Linear"),
    "TransformerWithSharedParams": _torch(
        "TransformerWithSharedParams", "TransformerEncoderLayer", "TransformerDecoderLayer"
    ),
    "MixtureOfExperts": _torch("MixtureOfExperts", "Linear", ignored=["module.2"]),
    "MLPStack": Family("torch", "MLPStack", _mlp_stack, _mlp_stack_loss, ("MLP",)),
}
