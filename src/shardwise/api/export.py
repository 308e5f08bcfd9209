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
    gives the same logits. A model of transformers keeps its own names; ours (``sw.models.gpt``) becomes a GPT-2.
    Of a model with a LoRA of peft the adapter is written by itself, which ``peft.PeftModel.from_pretrained`` loads, or
    the whole model with the adapter in its weights. Averaged weights are written inside ``with average.swapped_in():``.

    Args:
        path: A folder that does not exist yet, or is empty. It appears when it is complete.
        model: A parallelized model of transformers, or one of ``sw.models.gpt`` without experts.
        tokenizer: Written beside it: anything with ``save_pretrained``, or the folder of one.
        dtype: Of floating-point weights in the files, such as ``"bf16"``; by default the masters'.
        max_shard_bytes: Files hold no more, unless one tensor alone does.
        merge_adapter: Write the whole model of an adapted one.

    Collective:
        A gather of JSON (about 100 bytes for each range of a parameter that a rank owns), then one message to rank 0
        for each range that another rank owns, and small JSON. Rank 0 holds one unit whole, and writes. All ranks must
        call.

    Raises:
        ConfigError: transformers has no such model, or ``path`` is in use; the model has several adapters, or one that
            cannot be merged.
        StorageError: The disk refuses; nothing is left behind.
        StateError: Parameters have no values yet.
    """
    wanted = torch_dtype(dtype) if isinstance(dtype, str) else dtype
    _export(path, model, FolderOptions(tokenizer, wanted, max_shard_bytes, merges=merge_adapter))


def write_weights(path: str | os.PathLike[str], model: nn.Module) -> None:
    """As :func:`export`, into a folder that may hold other files; files of the same name are replaced.

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
    arriving = units.gathered()
    if world.rank == 0:
        try:
            write_folder(Path(path), form, units.extents, arriving, options)
        except ShardwiseError as found:
            error = found
        except Exception as found:  # noqa: BLE001 - transformers refuses a configuration, on this rank alone
            error = ConfigError(
                f"{printable(path)} was not written: {type(found).__name__}: {printable(found)}.\n"
                "  Mend model.config or model.generation_config as it says."
            )
            error.__cause__ = found
    for _ in arriving:  # on rank 0 what an error has left: the others send it all the same
        pass
    fail_together(world, error)


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """As :func:`export` takes them.

    Attributes:
        tokenizer: Anything with ``save_pretrained``, or the folder of one; ``None``: none is written.
        dtype: Of floating-point weights; ``None``: as they arrive.
        max_shard_bytes: A file holds no more, unless one tensor alone does.
        joins: The folder may be there, with other files; those of the same names are replaced.
        merges: Of an adapted model write the whole.
    """

    tokenizer: Any = None
    dtype: torch.dtype | None = None
    max_shard_bytes: float = 5e9
    joins: bool = False
    merges: bool = False

    def cast(self, tensor: Tensor) -> Tensor:
        """A tensor in the dtype that files have."""
        return tensor if self.dtype is None or not tensor.is_floating_point() else tensor.to(self.dtype)


def write_folder(
    path: Path,
    form: Form,
    units: Sequence[Sequence[Extent]],
    arriving: Iterable[dict[str, Tensor]],
    options: FolderOptions,
) -> None:
    """Write a Hugging Face folder from tensors that arrive unit by unit; each unit is emptied once it is written.

    Raises:
        ConfigError: ``path`` is in use.
        StorageError: The disk refuses; nothing is left behind.
    """
    if not options.joins and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{printable(path)} exists.\n  Export into a folder that does not exist yet.")
    part = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        part.mkdir(parents=True)
        _fill(part, form, units, arriving, options)
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
            f"{printable(path)} was not written: {error.strerror or error}.\n  Free space, or name another folder."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fill(
    folder: Path,
    form: Form,
    units: Sequence[Sequence[Extent]],
    arriving: Iterable[dict[str, Tensor]],
    options: FolderOptions,
) -> None:
    on_meta = [
        {each.name: torch.empty(each.shape, dtype=torch_dtype(each.dtype), device="meta") for each in unit}
        for unit in units
    ]
    converted: dict[str, Tensor] = {}
    for unit in on_meta:
        converted |= form.convert(unit)
    at_once = form.convert({name: tensor for unit in on_meta for name, tensor in unit.items()})
    if at_once.keys() != converted.keys():  # transformers makes a tensor of several units
        converted, arriving = at_once, [{name: value for unit in arriving for name, value in unit.items()}]
    cast = {name: options.cast(tensor) for name, tensor in converted.items()}
    entries = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in cast.items()}
    floating = [tensor.dtype for tensor in cast.values() if tensor.dtype.is_floating_point]
    form.write_config(folder, max(floating, key=floating.count))
    most = math.inf if isinstance(form, Adapter) else options.max_shard_bytes  # peft reads one file
    files = WeightFolder(folder, entries, most, form.stem)
    try:
        for unit in arriving:
            _write(files, form, unit, options)
        files.close()
    finally:
        files.abandon()


def _write(files: WeightFolder, form: Form, unit: dict[str, Tensor], options: FolderOptions) -> None:
    """Write a unit's tensors, and empty it: the next one is gathered while the caller still holds this one's name."""
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
