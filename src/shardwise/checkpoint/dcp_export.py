"""From a checkpoint to a folder of ``torch.distributed.checkpoint``, in one process without a process group.

The folder holds ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``, names and
settings as ``get_model_state_dict`` and ``get_optimizer_state_dict`` of ``torch.distributed.checkpoint.state_dict``
give them, so that ``dcp.load`` fills such a state dict on any layout.

torch writes and describes the files itself: this module plays the ranks of a save, one after the other, and reads the
tensors of a file when torch is about to write it. torch holds them until the file is written.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardwise.checkpoint.reader import Checkpoint
from shardwise.comm.dtype import memory_order, torch_dtype
from shardwise.spec.errors import CheckpointError, StorageError
from shardwise.spec.extent import Extent
from shardwise.spec.precision import item_bytes
from shardwise.spec.text import printable
from shardwise.weights.state.extents import empty
from shardwise.weights.state.held import BUFFER

_OPTIMIZER = "optimizer/"
#: Beginnings of names of what torch's checkpoints do not have: averages and each rank's own state and parameters.
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
        checkpoint: Of any layout.
        target: A folder that does not exist.
        model_key: Key of the model's state dict, with dots for deeper ones; ``""``: its names are at the top.
        optimizer_key: The same for the optimizer's.
        has_optimizer: Write optimizer state where there is some.
        is_flat: Name the optimizer's settings by parameter, as ``flatten_optimizer_state_dict=True`` does.
        max_file_bytes: A file holds no more, unless one tensor alone does.

    Returns:
        Names of tensors of the checkpoint that the folder does not hold.

    Raises:
        CheckpointError: A file is damaged, the folder exists, or torch has no place for the optimizer's state.
        StorageError: The disk refuses; nothing is left behind.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists.\n  Name a folder that does not exist.")
    content = _Content(checkpoint, model_key, optimizer_key if has_optimizer else None, is_flat=is_flat)
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        temporary.mkdir(parents=True)
        _save(temporary, content, max_file_bytes)
        temporary.rename(target)
    except OSError as error:
        raise StorageError(f"{target} was not written: {error.strerror or error}.\n  Name another place.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return content.left_out


class _Content:
    """The flat keys of the folder, with what is to be written.

    Attributes:
        checkpoint: Where tensors are read.
        tensors: What the checkpoint stores for each key.
        values: Numbers and settings by key.
        paths: The path in the nested state dict, by key.
        left_out: Names that the folder does not get.
    """

    def __init__(self, checkpoint: Checkpoint, model_key: str, optimizer_key: str | None, *, is_flat: bool) -> None:
        self.checkpoint = checkpoint
        self.tensors: dict[str, Extent] = {}
        self.values: dict[str, Any] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.left_out: list[str] = []
        self._model = tuple(model_key.split(".")) if model_key else ()
        self._optimizer = tuple(optimizer_key.split(".")) if optimizer_key else ()
        self._is_flat = is_flat
        stored = checkpoint.tensors
        names = [name for name in stored if not name.startswith((_OPTIMIZER, *_OURS))]
        for name in names:
            self._put((*self._model, name.removeprefix(BUFFER)), stored[name])
        for name, known in checkpoint.data.get("tied", {}).items():
            if name not in stored:
                self._put((*self._model, name), stored[known])
        self.left_out = [name for name in stored if name.startswith(_OURS)]
        saved = checkpoint.data.get("optimizer")
        if saved is not None and optimizer_key is not None:
            parameters = [name for name in names if not name.startswith(BUFFER)]
            self._add_optimizer(saved, parameters)
        elif saved is not None:
            self.left_out.append("optimizer")

    def _put(self, path: tuple[str | int, ...], what: Any) -> None:
        key = ".".join(map(str, path))
        self.paths[key] = path
        if isinstance(what, Extent):
            self.tensors[key] = what
        else:
            self.values[key] = what

    def _add_optimizer(self, saved: Mapping[str, Any], parameters: list[str]) -> None:
        for full_name, extent in self.checkpoint.tensors.items():
            if not full_name.startswith(_OPTIMIZER):
                continue
            name, _, kind = full_name.removeprefix(_OPTIMIZER).rpartition("/")
            if name.startswith(_OURS):
                self.left_out.append(full_name)
                continue
            if "." in kind:
                raise CheckpointError(
                    f"the checkpoint's optimizer keeps its state in quantized blocks ({printable(full_name)}), of which"
                    " torch's checkpoints have none by the names of parameters.\n"
                    "  Export the model alone: --no-optimizer."
                )
            self._put_state(name, kind, extent)
        for name, own in saved["scalars"].items():
            for kind, value in own.items():
                self._put_state(name, kind, torch.tensor(value) if isinstance(value, float) else value)
        members = saved.get("members") or [parameters]
        for place, (settings, held) in enumerate(zip(saved["groups"], members, strict=True)):
            self._put_group(place, settings, held)

    def _put_state(self, name: str, kind: str, what: Any) -> None:
        inner = (f"state.{name}.{kind}",) if self._is_flat else ("state", name, kind)
        self._put((*self._optimizer, *inner), what)

    def _put_group(self, place: int, settings: Mapping[str, Any], members: list[str]) -> None:
        if not self._is_flat:
            for kind, value in {**settings, "params": list(members)}.items():
                self._put((*self._optimizer, "param_groups", place, kind), value)
            return
        for name in members:
            for kind, value in settings.items():
                self._put((*self._optimizer, f"param_groups.{name}.{kind}"), value)

    def parts(self, most: float) -> Iterator[dict[str, Any]]:
        """The keys of each file, with a tensor on meta for what is read later; values are in the first."""
        part, num_bytes = dict(self.values), 0
        for key, extent in self.tensors.items():
            size = extent.numel * item_bytes(extent.dtype)
            if part and num_bytes + size > most:
                yield part
                part, num_bytes = {}, 0
            part[key] = torch.empty(extent.shape, dtype=torch_dtype(extent.dtype), device="meta")
            num_bytes += size
        yield part

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors by key."""
        found = {key: empty(self.tensors[key]) for key in keys}
        pairs = [(self.tensors[key], memory_order(value)) for key, value in found.items()]
        self.checkpoint.read_into(pairs, ignored=self.checkpoint.tensors.keys())
        return found


class _Planner(DefaultSavePlanner):
    """Gives torch the values of the tensors of one file when it writes them."""

    def __init__(self, content: _Content) -> None:
        super().__init__(flatten_state_dict=False)
        self._content = content
        self._held: dict[str, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is saved under the key of ``index``; asked for once."""
        held = super().lookup_object(index)
        if not (isinstance(held, Tensor) and held.is_meta):
            return held
        if index.fqn not in self._held:
            keys = (key for key, value in self.state_dict.items() if isinstance(value, Tensor) and value.is_meta)
            self._held = self._content.read(keys)
        return self._held.pop(index.fqn).contiguous()


def _save(folder: Path, content: _Content, max_file_bytes: float) -> None:
    """What ``dcp.save`` does on as many ranks as there are files."""
    writer = FileSystemWriter(folder, overwrite=False)
    writer.set_up_storage_writer(is_coordinator=True)
    planners = []
    for rank, part in enumerate(content.parts(max_file_bytes)):
        planner = _Planner(content)
        planner.set_up_planner(part, writer.storage_meta(), is_coordinator=rank == 0)
        planners.append(planner)
    plans = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    plans, metadata = planners[0].create_global_plan(plans)
    metadata.planner_data = content.paths
    written = []
    for planner, plan in zip(planners, writer.prepare_global_plan(plans), strict=True):
        written.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, written)
