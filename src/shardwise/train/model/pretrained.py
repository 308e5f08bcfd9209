"""Hugging Face folders: the model on meta, and the tensor in the folder's files for each of its parameters.

Names follow transformers' own loading: its renamings, the prefix of the base model, and ties. If loading needs more
than names (merged or split tensors, new weights for missing ones), ``from_pretrained`` of transformers is used.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.api.parallelize import parallelize
from shardwise.checkpoint.weights import WeightFiles
from shardwise.comm.dtype import torch_dtype
from shardwise.launch.log_once import log_once
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.spec.hf_cache import local_folder
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.text import first_line, printable
from shardwise.train.config.hf import OWN_LOOP, NotTrainedError, read_architecture, read_language_model
from shardwise.train.task import ANSWER, CLASS, MASKED, NEXT
from shardwise.weights.init.deferred import deferred_init

_MOST_SHOWN = 3


class NotNamedError(Exception):
    """Raised if only ``from_pretrained`` of transformers can read the files; the text says why."""


def from_pretrained(folder: str | os.PathLike[str], plan: ParallelPlan | str | None = None, **fields: Any) -> nn.Module:
    """Load a model of transformers from its folder, already sharded: no rank ever has the full model.

    Every rank reads only what it owns from the safetensors files, directly into its shards::

        model = sw.from_pretrained("models/llama-3-8b", strategy="zero3")
        ...
        sw.export("models/mine", model, tokenizer="models/llama-3-8b")

    The values are those of ``from_pretrained(folder, dtype="auto")`` of transformers. Weights stored in 16 bit keep
    their dtype, unless the plan sets ``mp_policy=sw.PrecisionPolicy("bf16", master_dtype="fp32")``. Files that
    transformers rearranges at loading are loaded in full on every rank; this is printed. A rank with GPUs uses the
    current device.

    Args:
        folder: Contains ``config.json`` and ``*.safetensors`` of a model of transformers for any task; without weights
            the model is initialized, equally on every rank. Also the name of a model on the Hugging Face hub that ``hf
            download`` has fetched.
        plan: As in ``sw.parallelize``.
        **fields: As in ``sw.parallelize``.

    Returns:
        The model, parallelized.

    Collective:
        As ``sw.parallelize``. All ranks must call, and see the same files.

    Raises:
        ConfigError: transformers is not installed, or cannot load the folder.
        CheckpointError: A file is missing or damaged.
        PlanError, MeshError: As ``sw.parallelize``.
    """
    path = local_folder(os.fspath(folder))
    generator = torch.get_rng_state()
    try:
        model, files = deferred_from_folder(path, of_any_task=True)
    except NotNamedError as error:
        warn_of_full_load(str(path), error)
        torch.set_rng_state(generator)
        model, files = model_from_folder(path, of_any_task=True), None
        if torch.cuda.is_available():
            model = model.to(torch.device("cuda", torch.cuda.current_device()))
    return parallelize(model, plan, init=files, **fields)


def warn_of_full_load(name: str, error: Exception) -> None:
    """Print once why every rank loads the full model."""
    log_once(f"every rank loads {printable(name)} whole, since {printable(str(error).splitlines()[0])}")


def model_from_folder(folder: Path, *, reads_weights: bool = True, of_any_task: bool = False) -> nn.Module:
    """Return a full Hugging Face model, initialized if the folder has no weights or ``reads_weights`` is not set."""
    kind = _kind(folder, of_any_task=of_any_task)
    try:
        if reads_weights and any(folder.glob("*.safetensors")):
            return kind.from_pretrained(folder, use_safetensors=True, dtype="auto", **_OPTIONS)
        config = _read_config(folder)
        return _from_config(kind, config, _dtype(config, WeightFiles.open(folder)))
    except ShardwiseError:
        raise
    except Exception as error:  # noqa: BLE001 - transformers may raise anything at a wrong configuration
        raise _refusal(folder, error) from None


def deferred_from_folder(folder: Path, *, of_any_task: bool = False) -> tuple[nn.Module, WeightFiles | None]:
    """Return a Hugging Face model on meta and its weight files, if any, for ``sw.parallelize(init=)``."""
    kind, files = _kind(folder, of_any_task=of_any_task), WeightFiles.open(folder)
    if files is None and any(folder.glob("*.safetensors")):
        raise NotNamedError("its files have other names than model.safetensors")
    try:
        config = _read_config(folder)
        dtype = _dtype(config, files)
        if files is None:
            return deferred_init(lambda: _from_config(kind, config, dtype)), None
        _check_plain(folder, config)
        model = deferred_init(lambda: _build_untied(kind, config, dtype))
        settings: Any = getattr(model, "generation_config", None)
        if settings is not None and (folder / "generation_config.json").is_file():
            model.generation_config = settings.from_pretrained(folder, local_files_only=True)
    except (ShardwiseError, NotNamedError):
        raise
    except Exception as error:  # noqa: BLE001 - as above
        raise _refusal(folder, error) from None
    return model, _name(model, files, dtype)


_OPTIONS: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


#: The suffix of a task's Auto class, in transformers and in peft.
CLASSES = {NEXT: "CausalLM", MASKED: "MaskedLM", ANSWER: "Seq2SeqLM", CLASS: "SequenceClassification"}


def _kind(folder: Path, *, of_any_task: bool) -> Any:
    """Return the class of a folder's model: the Auto class of its task, else the class that ``architectures`` names."""
    try:
        import transformers  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError("a Hugging Face folder needs the transformers package.\n  Install shardwise[hf].") from None
    try:
        name = read_architecture(folder)
        cls: Any = getattr(transformers, name, None)
        is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
        is_model = is_model and cls.forward is not nn.Module.forward
        try:
            auto = getattr(transformers, f"AutoModelFor{CLASSES[read_language_model(folder).task.name]}")
            is_half = is_model and cls.config_class not in auto._model_mapping  # noqa: SLF001 - an encoder
            if is_half and not of_any_task:
                raise NotTrainedError(f"{name} is not one of {auto.__name__}; {OWN_LOOP}")  # noqa: TRY301
        except NotTrainedError:  # images, speech, multimodal
            if of_any_task and is_model:
                return cls
            if of_any_task:
                raise NotTrainedError(f"this version of transformers has no model {name!r}") from None
            raise
    except NotTrainedError as error:
        raise ConfigError(
            f"the model in {printable(folder)} cannot be loaded: {error}.\n  Name another folder."
        ) from None
    return cls if is_half else auto


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig  # pyrefly: ignore[missing-import]

    return AutoConfig.from_pretrained(folder, **_OPTIONS)


def _refusal(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the model in {printable(folder)} cannot be loaded: {first_line(error)}\n"
        "  Name a folder with config.json and safetensors files."
    )


def _dtype(config: Any, files: WeightFiles | None) -> torch.dtype:
    """Return the dtype that ``"auto"`` means: the configuration's, or that of the first floating-point tensor."""
    named = getattr(config, "dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named
    stored = (torch_dtype(tensor.dtype) for tensor in (files.tensors.values() if files is not None else ()))
    return next((dtype for dtype in stored if dtype.is_floating_point), torch.float32)


def _check_plain(folder: Path, config: Any) -> None:
    """Refuse folders whose loading changes the model itself."""
    if getattr(config, "quantization_config", None) is not None:
        raise NotNamedError("its weights are quantized")
    if (folder / "adapter_config.json").is_file():
        raise NotNamedError("it holds an adapter")


def _build_untied(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the model without initialized weights and without ties, as ``from_pretrained`` does before it reads."""
    from transformers import initialization  # pyrefly: ignore[missing-import]

    with initialization.no_init_weights(), initialization.no_tie_weights():
        model: Any = _from_config(kind, config, dtype)
    # Buffers that no file has are computed in fp32 for any dtype of the model, by the modules' own initialization.
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # noqa: SLF001 - marks tensors in files, which transformers then skips
    model.initialize_weights()
    return model


def _from_config(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    if hasattr(kind, "from_config"):  # an Auto class
        return kind.from_config(config, trust_remote_code=False, dtype=dtype)
    return kind._from_config(config, dtype=dtype)  # noqa: SLF001 - what from_config calls


def _name(model: Any, files: WeightFiles, dtype: torch.dtype) -> WeightFiles:
    """Find every parameter and saved buffer of ``model`` in the files, and tie the tied ones."""
    if getattr(model, "_get_dtype_plan", lambda _: None)(dtype):  # modules kept in fp32, private to from_pretrained
        raise NotNamedError(
            f"transformers keeps some of its modules in fp32 beside {str(dtype).removeprefix('torch.')}"
        )
    empty = model.state_dict()
    keys, unexpected = _rename(model, files, empty)
    missing = set(empty) - set(keys)
    _tie(model, files, keys, missing)
    if missing:
        raise NotNamedError(f"{_format_names(missing)} not in its files and will be drawn anew")
    for name, key in keys.items():
        if tuple(empty[name].shape) != files.tensors[key].shape or not empty[name].is_contiguous():
            raise NotNamedError(f"{name} has shape {list(empty[name].shape)}, in its files {key} has another form")
    keys |= {alias: keys[name] for name, alias in _aliases(model) if name in keys and alias not in keys}
    ignored = _expected_to_be_left(model, unexpected)
    if unexpected - ignored:
        log_once(f"{_format_names(unexpected - ignored)} in the folder's files and not in the model, and left unread")
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    return files.named(keys, dtypes)


def _rename(model: Any, files: WeightFiles, empty: dict[str, Any]) -> tuple[dict[str, str], set[str]]:
    """Map names in the model to names in the files; also return the files' tensors that the model does not have."""
    try:
        from transformers.conversion_mapping import (  # pyrefly: ignore[missing-import]
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import (  # pyrefly: ignore[missing-import]
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:
        raise NotNamedError("this version of transformers does not say how it renames tensors") from None
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters: list[Any] = [each for each in transforms if not isinstance(each, WeightRenaming)]
    keys: dict[str, str] = {}
    unexpected: set[str] = set()
    for key in files.tensors:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, empty)
        if name not in empty and key in empty:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, empty)
        if name not in empty:
            unexpected.add(key)
        elif pattern is not None or name in keys:
            raise NotNamedError(f"transformers makes {name} of other tensors ({key} among them)")
        else:
            keys[name] = key
    return keys, unexpected


def _tie(model: Any, files: WeightFiles, keys: dict[str, str], missing: set[str]) -> None:
    """Tie parameters as transformers does; if the files have both tensors, tie them only if they are equal."""
    for target, source in dict(model.all_tied_weights_keys).items():
        if target in keys and source in keys and not files.has_same_content(keys[target], keys[source]):
            model.all_tied_weights_keys.pop(target)
            continue
        if target in keys and source in keys:
            missing.add(target)  # transformers does not tie two tensors that are both on meta
            keys.pop(target)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    missing -= {alias for name, alias in _aliases(model) if name in keys}


def _aliases(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of names of the same parameter, in both orders."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [(a, b) for names in by_id.values() if len(names) > 1 for a in names for b in names if a != b]


def _expected_to_be_left(model: Any, keys: set[str]) -> set[str]:
    """Return the names that transformers skips silently."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return {
        key for key in keys if any(re.search(p, key) for p in [*patterns, r"rotary_emb\.inv_freq", "position_ids$"])
    }


def _format_names(names: set[str]) -> str:
    listed = sorted(names)
    num_left = len(listed) - _MOST_SHOWN
    more = f" and {num_left} more are" if num_left > 0 else " is" if len(listed) == 1 else " are"
    return printable(", ".join(listed[:_MOST_SHOWN])) + more
