"""Reads a folder of ``torch.distributed.checkpoint`` from one process, one tensor or value at a time.

Such a folder has a ``.metadata`` file, which is a pickle, and files in which the shards of tensors, and pickled values,
follow each other. Unpickling executes what the files say: only folders from a trusted source may be opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwise.comm.dtype import dtype_name
from shardwise.spec.errors import CheckpointError


class Stored(NamedTuple):
    """A tensor of the folder: short dtype and shape."""

    dtype: str
    shape: tuple[int, ...]


class DcpFolder:
    """An opened folder.

    Attributes:
        tensors: The tensors by their key: the path in the state dict, joined by dots.

    Raises:
        CheckpointError: There is no such folder, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        with self._reading(".metadata"):
            found = self._reader.read_metadata()
            if not isinstance(found, Metadata):
                raise TypeError(f"it holds a {type(found).__name__}")
        self._metadata = found
        self._reader.set_up_storage_reader(found, is_coordinator=True)
        stored = found.state_dict_metadata
        with self._reading("the dtypes"):
            self.tensors = {
                key: Stored(dtype_name(held.properties.dtype), tuple(held.size))
                for key, held in stored.items()
                if isinstance(held, TensorStorageMetadata)
            }
        known = found.planner_data if isinstance(found.planner_data, dict) else {}
        #: The path in the state dict that was saved, for each key.
        self.paths: dict[str, tuple[str | int, ...]] = {key: tuple(known.get(key, (key,))) for key in stored}

    def read_tensor(self, key: str) -> Tensor:
        """A full tensor on the CPU. One of its shards is held at the same time."""
        held = self._metadata.state_dict_metadata[key]
        assert isinstance(held, TensorStorageMetadata)
        return self._read(key, torch.empty(held.size, dtype=held.properties.dtype))

    def read_value(self, key: str) -> Any:
        """The value that was saved under ``key``; a tensor without dimensions as its number. Unpickles it."""
        if key in self.tensors:
            tensor = self.read_tensor(key)
            return tensor.item() if tensor.dim() == 0 else tensor
        return self._read(key, None)

    def _read(self, key: str, target: Any) -> Any:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        wanted = {key: target}
        with self._reading(repr(key)):
            planner.set_up_planner(wanted, self._metadata, is_coordinator=True)
            plan = planner.finish_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        return wanted[key]

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path} is no folder of torch.distributed.checkpoint: {Path(str(error.filename)).name} is"
                " missing.\n"
                "  Name the folder that dcp.save() was given, with its .metadata and *.distcp files."
            ) from None
        except OSError as error:
            raise CheckpointError(f"{self.path}: {what} cannot be read: {error.strerror or error}.") from None
        except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
            raise CheckpointError(f"{self.path}: {what} cannot be read: {type(error).__name__}: {error}.") from None
