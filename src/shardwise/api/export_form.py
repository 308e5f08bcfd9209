"""The Hugging Face form of a model: names and shapes of its tensors in files, and its configuration."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.api.model import logical_shape
from shardwise.models.transformer import GPT
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import ConfigError
from shardwise.spec.hf_cache import local_folder
from shardwise.spec.shape.gpt import GPTConfig


class Form(Protocol):
    """The Hugging Face form of a model.

    Attributes:
        stem: Name of the weight files without number and extension.
    """

    stem: str

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors of the model to tensors of files; they may be on meta."""
        ...

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write ``config.json`` and the other files that are not weights."""
        ...


def form_of(model: nn.Module, *, merges: bool = False) -> Form:
    """Return the form in which transformers, or for an adapted model peft, saves ``model``.

    Args:
        model: The model.
        merges: Write an adapted model as a whole with the adapter merged, instead of the adapter alone.

    Raises:
        ConfigError: Neither library can load the model.
    """
    if getattr(model, "peft_config", None):
        return Merged(model) if merges else Adapter(model)
    try:
        from transformers import PreTrainedModel  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError("an export needs the transformers package.\n  Install shardwise[hf].") from None
    if isinstance(model, GPT):
        return OfGPT(model.config)
    if isinstance(model, PreTrainedModel):
        return OfTransformers(model)
    raise ConfigError(
        f"transformers has no {type(model).__name__}: a folder for from_pretrained needs a model of transformers, or"
        " one of sw.models.gpt.\n"
        "  Write any model's weights with safetensors.torch.save_file(sw.full_state_dict(model), file) on rank 0."
    )


def _whole(model: Any) -> Any:
    """Return the model with the modules of all ranks: for a pipeline a copy without values."""
    pipelined = pipelined_of(model)
    return model if pipelined is None else pipelined.meta_copy


class OfTransformers:
    """A model of transformers. Tensors merged or renamed at loading are converted back, as in ``save_pretrained``."""

    stem = "model"

    def __init__(self, model: Any, in_files: Mapping[str, nn.Parameter] | None = None) -> None:
        self._model = model
        parameters = dict(_whole(model).named_parameters(remove_duplicate=False)) if in_files is None else in_files
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        #: The name that a tied weight has in files, by its other names.
        self._kept = {alias: name for alias, name in tied.items() if parameters.get(alias) is parameters.get(name, 0)}
        self._is_untied = bool(tied) and not self._kept

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """As :class:`Form`."""
        from transformers.core_model_loading import (  # pyrefly: ignore[missing-import]
            revert_weight_conversion,
        )

        left_out = self._model._keys_to_ignore_on_save or ()  # noqa: SLF001  an attribute that save_pretrained reads
        renamed = {self._kept.get(name, name): tensor for name, tensor in tensors.items()}
        whole: Any = _Whole(self._model)
        return revert_weight_conversion(whole, {k: v for k, v in renamed.items() if k not in left_out})

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """As :class:`Form`."""
        config = copy.deepcopy(self._model.config)
        config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [type(self._model).__name__]
        if self._is_untied:
            config.tie_word_embeddings = False
        config.save_pretrained(folder)
        if self._model.can_generate():
            self._model.generation_config.save_pretrained(folder)


class _Whole:
    """A view of a sharded model whose parameters have their unsharded shapes, which transformers' conversions read."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(logical_shape(self._model.get_parameter(name)), device="meta")


#: Prefix of peft for the names of a model, in the model and in files.
_PREFIX = "base_model.model."


def _only_adapter(model: Any) -> str:
    """Return the name of the model's active adapter.

    Raises:
        ConfigError: None or several adapters are active, or the active one is not a LoRA.
    """
    names = list(model.peft_config)
    active = [name for name in names if name in set(_active_adapters(model))]
    if len(active) != 1:
        raise ConfigError(
            f"of the adapters {', '.join(names)} there are {len(active)} active.\n"
            "  Choose one with model.set_adapter(name), and export it."
        )
    config = model.peft_config[active[0]]
    if config.peft_type != "LORA":
        # peft computes the prompts that it saves, with the encoder's parameters
        inside = ", inside of sw.full_parameters(model.prompt_encoder) and torch.no_grad() on every rank,"
        raise ConfigError(
            f"adapter {active[0]} is of kind {config.peft_type}.\n  Save it with peft: state = sw.full_state_dict("
            f"model, trainable_only=True) on every rank, and{inside if config.is_prompt_learning else ''} on rank 0"
            " model.save_pretrained(folder, state_dict=state)."
        )
    return active[0]


def _active_adapters(model: Any) -> list[str]:
    for module in (*model.modules(), *_whole(model).modules()):  # a stage of a pipeline may have no adapter
        adapters = getattr(module, "active_adapters", None)
        if isinstance(adapters, list) and hasattr(module, "base_layer"):
            return adapters
    return [model.active_adapter] if hasattr(model, "prompt_encoder") else []


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter by its first name; tied weights have several."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in by_id.values()}


def _resized(model: Any, folder: str | None) -> tuple[str, ...]:
    """Return the paths of the embeddings, and the head, of a model whose vocabulary differs from its base's folder."""
    file = local_folder(folder or "") / "config.json"
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is None or not file.is_file() or json.loads(file.read_text()).get("vocab_size", size) == size:
        return ()
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    return tuple(f"{path}." for path, module in model.named_modules() if any(module is each for each in layers))


class Adapter:
    """The adapter of a model with a LoRA of peft, without the base model, as ``PeftModel.from_pretrained`` loads it.

    Embeddings that were resized are written with it, as peft does: their new rows are in no file of the base model.

    Raises:
        ConfigError: The model has several active adapters, or one of another kind.
    """

    stem = "adapter_model"

    def __init__(self, model: Any) -> None:
        self._model, self._name = model, _only_adapter(model)
        self._config = model.peft_config[self._name]
        #: Suffixes of the names of the base model's biases that are trained with the adapter.
        self._biases = {"none": (), "all": (".bias",), "lora_only": (".base_layer.bias",)}[self._config.bias]
        self._names, self._resized = _names(_whole(model)), _resized(model, self._config.base_model_name_or_path)

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapter's tensors only, by their names in files."""
        found = {}
        named = [(name, tensor) for first, tensor in tensors.items() for name in self._names.get(first, [first])]
        for name, tensor in named:
            plain = f"{name.removeprefix(_PREFIX)}."  # with a dot, because the adapter's name may be the last part
            # A trained copy of a whole module has its original's name in files.
            whole, own = f".modules_to_save.{self._name}.", f".{self._name}."
            part = whole if whole in plain else own
            if part in plain:
                plain = plain.replace(part, ".", 1).removesuffix(".")
                found[_PREFIX + plain.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")] = tensor
            elif name.endswith(self._biases) or (name.startswith(self._resized) and ".original_module." not in name):
                found[_PREFIX + plain.removesuffix(".")] = tensor
        return found

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:  # noqa: ARG002  the adapter's config has no dtype
        """As :class:`Form`."""
        config = copy.deepcopy(self._config)
        config.inference_mode = True
        base = type(self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model)
        found_by = {"base_model_class": base.__name__, "parent_library": base.__module__}
        config.save_pretrained(folder, auto_mapping_dict=found_by if config.task_type is None else None)


class Merged:
    """A model with a LoRA of peft, written as the plain model: the adapter's product is added to each adapted weight.

    Raises:
        ConfigError: The model has several active adapters, or one that does more than add a product of two matrices.
    """

    stem = "model"

    def __init__(self, model: Any) -> None:
        name = _only_adapter(model)
        base, whole = model.get_base_model() if hasattr(model, "get_base_model") else model, _whole(model)
        self._name, self._adapters, names = name, tuple(model.peft_config), _names(whole)
        self._layers = {
            path.removeprefix(_PREFIX): layer for path, layer in whole.named_modules() if hasattr(layer, "base_layer")
        }
        uses = Counter(id(each) for _, each in whole.named_parameters(remove_duplicate=False))
        for path, layer in self._layers.items():
            weight = getattr(layer.base_layer, "weight", None)  # missing for several experts in one tensor
            is_linear = isinstance(weight, Tensor) and weight.dim() == 2
            adds_more = name in getattr(layer, "lora_variant", {}) or getattr(layer, "lora_bias", {}).get(name)
            if not is_linear or adds_more or name not in getattr(layer, "lora_A", {}):
                raise ConfigError(
                    f"the adapter of {path} adds no plain product of two matrices.\n"
                    "  Merge it with peft: PeftModel.from_pretrained(base, folder).merge_and_unload()."
                )
            if uses[id(weight)] > 1:
                raise ConfigError(
                    f"the weight of {path} is also another layer's, which its adapter does not change.\n"
                    "  Export the adapter by itself, without merge_adapter (--merge)."
                )
        self._in_files = {first: [*filter(None, map(self._name_in_files, names[first]))] for first in names}
        named = dict(whole.named_parameters())
        self._plain = OfTransformers(base, {name: named[first] for first in names for name in self._in_files[first]})

    def _name_in_files(self, name: str) -> str | None:
        """Return the plain model's name of a parameter; ``None`` if the plain model does not have it."""
        name = name.removeprefix(_PREFIX)
        whole, is_whole, inside = name.partition(f".modules_to_save.{self._name}.")
        if is_whole:
            return f"{whole}.{inside}"
        path, mark, rest = name.partition(".base_layer.")
        if path in self._layers and mark:
            return f"{path}.{rest}"
        is_left = ".original_module." not in name and not any(f".{adapter}." in name for adapter in self._adapters)
        return name if is_left else None

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """As :class:`Form`."""
        by_name = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
        found = {}
        for first, tensor in tensors.items():
            for name in self._in_files.get(first, [first.removeprefix(_PREFIX)]):
                path, _, rest = name.rpartition(".")
                is_adapted = path in self._layers and rest == "weight"
                found[name] = self._with_adapter(path, tensor, by_name) if is_adapted else tensor
        return self._plain.convert(found)

    def _with_adapter(self, path: str, weight: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Return ``weight`` plus the scaled product of the adapter's matrices (Hu et al., 2021, eq. 3)."""
        layer = self._layers[path]
        down, up = (tensors[f"{path}.lora_{part}.{self._name}.weight"] for part in "AB")
        added = up @ down
        added = (added.t() if getattr(layer, "fan_in_fan_out", False) else added) * layer.scaling[self._name]
        return (weight + added).to(weight.dtype)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """As :class:`Form`."""
        self._plain.write_config(folder, dtype)


#: GPT-2's names of modules, by ours.
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
#: Modules of GPT-2 that store their weights transposed, and all modules that have a bias.
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")
_BIASED = (*_TRANSPOSED, "ln_1", "ln_2", "ln_f")


class OfGPT:
    """Our GPT as a GPT-2, which computes the same under different names.

    Raises:
        ConfigError: The model has experts.
    """

    stem = "model"

    def __init__(self, config: GPTConfig) -> None:
        if config.num_experts:
            raise ConfigError(
                "transformers has no GPT-2 with experts.\n"
                "  Write the weights with safetensors.torch.save_file(sw.full_state_dict(model), file) on rank 0."
            )
        self._config = config

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """As :class:`Form`. A model without biases gets zero biases."""
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

        gpt = self._config
        config = GPT2Config(
            vocab_size=gpt.vocab_size,
            n_positions=gpt.seq_len,
            n_embd=gpt.hidden,
            n_layer=gpt.num_layers,
            n_head=gpt.num_heads,
            n_inner=gpt.ffn_hidden,
            activation_function="gelu_new",
            tie_word_embeddings=gpt.tied,
            bos_token_id=None,
            eos_token_id=None,
            architectures=["GPT2LMHeadModel"],
            dtype=str(dtype).removeprefix("torch."),
            resid_pdrop=gpt.dropout,
            embd_pdrop=gpt.dropout,
            attn_pdrop=gpt.dropout,
        )
        config.save_pretrained(folder)


def _gpt2_name(name: str) -> str:
    if name.startswith("lm_head."):
        return name
    for ours, theirs in _GPT2.items():
        name = re.sub(rf"(^|\.){re.escape(ours)}\.", rf"\1{theirs}.", name)
    return f"transformer.{name}"
