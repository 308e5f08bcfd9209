"""Writes safetensors files of Hugging Face folders, tensor by tensor, in any order.

::

    <folder>/model.safetensors                       one file, or several with their index:
    <folder>/model-00001-of-00003.safetensors
    <folder>/model.safetensors.index.json
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from shardwise.checkpoint.shard import CHUNK_BYTES, byte_view, file_layout, split_into_files
from shardwise.comm.dtype import dtype_name
from shardwise.spec.precision import item_bytes

#: Short dtype name and shape.
Entry = tuple[str, tuple[int, ...]]


class WeightFolder:
    """The files of a model's weights; names, dtypes and shapes are known before the first value.

    Consecutive ``tensors`` share a file of at most ``max_shard_bytes``. A larger tensor gets its own file.

    Raises:
        OSError: Creating the files failed.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Entry], max_shard_bytes: float, stem: str = "model") -> None:
        sizes = ((name, math.prod(shape) * item_bytes(dtype)) for name, (dtype, shape) in tensors.items())
        shards = split_into_files(sizes, max_shard_bytes)
        count = len(shards)
        self._missing = dict(tensors)
        self._places: dict[str, tuple[int, int]] = {}
        self._files: list[int] = []
        weight_map = {}
        for number, names in enumerate(shards, 1):
            part = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
            file_name = f"{stem}{part}.safetensors"
            ordered = sorted(names, key=lambda name: (-item_bytes(tensors[name][0]), name))
            header, offsets, num_bytes = file_layout({"format": "pt"}, [(name, *tensors[name]) for name in ordered])
            file = os.open(folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._files.append(file)
            os.ftruncate(file, num_bytes)
            _write_at(file, memoryview(header), 0)
            for name, offset in zip(ordered, offsets, strict=True):
                self._places[name] = file, offset
                weight_map[name] = file_name
        if count > 1:
            total = {"total_parameters": sum(math.prod(shape) for _, shape in tensors.values())}
            total |= {"total_size": sum(math.prod(shape) * item_bytes(dtype) for dtype, shape in tensors.values())}
            text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True)
            (folder / f"{stem}.safetensors.index.json").write_text(f"{text}\n", "utf-8")

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, with at most ``CHUNK_BYTES`` of memory in addition to it.

        Raises:
            OSError: Writing failed.
        """
        dtype, shape = self._missing.pop(name)
        assert (dtype_name(tensor.dtype), tuple(tensor.shape)) == (dtype, shape), (name, tensor.dtype, tensor.shape)
        file, offset = self._places[name]
        flat, size = tensor.detach().contiguous().view(-1), item_bytes(dtype)
        step = CHUNK_BYTES // size
        for start in range(0, flat.numel(), step):
            _write_at(file, byte_view(flat[start : start + step].cpu()), offset + start * size)

    def close(self) -> None:
        """Sync all files to the disk and close them."""
        assert not self._missing, sorted(self._missing)[:3]
        for file in self._files:
            os.fsync(file)
        self.abandon()

    def abandon(self) -> None:
        """Close the files without syncing."""
        while self._files:
            os.close(self._files.pop())


def _write_at(file: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(file, content, offset)
        content, offset = content[count:], offset + count
