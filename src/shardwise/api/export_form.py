"""How transformers knows a model: the names and shapes of its tensors in files, and its configuration."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.models.transformer import GPT
from shardwise.spec.errors import ConfigError
from shardwise.spec.shape.gpt import GPTConfig


class Form(Protocol):
    """How transformers knows a model."""

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of files from those of the model, also on meta."""
        ...

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write ``config.json``, and what else is no weight."""
        ...


def form_of(model: nn.Module) -> Form:
    """How transformers knows ``model``.

    Raises:
        ConfigError: It does not.
    """
    if isinstance(model, GPT):
        return OfGPT(model.config)
    try:
        from transformers import PreTrainedModel  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError("an export needs the transformers package.\n  Install shardwise[hf].") from None
    if isinstance(model, PreTrainedModel):
        return OfTransformers(model)
    raise ConfigError(
        f"transformers has no {type(model).__name__}: a folder for from_pretrained needs a model of transformers, or"
        " one of sw.models.gpt.\n"
        "  Write any model's weights with safetensors.torch.save_file(sw.full_state_dict(model), file) on rank 0."
    )


class OfTransformers:
    """A model of transformers; what its loading merges or renames is undone, as ``save_pretrained`` does."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """As :class:`Form`."""
        from transformers.core_model_loading import (  # pyrefly: ignore[missing-import]
            revert_weight_conversion,
        )

        left_out = self._model._keys_to_ignore_on_save or ()  # noqa: SLF001  what save_pretrained reads
        return revert_weight_conversion(self._model, {k: v for k, v in tensors.items() if k not in left_out})

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """As :class:`Form`."""
        config = copy.deepcopy(self._model.config)
        config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [type(self._model).__name__]
        config.save_pretrained(folder)
        if self._model.can_generate():
            self._model.generation_config.save_pretrained(folder)


#: Our names, and GPT-2's.
_GPT2 = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "blocks": "h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "final_norm": "ln_f",
}
#: Modules of GPT-2 that hold their weights transposed, and all that have a bias.
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")
_BIASED = (*_TRANSPOSED, "ln_1", "ln_2", "ln_f")


class OfGPT:
    """Our GPT, which is a GPT-2: the same arithmetic under other names.

    Raises:
        ConfigError: It has experts.
    """

    def __init__(self, config: GPTConfig) -> None:
        if config.num_experts:
            raise ConfigError(
                "transformers has no GPT-2 with experts.\n"
                "  Write the weights with safetensors.torch.save_file(sw.full_state_dict(model), file) on rank 0."
            )
        self._config = config

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """As :class:`Form`. A model without biases gets zeros."""
        found = {}
        for name, tensor in tensors.items():
            module, _, kind = _gpt2_name(name).rpartition(".")
            last = module.rpartition(".")[2]
            found[f"{module}.{kind}"] = tensor.t() if kind == "weight" and last in _TRANSPOSED else tensor
            if kind == "weight" and last in _BIASED and not self._config.bias:
                found[f"{module}.bias"] = tensor.new_zeros(tensor.shape[0])
        return found

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """As :class:`Form`."""
        from transformers import GPT2Config  # pyrefly: ignore[missing-import]

        held = self._config
        config = GPT2Config(
            vocab_size=held.vocab_size,
            n_positions=held.seq_len,
            n_embd=held.hidden,
            n_layer=held.num_layers,
            n_head=held.num_heads,
            n_inner=held.ffn_hidden,
            activation_function="gelu_new",
            tie_word_embeddings=held.tied,
            bos_token_id=None,
            eos_token_id=None,
            architectures=["GPT2LMHeadModel"],
            dtype=str(dtype).removeprefix("torch."),
            resid_pdrop=held.dropout,
            embd_pdrop=held.dropout,
            attn_pdrop=held.dropout,
        )
        config.save_pretrained(folder)


def _gpt2_name(name: str) -> str:
    if name.startswith("lm_head."):
        return name
    for ours, theirs in _GPT2.items():
        name = re.sub(rf"(^|\.){re.escape(ours)}\.", rf"\1{theirs}.", name)
    return f"transformer.{name}"
