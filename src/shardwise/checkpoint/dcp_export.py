"""Exports a checkpoint to a folder of ``torch.distributed.checkpoint``, in one process without a process group.

The folder contains ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``. Names
and settings are those of ``get_model_state_dict`` and ``get_optimizer_state_dict`` of
``torch.distributed.checkpoint.state_dict``, so that ``dcp.load`` fills such a state dict on any layout. torch plans and
writes the files; each tensor is read when torch is about to write it.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.shard import split_into_files
from shardwise.comm.dtype import memory_order, torch_dtype
from shardwise.spec.errors import CheckpointError, StorageError
from shardwise.spec.extent import Extent
from shardwise.spec.text import printable
from shardwise.weights.state.extents import empty
from shardwise.weights.state.stored_ranges import BUFFER

_OPTIMIZER = "optimizer/"
#: Prefixes of names that torch's checkpoints do not have: averages, and ranks' separate state and parameters.
_OURS = ("average/", "rank/", "rank-")


def export_dcp(
    checkpoint: Checkpoint,
    target: Path,
    *,
    model_key: str = "model",
    optimizer_key: str = "optimizer",
    has_optimizer: bool = True,
    is_flat: bool = False,
    max_file_bytes: float = 1e9,
) -> list[str]:
    """Write the model and the optimizer state of ``checkpoint`` as the folder ``target``.

    Args:
        checkpoint: A checkpoint of any layout.
        target: A folder that does not exist.
        model_key: Key of the model's state dict, with dots for nested keys; ``""`` puts its names at the top level.
        optimizer_key: The same for the optimizer's.
        has_optimizer: Write optimizer state if the checkpoint has some.
        is_flat: Name the optimizer's settings by parameter, as ``flatten_optimizer_state_dict=True`` does.
        max_file_bytes: Maximum size of a file. A larger tensor gets its own file.

    Returns:
        Names of the checkpoint's tensors that were not exported.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists.\n  Name a folder that does not exist.")
    planner = _Planner(checkpoint)
    stored = checkpoint.tensors
    left_out = [name for name in stored if name.startswith(_OURS)]
    names = [name for name in stored if not name.startswith((_OPTIMIZER, *_OURS))]
    model = {name.removeprefix(BUFFER): stored[name] for name in names}
    model |= {name: stored[known] for name, known in checkpoint.data.get("tied", {}).items() if name not in stored}
    state: dict[str, Any] = {}
    planner.put(state, model_key, model)
    saved = checkpoint.data.get("optimizer")
    if saved is not None and has_optimizer:
        parameters = [name for name in names if not name.startswith(BUFFER)]
        planner.put(state, optimizer_key, _optimizer(checkpoint, saved, parameters, left_out, is_flat=is_flat))
    elif saved is not None:
        left_out.append("optimizer")
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        temporary.mkdir(parents=True)
        planner.save(temporary, state, max_file_bytes)
        temporary.rename(target)
    except OSError as error:
        raise StorageError(f"{target} was not written: {error.strerror or error}.\n  Name another place.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return left_out


def _optimizer(
    checkpoint: Checkpoint, saved: Mapping[str, Any], parameters: list[str], left_out: list[str], *, is_flat: bool
) -> dict[str, Any]:
    """Return the optimizer's state dict, with extents in place of tensors, and extend ``left_out``."""
    state: dict[str, dict[str, Any]] = {}
    for full_name, extent in checkpoint.tensors.items():
        if not full_name.startswith(_OPTIMIZER):
            continue
        name, _, kind = full_name.removeprefix(_OPTIMIZER).rpartition("/")
        if name.startswith(_OURS):
            left_out.append(full_name)
            continue
        if "." in kind:
            raise CheckpointError(
                f"the checkpoint's optimizer keeps its state in quantized blocks ({printable(full_name)}), of which"
                " torch's checkpoints have none by the names of parameters.\n"
                "  Export the model alone: --no-optimizer."
            )
        state.setdefault(name, {})[kind] = extent
    for name, own in saved["scalars"].items():
        state.setdefault(name, {}).update(
            {kind: torch.tensor(value) if isinstance(value, float) else value for kind, value in own.items()}
        )
    groups = list(zip(saved["groups"], saved.get("members") or [parameters], strict=True))
    if not is_flat:
        return {"state": state, "param_groups": [{**settings, "params": list(names)} for settings, names in groups]}
    flat = {f"state.{name}.{kind}": value for name, own in state.items() for kind, value in own.items()}
    settings_of = ((name, settings) for settings, names in groups for name in names)
    return flat | {
        f"param_groups.{name}.{kind}": value for name, settings in settings_of for kind, value in settings.items()
    }


class _Planner(DefaultSavePlanner):
    """Plans with tensors on meta, and reads the value of each tensor when torch writes it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._extents: dict[int, Extent] = {}

    def put(self, state: dict[str, Any], key: str, inner: dict[str, Any]) -> None:
        """Insert a state dict at a key with dots, with a meta tensor for each extent."""
        for part in key.split(".") if key else ():
            state = state.setdefault(part, {})
        state |= self._on_meta(inner)

    def _on_meta(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._on_meta(inner) for key, inner in value.items()}
        if not isinstance(value, Extent):
            return value
        made = torch.empty(value.shape, dtype=torch_dtype(value.dtype), device="meta")
        self._extents[id(made)] = value
        return made

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object that is saved under the key of ``index``."""
        stored = super().lookup_object(index)
        if not (isinstance(stored, Tensor) and stored.is_meta):
            return stored
        extent = self._extents[id(stored)]
        value = empty(extent)
        self._checkpoint.read_into([(extent, memory_order(value))], ignored=self._checkpoint.tensors.keys())
        return value.contiguous()

    def save(self, folder: Path, state: dict[str, Any], max_file_bytes: float) -> None:
        """Save as ``dcp.save`` on as many ranks as there are files, because torch buffers all tensors of a file."""
        writer = FileSystemWriter(folder, overwrite=False)
        writer.set_up_storage_writer(is_coordinator=True)
        self.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
        (plan,), metadata = self.create_global_plan([writer.prepare_local_plan(self.create_local_plan())])
        values = ((item, self.state_dict[item.index.fqn]) for item in plan.items)
        sizes = ((item, value.nbytes if isinstance(value, Tensor) else 0) for item, value in values)
        files = split_into_files(sizes, max_file_bytes)
        plans = writer.prepare_global_plan([dataclasses.replace(plan, items=items) for items in files])
        writer.finish(metadata, [writer.write_data(part, self).wait() for part in plans])
