"""Reads ranges of tensors from plain safetensors files of Hugging Face folders, without reading the rest."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.shard import CHUNK_BYTES, FORMAT_DTYPE, read_block
from shardwise.checkpoint.storage import StoredFile, local_file
from shardwise.comm.dtype import torch_dtype
from shardwise.spec.bound import read_json
from shardwise.spec.errors import CheckpointError
from shardwise.spec.extent import Extent, shared
from shardwise.spec.precision import item_bytes

#: Short dtype names by the format's names.
_DTYPES = {name: dtype for dtype, (name, per_element) in FORMAT_DTYPE.items() if per_element == 1}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CAST_BYTES = 2**20  # read at a time if they are cast; fits into the processor's cache
_MAX_HEADER_BYTES = 100_000_000  # limit of the format


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]  # shape of the tensor, which is contiguous
    offset: int  # byte of the file at which the content starts


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder's safetensors files, and their names in a model."""

    tensors: Mapping[str, StoredTensor]  # the tensors by their names in the files
    digest: bytes  # hash of all headers: equal on ranks that see the same files, apart from the tensors' content
    keys: Mapping[str, str]  # names in the files by names in the model; empty until :meth:`named` is called
    dtypes: Mapping[str, torch.dtype]  # dtypes of the plain model, by name in the model

    @classmethod
    def open(cls, folder: Path) -> WeightFiles | None:
        """Read the headers of ``model.safetensors``, or of the files that its index names.

        Returns:
            ``None`` if the folder has neither.
        """
        digest = hashlib.sha256()
        tensors: dict[str, StoredTensor] = {}
        for name in _file_names(folder):
            path = folder / name
            try:
                header, begin, num_bytes = _header(path)
                tensors |= {key: _stored(path, key, entry, begin, num_bytes) for key, entry in header.items()}
            except (OSError, RefusedError, ValueError, KeyError, TypeError, RecursionError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise CheckpointError(
                    f"{path} is not a safetensors file that can be read: {reason}.\n"
                    "  Copy or download the folder again."
                ) from None
            digest.update(json.dumps([name, header, num_bytes], sort_keys=True).encode())
        return cls(tensors, digest.digest(), {}, {}) if tensors else None

    def named(self, keys: Mapping[str, str], dtypes: Mapping[str, torch.dtype]) -> WeightFiles:
        """Return the same files with the names of a model's tensors."""
        return WeightFiles(self.tensors, self.digest, keys, dtypes)

    def __contains__(self, name: str) -> bool:
        """Return whether the model's ``name`` is in the files."""
        return name in self.keys

    def read(self, pairs: Iterable[tuple[Extent, Tensor]]) -> None:
        """Fill each flat target with its range of the model's tensor, cast first to the plain model's dtype.

        Casting needs a megabyte of memory in addition to the targets.
        """
        by_file: dict[Path, list[tuple[StoredTensor, Extent, Tensor]]] = {}
        for extent, target in pairs:
            stored = self.tensors[self.keys[extent.name]]
            by_file.setdefault(stored.file, []).append((stored, extent, target))
        for path, wanted in by_file.items():
            try:
                with path.open("rb") as opened:
                    file = local_file(opened.fileno())
                    for stored, extent, target in wanted:
                        _read(file, stored, extent, target, self.dtypes[extent.name])
            except (OSError, RefusedError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise CheckpointError(f"{path}: {reason}.\n  Copy or download the folder again.") from None

    def has_same_content(self, one: str, other: str) -> bool:
        """Return whether two tensors of the files are equal, byte for byte."""
        first, second = self.tensors[one], self.tensors[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        with first.file.open("rb") as left, second.file.open("rb") as right:
            left.seek(first.offset)
            right.seek(second.offset)
            rest = math.prod(first.shape) * item_bytes(first.dtype)
            while rest > 0:
                count = min(rest, CHUNK_BYTES)
                if left.read(count) != right.read(count):
                    return False
                rest -= count
        return True


def _read(file: StoredFile, source: StoredTensor, extent: Extent, target: Tensor, dtype: torch.dtype) -> None:
    stored = torch_dtype(source.dtype)
    whole = Extent(extent.name, source.shape, source.dtype, 0, math.prod(source.shape))
    if target.dtype is stored and dtype is stored:
        for block in shared(whole, extent):
            read_block(file, source.offset, source.dtype, block, target)
        return
    step = _CAST_BYTES // item_bytes(source.dtype)
    staging = torch.empty(min(step, target.numel()), dtype=stored)
    for start in range(0, target.numel(), step):
        stop = min(start + step, target.numel())
        part, into = replace(extent, start=extent.start + start, stop=extent.start + stop), staging[: stop - start]
        for block in shared(whole, part):
            read_block(file, source.offset, source.dtype, block, into)
        with torch.no_grad():
            target[start:stop].copy_(into.to(dtype))


def _file_names(folder: Path) -> Sequence[str]:
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        problem = None if all(Path(name).name == name for name in names) else "it names a file outside of the folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem, names = str(error), []
    if problem is not None:
        raise CheckpointError(f"{index} cannot be used: {problem}.\n  Copy or download the folder again.")
    return names


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return a file's header without metadata, the byte at which content starts, and the file's size."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or length > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise ValueError(f"it has {num_bytes} bytes, its header is said to have {length}")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length, num_bytes


def _stored(path: Path, key: str, entry: Any, begin: int, num_bytes: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{key} has dtype {entry['dtype']}, which is not known")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
    start, stop = entry["data_offsets"]
    if start < 0 or begin + stop > num_bytes or stop - start != math.prod(shape) * item_bytes(dtype):
        raise ValueError(f"{key} of shape {list(shape)} does not take bytes {start} to {stop} of its {num_bytes}")
    return StoredTensor(path, dtype, shape, begin + start)
