"""``sw.export``: a folder that ``AutoModelForCausalLM.from_pretrained`` loads, written unit by unit."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.export_form import Adapter, Form, form_of
from shardwise.checkpoint.weight_folder import WeightFolder
from shardwise.comm.control import fail_together
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.buffers import saved_dtypes
from shardwise.spec.errors import ConfigError, ShardwiseError, StorageError
from shardwise.spec.extent import Extent
from shardwise.spec.text import printable
from shardwise.weights.state.iterate import Units
from shardwise.weights.state.model import own_buffers


def export(
    path: str | os.PathLike[str],
    model: nn.Module,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: float = 5e9,
    *,
    merge_adapter: bool = False,
) -> None:
    """Write a parallelized model as a Hugging Face folder.

    ``transformers.AutoModelForCausalLM.from_pretrained(path)`` (or the class that ``config.json`` names) loads it and
    gives the same logits. A model of transformers keeps its parameter names; a ``sw.models.gpt`` is written as a GPT-2.
    For a model with a LoRA of peft, only the adapter is written, in the form that ``peft.PeftModel.from_pretrained``
    loads; with ``merge_adapter``, the whole model is written with the adapter merged into its weights. To write
    averaged weights, call this inside ``with average.swapped_in():``.

    Args:
        path: A folder that does not exist yet, or is empty. The files appear in it only when all are complete.
        model: A parallelized model of transformers, or one of ``sw.models.gpt`` without experts.
        tokenizer: Written into the folder too: an object with ``save_pretrained``, or the path of a tokenizer's folder.
        dtype: Dtype of floating-point weights in the files, such as ``"bf16"``; by default that of the masters.
        max_shard_bytes: Maximum size of a file in bytes. A larger tensor gets its own file.
        merge_adapter: Write the whole model with the adapter merged, instead of the adapter alone.

    Collective:
        A gather of JSON (about 100 bytes for each range of a parameter that a rank owns), then one message to rank 0
        for each range that another rank owns, and small JSON. Rank 0 holds one full unit at a time, and writes. All
        ranks must call.

    Raises:
        ConfigError: transformers has no such model, ``path`` is not empty, or the model has several active adapters or
            one that cannot be merged.
        StorageError: Writing failed, for example because the disk is full. No partial files are left.
        StateError: Parameters have no values yet.
    """
    wanted = torch_dtype(dtype) if isinstance(dtype, str) else dtype
    _export(path, model, FolderOptions(tokenizer, wanted, max_shard_bytes, merges=merge_adapter))


def write_weights(path: str | os.PathLike[str], model: nn.Module) -> None:
    """As :func:`export`, into a folder that may contain other files; files of the same name are replaced.

    Collective:
        As :func:`export`. All ranks must call.
    """
    _export(path, model, FolderOptions(joins=True))


def _export(path: str | os.PathLike[str], model: nn.Module, options: FolderOptions) -> None:
    engine = engine_of(model, "sw.export")
    engine.need_values("sw.export()")
    engine.sync_buffers()
    world, form, dtypes = engine.comms.world, form_of(model, merges=options.merges), saved_dtypes(model)
    buffers = {name: each.to(dtypes.get(name, each.dtype)) for name, each in own_buffers(model, engine).items()}
    units = Units(engine, {} if engine.comms.replica else buffers)
    error: ShardwiseError | None = None
    gathered_units = units.gathered()
    if world.rank == 0:
        try:
            write_folder(Path(path), form, units.extents, gathered_units, options)
        except ShardwiseError as found:
            error = found
        except Exception as found:  # noqa: BLE001 - transformers refuses a configuration, on this rank alone
            error = ConfigError(
                f"{printable(path)} was not written: {type(found).__name__}: {printable(found)}.\n"
                "  Mend model.config or model.generation_config as it says."
            )
            error.__cause__ = found
    for _ in gathered_units:  # on rank 0 the rest after an error: the other ranks send it anyway
        pass
    fail_together(world, error)


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """Options of :func:`export`.

    Attributes:
        tokenizer: An object with ``save_pretrained``, or the path of a tokenizer's folder; ``None`` writes none.
        dtype: Dtype of floating-point weights in the files; ``None`` keeps the dtype of the tensors.
        max_shard_bytes: Maximum size of a file in bytes. A larger tensor gets its own file.
        joins: Whether the folder may contain other files. Files of the same name are replaced.
        merges: Whether to write the whole model with its adapter merged.
    """

    tokenizer: Any = None
    dtype: torch.dtype | None = None
    max_shard_bytes: float = 5e9
    joins: bool = False
    merges: bool = False

    def cast(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the dtype that it has in files."""
        return tensor if self.dtype is None or not tensor.is_floating_point() else tensor.to(self.dtype)


def write_folder(
    path: Path,
    form: Form,
    units: Sequence[Sequence[Extent]],
    gathered_units: Iterable[dict[str, Tensor]],
    options: FolderOptions,
) -> None:
    """Write a Hugging Face folder from tensors that arrive unit by unit, and clear each unit's dict once it is written.

    Raises:
        ConfigError: ``path`` exists and is not an empty folder.
        StorageError: Writing failed. No partial files are left.
    """
    if not options.joins and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{printable(path)} exists.\n  Export into a folder that does not exist yet.")
    if options.dtype is not None and dtype_name(options.dtype) not in ("fp32", "bf16", "fp16", "fp64"):
        raise ConfigError(f"weights cannot be written as {dtype_name(options.dtype)}.\n  Use fp32, bf16, fp16 or fp64.")
    part = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        part.mkdir(parents=True)
        _fill(part, form, units, gathered_units, options)
        _write_tokenizer(part, options.tokenizer)
        if path.is_dir() and any(path.iterdir()):
            for each in (*path.glob("model*.safetensors"), *path.glob("model*.safetensors.index.json")):
                each.unlink()
            for each in part.iterdir():
                each.replace(path / each.name)
        else:
            part.replace(path)
    except OSError as error:
        raise StorageError(
            f"{printable(path)} was not written: {error.strerror or error}.\n"
            "  Name another folder, or free space if the disk is full."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fill(
    folder: Path,
    form: Form,
    units: Sequence[Sequence[Extent]],
    gathered_units: Iterable[dict[str, Tensor]],
    options: FolderOptions,
) -> None:
    on_meta = [
        {each.name: torch.empty(each.shape, dtype=torch_dtype(each.dtype), device="meta") for each in unit}
        for unit in units
    ]
    converted: dict[str, Tensor] = {}
    for unit in on_meta:
        converted |= form.convert(unit)
    together = form.convert({name: tensor for unit in on_meta for name, tensor in unit.items()})
    if together.keys() != converted.keys():  # transformers builds a tensor from those of several units
        converted, gathered_units = together, [{name: value for unit in gathered_units for name, value in unit.items()}]
    cast = {name: options.cast(tensor) for name, tensor in converted.items()}
    entries = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in cast.items()}
    floating = [tensor.dtype for tensor in cast.values() if tensor.dtype.is_floating_point]
    form.write_config(folder, max(floating, key=floating.count))
    most = math.inf if isinstance(form, Adapter) else options.max_shard_bytes  # peft reads one file
    files = WeightFolder(folder, entries, most, form.stem)
    try:
        for unit in gathered_units:
            _write(files, form, unit, options)
        files.close()
    finally:
        files.abandon()


def _write(files: WeightFolder, form: Form, unit: dict[str, Tensor], options: FolderOptions) -> None:
    """Write a unit's tensors and clear its dict, because the caller keeps the dict while the next unit is gathered."""
    converted = form.convert(dict(unit))
    unit.clear()
    for name in list(converted):
        files.write(name, options.cast(converted.pop(name)))


def _write_tokenizer(folder: Path, tokenizer: Any) -> None:
    if isinstance(tokenizer, (str, os.PathLike)):
        from transformers import AutoTokenizer  # pyrefly: ignore[missing-import]

        tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
