"""Writes a checkpoint from one process without a process group, tensor by tensor: for imported checkpoints.

The result is the same as of :mod:`shardwise.checkpoint.writer` on as many ranks as there are files.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import plain
from shardwise.checkpoint.combine import Combined, encode_ranges
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.manifest import encode, file_columns
from shardwise.checkpoint.publish import remove_unfinished
from shardwise.checkpoint.shard import Piece, layout, shard_name, split_into_files, write_shard
from shardwise.checkpoint.storage import FOLDERS, temporary_of
from shardwise.checkpoint.table import extent_problem
from shardwise.spec.errors import CheckpointError, StorageError
from shardwise.spec.extent import Extent
from shardwise.spec.precision import item_bytes

#: Run id in the manifest of imported checkpoints.
_RUN_ID = "imported"


def write_from_one_process(
    directory: Path,
    tensors: Sequence[Extent],
    read: Callable[[str], Tensor],
    data: Mapping[str, Any],
    *,
    step: int,
    max_file_bytes: float,
) -> None:
    """Write a checkpoint of unsharded tensors, or nothing.

    ``directory`` must not exist. ``tensors`` are unsharded. ``read`` returns a tensor by name; it is called just before
    the tensor is written, so that only one tensor is in memory at a time.
    """
    problems = [problem for extent in tensors if (problem := extent_problem(extent)) is not None]
    if folders.exists(directory):
        problems.append(f"{directory} exists, and a checkpoint never goes into a folder that exists")
    if problems:
        raise CheckpointError("; ".join(problems[:10]) + ".\n  Nothing was written.")
    save_id = secrets.token_hex(8)
    files = split_into_files(((extent, extent.numel * item_bytes(extent.dtype)) for extent in tensors), max_file_bytes)
    temporary = temporary_of(directory, save_id)
    try:
        packed = plain.pack(dict(data))
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        with folders.open_folder(temporary, follow=False) as folder:
            entries = []
            for rank, extents in enumerate(files):
                pieces = _Content(extents, read)
                plan = layout(save_id=save_id, run_id=_RUN_ID, step=step, rank=rank, pieces=pieces)
                name = shard_name(save_id, rank)
                digest = write_shard(folder, name, plan, pieces)
                entries.append({"bytes": plan.file_bytes, "hash": digest})
            combined = Combined((rank, encode_ranges(extents)) for rank, extents in enumerate(files))
            assert not combined.problems, combined.problems[:3]
            content = {
                "save_id": save_id,
                "run_id": _RUN_ID,
                "step": step,
                "world_size": len(files),
                "data": packed,
                "files": file_columns(entries),
                "frozen": None,
                **combined.table.columns(),
            }
            FOLDERS.publish(directory, save_id, encode(content))
    except (ValueError, RefusedError) as error:
        raise CheckpointError(f"{directory} was not written: {error}.") from None
    except OSError as error:
        raise StorageError(f"{directory} was not written: {error.strerror or error}.\n  Name another place.") from error
    finally:
        remove_unfinished(temporary)  # unless it was published


class _Content(Mapping[Piece, Tensor]):
    """The pieces of one file; each is read when it is accessed."""

    def __init__(self, tensors: Sequence[Extent], read: Callable[[str], Tensor]) -> None:
        self._pieces = [Piece(each.name, each.dtype, each.start, each.stop) for each in tensors if each.numel]
        self._read = read

    def __getitem__(self, piece: Piece) -> Tensor:
        return self._read(piece.name).reshape(-1)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
