"""One rank's file, in the safetensors format, written and hashed piece by piece.

The header of a file is determined by the manifest. A reader therefore does not parse the header, but computes the
expected one and compares the bytes. Any safetensors reader can open the files: the key of a piece is
``name[start:stop]``, or ``name[slice 2, start:stop]`` for elements of a slice, and its value is one-dimensional.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.storage import StoredFile
from shardwise.launch import inject
from shardwise.spec.extent import Block
from shardwise.spec.precision import item_bytes

#: Bytes that are copied, hashed and written at a time.
CHUNK_BYTES = 8 * 2**20
#: Elements with smaller gaps are read in one request, including the gaps, because the system would read ahead anyway.
MAX_GAP_BYTES = 128 * 2**10

#: By short dtype name: the format's dtype, and how many of its values make one element.
FORMAT_DTYPE = {
    "fp64": ("F64", 1),
    "fp32": ("F32", 1),
    "bf16": ("BF16", 1),
    "fp16": ("F16", 1),
    "fp8_e4m3": ("F8_E4M3", 1),
    "fp8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 1),
    "int32": ("I32", 1),
    "int16": ("I16", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("F32", 2),
    "complex128": ("F64", 2),
}


class Piece(NamedTuple):
    """A range of a logical tensor, or of a slice (``slice``: its number in the manifest), in one file."""

    name: str
    dtype: str
    start: int
    stop: int
    slice: int = -1

    @property
    def key(self) -> str:
        """The name of the piece in the file."""
        region = "" if self.slice < 0 else f"slice {self.slice}, "
        return f"{self.name}[{region}{self.start}:{self.stop}]"

    @property
    def num_bytes(self) -> int:
        """The size of the content in bytes."""
        return (self.stop - self.start) * item_bytes(self.dtype)


@dataclass(frozen=True)
class Layout:
    """The expected layout of a file of a checkpoint."""

    header: bytes  # the first bytes, up to the first tensor
    offsets: dict[Piece, int]  # byte at which each piece starts, in file order
    file_bytes: int


def shard_name(save_id: str, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"shard-{save_id}-r{rank:05d}.safetensors"


def frozen_name(digest: str, rank: int) -> str:
    """Return the name of the file of a rank's frozen parameters; ``digest`` is its hash."""
    return f"frozen-{digest[:16]}-r{rank:05d}.safetensors"


def frozen_layout(rank: int, pieces: Iterable[Piece]) -> Layout:
    """Return the layout of a file of frozen parameters, without the save's id, so that checkpoints can share it."""
    return _layout({"rank": str(rank), "format": "pt"}, pieces)


def layout(*, save_id: str, run_id: str, step: int, rank: int, pieces: Iterable[Piece]) -> Layout:
    """Return the layout of the file with the non-empty ``pieces``: widest elements first, then by name and range.

    (So every piece is aligned to its element, as the format asks for.)
    """
    metadata = {"save_id": save_id, "run_id": run_id, "step": str(step), "rank": str(rank), "format": "pt"}
    return _layout(metadata, pieces)


def _layout(metadata: dict[str, str], pieces: Iterable[Piece]) -> Layout:
    ordered = sorted(pieces, key=lambda piece: (-item_bytes(piece.dtype), piece.name, piece.slice, piece.start))
    entries = [(piece.key, piece.dtype, (piece.stop - piece.start,)) for piece in ordered]
    header, offsets, file_bytes = file_layout(metadata, entries)
    return Layout(header=header, offsets=dict(zip(ordered, offsets, strict=True)), file_bytes=file_bytes)


def file_layout(
    metadata: dict[str, str], entries: Iterable[tuple[str, str, tuple[int, ...]]]
) -> tuple[bytes, list[int], int]:
    """Return the layout of a safetensors file.

    ``entries`` are name, short dtype and shape of each tensor in file order, widest elements first.

    Returns:
        The header, the byte at which each tensor's content starts, and the size of the file.
    """
    entry_of: dict[str, object] = {"__metadata__": metadata}
    begins = []
    end = 0
    for key, dtype, shape in entries:
        begins.append(end)
        end += math.prod(shape) * item_bytes(dtype)
        name, per_element = FORMAT_DTYPE[dtype]
        sizes = [*shape[:-1], shape[-1] * per_element] if per_element > 1 else list(shape)
        entry_of[key] = {"dtype": name, "shape": sizes, "data_offsets": [begins[-1], end]}
    text = json.dumps(entry_of, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + begin for begin in begins], len(header) + end


T = TypeVar("T")


def split_into_files(tensors: Iterable[tuple[T, int]], max_bytes: float) -> list[list[T]]:
    """Divide tensors, given with their bytes, into files of at most ``max_bytes``. A larger tensor gets its own file.

    There is at least one file.
    """
    files: list[list[T]] = [[]]
    file_bytes = 0
    for tensor, num_bytes in tensors:
        if files[-1] and file_bytes + num_bytes > max_bytes:
            files.append([])
            file_bytes = 0
        files[-1].append(tensor)
        file_bytes += num_bytes
    return files


def write_shard(folder: int, name: str, plan: Layout, content: Mapping[Piece, Tensor], step: int | None = None) -> str:
    """Write one file and sync it to the disk, with at most ``CHUNK_BYTES`` of memory in addition to the tensors.

    Returns:
        The hash of the content that was passed to the disk.

    Raises:
        OSError: Writing failed.
    """
    digest = xxhash.xxh3_128()
    file = folders.create(folder, name)
    try:
        for chunk in _chunks(plan, content):
            digest.update(chunk)
            folders.write_all(file, chunk)
            inject.at("mid_shard_write", step)  # the header is written, the content is not
        os.fsync(file)
        inject.at("after_shard_fsync", step)
    finally:
        os.close(file)
    return digest.hexdigest()


def hash_content(plan: Layout, content: Mapping[Piece, Tensor]) -> str:
    """Return the hash that the file will have."""
    digest = xxhash.xxh3_128()
    for chunk in _chunks(plan, content):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(plan: Layout, content: Mapping[Piece, Tensor]) -> Iterator[memoryview]:
    yield memoryview(plan.header)
    for piece in plan.offsets:
        tensor = content[piece].detach()
        step = CHUNK_BYTES // item_bytes(piece.dtype)
        for start in range(0, tensor.numel(), step):
            yield byte_view(tensor[start : start + step].cpu().contiguous())


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a one-dimensional contiguous CPU tensor without copying."""
    return tensor.view(torch.uint8).numpy().data


def check_header(file: StoredFile, expected: Layout) -> None:
    """Compare a file's header with the expected one; raise a RefusedError if they differ."""
    found = bytearray(len(expected.header))
    file.read_at(memoryview(found), 0)
    if found != expected.header:
        mark = re.search(rb'"save_id":"([0-9a-f]{16})".{1,600}?"step":"(\d{1,18})","rank":"(\d{1,9})"', found[:2048])
        if mark is None or mark.group(0) in expected.header:
            raise RefusedError("its header is not the one that the manifest describes")
        save, step, rank = (group.decode() for group in mark.groups())
        raise RefusedError(f"it is a shard of another save: save {save}, step {step}, rank {rank}")


def read_range(file: StoredFile, offset: int, dtype: str, target: Tensor) -> None:
    """Fill ``target`` (one-dimensional, contiguous) with the elements that start at byte ``offset``.

    On a CPU the bytes are read directly into the tensor; on other devices through a buffer of ``CHUNK_BYTES``.

    Raises:
        RefusedError: The file ends before that, or cannot be read.
    """
    if target.numel() == 0:
        return
    if target.device.type == "cpu":
        file.read_at(byte_view(target.detach()), offset)
        torch.autograd.graph.increment_version(target)
        return
    step = CHUNK_BYTES // item_bytes(dtype)
    staging = torch.empty(min(step, target.numel()), dtype=target.dtype)
    with torch.no_grad():
        for start in range(0, target.numel(), step):
            part = staging[: min(step, target.numel() - start)]
            file.read_at(byte_view(part), offset + start * item_bytes(dtype))
            target[start : start + part.numel()].copy_(part)


def read_block(file: StoredFile, offset: int, dtype: str, block: Block, target: Tensor) -> None:
    """Fill a box of ``target`` (one-dimensional, contiguous) from the piece whose content starts at byte ``offset``.

    Needs at most ``CHUNK_BYTES`` of memory in addition to the tensors.

    Raises:
        RefusedError: The file ends before that, or cannot be read.
    """
    size = item_bytes(dtype)
    parts = [block] if block.is_run else _spans(block, CHUNK_BYTES // size, MAX_GAP_BYTES // size)
    for part in parts:
        if part.is_run:
            read_range(file, offset + part.source * size, dtype, target[part.target : part.target + part.numel])
            continue
        staging = torch.empty(_span(part.shape, part.source_stride), dtype=target.dtype)
        file.read_at(byte_view(staging), offset + part.source * size)
        with torch.no_grad():
            region = target.as_strided(part.shape, part.target_stride, target.storage_offset() + part.target)
            region.copy_(staging.as_strided(part.shape, part.source_stride))


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the distance in elements from the first to the last element of a strided array, inclusive."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _spans(block: Block, max_span: int, max_gap: int) -> Iterator[Block]:
    """Divide a block into parts that span at most ``max_span`` elements of the source, without wide gaps."""
    shape, stride = block.shape, block.source_stride
    inner = _span(shape[1:], stride[1:])
    is_wide = stride[0] - inner > max_gap or inner > max_span
    if _span(shape, stride) <= max_span and not is_wide:
        yield block
        return
    count = 1 if is_wide else (max_span - inner) // stride[0] + 1
    for first in range(0, shape[0], count):
        part = Block(
            (min(count, shape[0] - first), *shape[1:]),
            block.source + first * stride[0],
            stride,
            block.target + first * block.target_stride[0],
            block.target_stride,
        )
        if count > 1 or len(shape) == 1:
            yield part
        else:
            yield from _spans(
                Block(shape[1:], part.source, stride[1:], part.target, block.target_stride[1:]), max_span, max_gap
            )
