"""LoRA (Hu et al., 2021) by peft: small trained matrices added to frozen linear layers of a Hugging Face model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.weights import WeightFiles
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.spec.text import first_line, printable
from shardwise.train.config.hf import read_language_model
from shardwise.train.config.sections import LoraSection
from shardwise.train.task import ANSWER, NEXT

#: peft's names of tasks.
_TASKS = {NEXT: "CAUSAL_LM", ANSWER: "SEQ_2_SEQ_LM"}

#: The adapter's name in the model, peft's own default.
NAME = "default"

#: Ways of peft to begin an adapter with a part of the base's weights, which is subtracted from them.
_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

#: Targets of ``lora`` that mean every linear layer; peft's own word.
ALL = "all-linear"


def adapt(model: nn.Module, section: LoraSection, base: Path, *, draws: bool = True) -> nn.Module:
    """Freeze ``model``, which is built from the folder ``base``, and add adapters to it, in place.

    The adapters' values are initialized on the CPU in fp32 (or read from ``section.adapter``), even if the model is on
    meta. Without ``draws`` they are not initialized.
    """
    peft = _peft()
    config = _config(peft, section, base)
    if config.target_modules == ALL and section.adapter is None:
        config.target_modules = _linear_layers(model)
    config.fan_in_fan_out = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's
    try:
        model = peft.inject_adapter_in_model(config, model, adapter_name=NAME)
    except ValueError as error:
        raise ConfigError(
            f"lora.targets={section.targets!r}: {first_line(error)}\n"
            "  Name layers by the ends of their names, such as [q_proj, v_proj], or leave targets out: all linear ones."
        ) from None
    ends = {name for path, layer in model.named_modules() if hasattr(layer, "base_layer") for name in _last_parts(path)}
    targets = section.targets if isinstance(section.targets, list | tuple) else ()
    if lost := [name for name in targets if name not in ends]:
        raise ConfigError(
            f"lora.targets={section.targets!r}: no layer's name ends in {printable(lost[0])!r} (stacked experts are a"
            " parameter, which gets no adapter).\n  Leave it out, or leave targets out: all linear layers."
        )
    if draws:
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                _initialize(module)
        unlike = [name for name, p in model.named_parameters() if f".{NAME}" in name and p.is_meta]
        if unlike:
            given, advice = f"lora.targets={section.targets!r}", "Leave embeddings out."
            if section.adapter is not None:
                given, advice = (
                    f"lora.adapter={section.adapter}",
                    "Train it in a loop of your own, with peft.",
                )
            raise ConfigError(f"{given}: {printable(unlike[0])} is not a factor of a linear layer.\n  {advice}")
        if section.adapter is not None:
            _load_adapter(peft, model, Path(section.adapter).expanduser())
    return model


def _linear_layers(model: nn.Module) -> str | list[str]:
    """Targets of all linear layers; in a mixture with stacked experts, of those outside of its feed-forward layers.

    For some families peft's own ``all-linear`` also adapts the router and the stacked experts, each by a product as
    large as all experts together, and forgets shared experts and dense layers. Others it gives attention's alone.
    """
    stacked = (name for name, p in model.named_parameters() if p.dim() == 3 and len(p) > 1 and "conv" not in name)
    mixtures = {name.split(".")[-3] for name in stacked if name.count(".") > 1}
    if not mixtures:
        return ALL
    inside, outside = set[str](), set[str]()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            *parents, last = path.split(".")
            (outside if mixtures.isdisjoint(parents) else inside).add(last)
    return sorted(outside - inside)


def _last_parts(path: str) -> list[str]:
    """The full name and its ends: ``a.b.c``, ``b.c`` and ``c``."""
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]


#: Number and size of the blocks of each base file, evenly spaced, that are hashed.
_BLOCKS, _BLOCK_BYTES = 16, 1 << 16


def fingerprint(base: Path) -> str:
    """Return a hash of the base weights below an adapter: of files' names, sizes and some of their content."""
    digest = hashlib.sha256()
    for path in sorted(base.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def check_base(base: Path, saved: object) -> None:
    """Refuse an adapter's checkpoint if its base has changed."""
    if saved is not None and fingerprint(base) != saved:
        raise CheckpointError(
            f"the weights in {printable(base)} are not those that the adapter was trained on.\n"
            "  Restore the folder. A run that continues may also name a copy: --set model.hf=FOLDER"
        )


def rename_files(files: WeightFiles, before: Mapping[str, nn.Parameter], model: nn.Module) -> WeightFiles:
    """Map files of the base to the names of its parameters inside an adapted model."""
    now: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        now.setdefault(id(parameter), []).append(name)  # a tied parameter has several names
    names = {name: now[id(parameter)] for name, parameter in before.items()}
    keys = {new: key for name, key in files.keys.items() for new in names.get(name, [name])}
    dtypes = {new: dtype for name, dtype in files.dtypes.items() for new in names.get(name, [name])}
    return files.named(keys, dtypes)


def _peft() -> Any:
    try:
        import peft  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError("lora needs the peft package.\n  Install shardwise[lora].") from None
    return peft


def _config(peft: Any, section: LoraSection, base: Path) -> Any:
    if section.adapter is None:
        assert section.rank is not None
        return peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha or 2 * section.rank,
            lora_dropout=section.dropout,
            target_modules=section.targets,
            task_type=_TASKS[read_language_model(base).task.name],
            base_model_name_or_path=str(base.absolute()),
        )
    folder = Path(section.adapter).expanduser()
    try:
        config = peft.PeftConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"lora.adapter={printable(folder)}: {first_line(error)}\n"
            "  Name a folder with adapter_config.json and adapter_model.safetensors."
        ) from None
    if config.peft_type != "LORA":
        raise ConfigError(f"lora.adapter={printable(folder)} is of kind {config.peft_type}.\n  Name one of LoRA.")
    if str(config.init_lora_weights).lower().startswith(_FROM_BASE):
        raise ConfigError(
            f"lora.adapter={printable(folder)} began as a part of the base (init_lora_weights="
            f"{config.init_lora_weights!r}), which is without this part below it.\n"
            "  Save a plain LoRA with peft: save_pretrained(folder, path_initial_model_for_weight_conversion=...)."
        )
    config.inference_mode, config.base_model_name_or_path = False, str(base.absolute())
    return config


def _initialize(layer: Any) -> None:
    """Initialize a layer's adapter if it has no values, and convert it to fp32, as peft does for a base in 16 bit."""
    linears = [each[NAME] for each in (layer.lora_A, layer.lora_B) if NAME in each]
    if any(parameter.is_meta for module in linears for parameter in module.parameters()):
        for module in linears:
            module.to_empty(device="cpu")
            module.float()
        layer.reset_lora_parameters(NAME, init_lora_weights=True)
    for module in linears:
        module.float()


def _load_adapter(peft: Any, model: nn.Module, folder: Path) -> None:
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{printable(path)} cannot be read: {error}.\n  Copy the folder again.") from None
    tensors = {name.removeprefix("base_model.model."): value.float() for name, value in tensors.items()}
    with torch.no_grad():
        result = peft.set_peft_model_state_dict(model, tensors, adapter_name=NAME)
    missing = [name for name, _ in model.named_parameters() if f".{NAME}." in name and name in result.missing_keys]
    if missing or result.unexpected_keys:
        name = (missing or result.unexpected_keys)[0]
        raise CheckpointError(
            f"{printable(path)} does not fit the model: {printable(name)} is only in one of them.\n"
            "  Name an adapter that was trained on this model."
        )
