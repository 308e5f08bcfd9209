"""Export of a run's checkpoint to a Hugging Face folder, from its files, one block at a time, without process group."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.api.export import FolderOptions, write_folder
from shardwise.api.export_form import form_of
from shardwise.checkpoint.reader import Checkpoint, open_checkpoint
from shardwise.checkpoint.weights import WeightFiles
from shardwise.comm.dtype import dtype_name, memory_order, torch_dtype
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.spec.extent import Extent
from shardwise.spec.text import printable
from shardwise.train.load import TrainedModel
from shardwise.train.model.build import defer_model
from shardwise.train.model.pretrained import CLASSES
from shardwise.weights.state.extents import empty
from shardwise.weights.state.stored_ranges import BUFFER, persistent_buffers

_GENERATION = "generation_config.json"


def export_trained(
    trained: TrainedModel,
    path: Path,
    *,
    dtype: str | None = None,
    is_averaged: bool = False,
    max_shard_bytes: float = 5e9,
    merges_adapter: bool = False,
) -> str:
    """Write a run's model as ``sw.export`` does, with the tokenizer that it was trained with.

    Args:
        trained: A run or a checkpoint.
        path: A folder that does not exist yet, or is empty. No partial files are left if writing fails.
        dtype: Dtype of floating-point weights in the files; by default that of the masters.
        is_averaged: Write averaged weights if the checkpoint has them.
        max_shard_bytes: Maximum size of a file in bytes. A larger tensor gets its own file.
        merges_adapter: Write the whole model with the adapter merged, instead of the adapter alone.

    Returns:
        The class that loads the folder, such as ``transformers.AutoModelForCausalLM``.
    """
    if trained.checkpoint is None:
        raise ConfigError(
            f"{printable(trained.folder)} is a Hugging Face folder already.\n  Name a run's folder or a checkpoint."
        )
    resolved = trained.resolve([], 1)
    has_adapter = resolved.config.lora.is_used
    if merges_adapter and not has_adapter:
        raise ConfigError("--merge: the run trained no adapter.\n  Leave it out.")
    model, base = defer_model(resolved, torch.device("cpu"))
    if not has_adapter:
        base = None  # the checkpoint has all weights
    elif base is None:
        base = _InMemory(dict(model.named_parameters()))  # only from_pretrained itself could read the folder
    checkpoint = open_checkpoint(trained.checkpoint)
    units = _units(model, checkpoint, base, is_averaged=is_averaged)
    if has_adapter and not merges_adapter:
        units = [unit for unit in ([pair for pair in unit if pair[0] not in (base or ())] for unit in units) if unit]
    arriving = (_read(checkpoint, base, unit) for unit in units)
    extents = [[dataclasses.replace(stored, name=name) for name, stored in unit] for unit in units]
    target_dtype = None if dtype is None else torch_dtype(dtype)
    form = form_of(model, merges=merges_adapter)
    tokenizer = None if trained.unknown_tokens else trained.hf_tokenizer()
    options = FolderOptions(tokenizer, target_dtype, max_shard_bytes)
    write_folder(path, form, extents, arriving, options)
    source, kind = trained.model.get("hf"), CLASSES[resolved.task.name]
    if has_adapter and not merges_adapter:
        return f"peft.AutoPeftModelFor{kind}"
    if source is not None and (settings := Path(source).expanduser() / _GENERATION).is_file():
        shutil.copyfile(settings, path / _GENERATION)
    return f"transformers.AutoModelFor{kind}"


class _InMemory:
    """Frozen weights of a loaded model, with the interface of ``WeightFiles``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._held = {name: tensor for name, tensor in tensors.items() if not tensor.requires_grad}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def read(self, pairs: Iterable[tuple[Extent, Tensor]]) -> None:
        """Fill each flat target."""
        for extent, target in pairs:
            target.copy_(memory_order(self._held[extent.name]))


def _units(
    model: nn.Module, checkpoint: Checkpoint, base: WeightFiles | _InMemory | None, *, is_averaged: bool
) -> Sequence[Sequence[tuple[str, Extent]]]:
    """Return the model's names with their entries in the checkpoint or the base folder, grouped by block."""
    stored, found = checkpoint.tensors, []
    for name, parameter in model.named_parameters():
        extent = stored.get(f"average/{name}") if is_averaged else None
        extent = stored.get(name) if extent is None else extent  # frozen parameters have no average
        if extent is None and base is not None and name in base:
            dtype = dtype_name(parameter.dtype)
            extent = Extent(name, tuple(parameter.shape), dtype, 0, parameter.numel())
        found.append((name, extent))
    found += [(name, stored.get(f"{BUFFER}{name}")) for name in persistent_buffers(model)]
    missing = [name for name, extent in found if extent is None]
    if missing:
        raise CheckpointError(
            f"the checkpoint holds no {printable(missing[0])}"
            + (f" and {len(missing) - 1} more tensors of the run's model" if len(missing) > 1 else "")
            + ".\n  It is of another model, or its folder was changed since."
        )
    pairs = [(name, extent) for name, extent in found if extent is not None]
    return [list(unit) for _, unit in itertools.groupby(pairs, lambda pair: _block(pair[0]))]


def _block(name: str) -> str:
    """Return the path up to the first number: ``blocks.3`` for ``blocks.3.mlp.up.weight``."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""


def _read(
    checkpoint: Checkpoint, base: WeightFiles | _InMemory | None, unit: Sequence[tuple[str, Extent]]
) -> dict[str, Tensor]:
    found = {name: empty(stored) for name, stored in unit}
    pairs = [(stored, memory_order(found[name])) for name, stored in unit]
    if base is not None:
        base.read([pair for pair in pairs if pair[0].name in base])
        pairs = [pair for pair in pairs if pair[0].name not in base]
    checkpoint.read_into(pairs, ignored=checkpoint.tensors.keys())
    return found
