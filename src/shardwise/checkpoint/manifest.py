"""The manifest of a checkpoint: its description in JSON, checked before any other file is read.

It is written last, so a folder with a manifest is complete. It contains a hash of itself, so a flipped bit in a
learning rate is detected as well as one in a weight.

Format version 5 (docs/checkpoints.md) consists of columns: one list of all names, one of all shapes, one of the hashes
of all files. Only this version is read.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import Field, StringConstraints

from shardwise.checkpoint import plain
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.shard import Layout, frozen_layout, frozen_name, layout, shard_name
from shardwise.checkpoint.storage import MANIFEST_NAME, storage_of
from shardwise.checkpoint.table import Natural, PartitionColumns, Strict, Table, TensorColumns
from shardwise.spec.gc_pause import gc_paused

FORMAT_VERSION = 5

#: Maximum bytes and values of a manifest that is read. Objects built from them stay below 0.5 GB.
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_MANIFEST_ITEMS = 6 * 10**6

_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_SaveId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
#: The manifest begins with the checksum of everything after it, preceded by an opening brace.
_CHECKSUM = re.compile(rb'\{"checksum":"([0-9a-f]{64})",')


class FileEntry(NamedTuple):
    """One rank's file."""

    name: str  # determined by save and rank
    bytes: int
    hash: str  # hash of the full file (``StoredFile.hash``)


class _FileColumns(Strict):
    """Sizes and hashes of the files, in rank order."""

    bytes: list[Natural]
    hash: list[_Digest]


class _Written(Strict):
    """The manifest's fields in the file; :class:`Manifest` documents them."""

    format: Literal["shardwise-checkpoint"]
    format_version: Literal[5]
    save_id: _SaveId
    run_id: Annotated[str, Field(max_length=256)]
    step: Natural
    world_size: Annotated[int, Field(ge=1, lt=10**9)]
    data: dict[str, Any]
    files: _FileColumns
    frozen: _FileColumns | None
    tensors: TensorColumns
    partitions: PartitionColumns


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint."""

    save_id: str  # unique id of the save; part of every file's name
    run_id: str  # the run that saved it
    step: int  # the step after which it was saved
    world_size: int  # number of ranks that saved it
    files: list[FileEntry]  # one file per rank, in rank order
    frozen: list[FileEntry] | None  # files of frozen parameters, one per rank, or ``None``
    table: Table  # the logical tensors, and which rank owns which elements
    data: dict[str, Any]  # state other than tensors, the same for all ranks, packed by ``checkpoint.plain``
    _last_layout: dict[int, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)

    @functools.cached_property
    def all_files(self) -> list[FileEntry]:
        """All files: those of the ranks, then those of frozen parameters."""
        return [*self.files, *(self.frozen or [])]

    def file_of(self, name: str, rank: int) -> int:
        """Return the index in ``all_files`` of the file with a rank's pieces of a tensor."""
        return rank + self.world_size * (self.table.numbers[name] in self.table.frozen)

    def layout_of(self, number: int) -> Layout:
        """Return the layout that a file of ``all_files`` must have. The last result is cached."""
        if number not in self._last_layout:
            self._last_layout.clear()
            self._last_layout[number] = self._make_layout(number)
        return self._last_layout[number]

    def _make_layout(self, number: int) -> Layout:
        is_frozen, rank = divmod(number, self.world_size)
        pieces = self.table.of_rank(rank, is_frozen=bool(is_frozen))
        if is_frozen:
            return frozen_layout(rank, pieces)
        return layout(save_id=self.save_id, run_id=self.run_id, step=self.step, rank=rank, pieces=pieces)


def encode(content: Mapping[str, Any]) -> bytes:
    """Encode a manifest for writing. The result has passed the checks of a manifest that is loaded.

    Args:
        content: ``save_id``, ``run_id``, ``step``, ``world_size`` and ``data``; ``tensors`` and ``partitions`` from
            :meth:`Table.columns`; ``files`` and ``frozen``, each from :func:`file_columns`, or ``None``.

    Raises:
        RefusedError, ValueError: The manifest would be refused at loading.
    """
    raw = with_checksum({"format": "shardwise-checkpoint", "format_version": FORMAT_VERSION, **content})
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest would have {len(raw)} bytes, more than the {MAX_MANIFEST_BYTES} that are read")
    decode(raw)
    return raw


def file_columns(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return sizes and hashes of files as columns, in rank order."""
    return {key: [entry[key] for entry in entries] for key in ("bytes", "hash")}


def with_checksum(content: Mapping[str, Any]) -> bytes:
    """Return canonical JSON that begins with the checksum of the rest."""
    rest = plain.dumps({key: value for key, value in content.items() if key != "checksum"})
    return b'{"checksum":"%s",%s' % (hashlib.sha256(rest).hexdigest().encode(), rest[1:])


def decode(raw: bytes) -> Manifest:
    """Parse and check a manifest.

    Raises:
        RefusedError: The manifest is invalid; the caller adds the place.
    """
    with gc_paused():
        return _decode(raw)


def _decode(raw: bytes) -> Manifest:
    try:
        content = plain.loads(raw, max_items=MAX_MANIFEST_ITEMS)
    except ValueError as error:
        raise RefusedError(f"it is not a manifest: {_short(str(error))}") from None
    if not isinstance(content, dict) or content.get("format") != "shardwise-checkpoint":
        raise RefusedError("it is not a manifest: 'format' is not 'shardwise-checkpoint'")
    version = content.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise RefusedError(
            f"it has format version {_short(repr(version))}, expected {FORMAT_VERSION}: another version of shardwise"
            " wrote it, and only that one reads it"
        )
    mark = _CHECKSUM.match(raw)
    if mark is None or _hash_without(raw, mark.end()) != mark[1].decode():
        raise RefusedError("its checksum does not match its content: it was damaged or changed by hand")
    del content["checksum"]
    try:
        manifest = _read(content)
        problems = _problems(manifest)
    except pydantic.ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)[:5]]
        raise RefusedError(f"it is not a manifest: {_short('; '.join(lines), 600)}") from None
    except ValueError as error:
        raise RefusedError(_short(str(error), 600)) from None
    if problems:
        raise RefusedError("; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""))
    return manifest


def read_manifest(directory: Path, name: str = MANIFEST_NAME) -> bytes:
    """Read the manifest of a checkpoint without checking it.

    Raises:
        OSError: The folder does not exist.
    """
    with storage_of(directory).open(directory, name) as file:
        if file.num_bytes > MAX_MANIFEST_BYTES:
            raise RefusedError(f"it has {file.num_bytes} bytes, more than the {MAX_MANIFEST_BYTES} that are read")
        raw = bytearray(file.num_bytes)
        file.read_at(memoryview(raw), 0)
    return bytes(raw)


def _hash_without(raw: bytes, end: int) -> str:
    """Return the hash of the text after the checksum, which ends at ``end``."""
    found = hashlib.sha256(b"{")
    found.update(memoryview(raw)[end:])
    return found.hexdigest()


def _read(content: dict[str, Any]) -> Manifest:
    parsed = _Written.model_validate(content)
    table = Table.read(parsed.tensors, parsed.partitions)
    files = _entries(parsed.files, [shard_name(parsed.save_id, rank) for rank in range(len(parsed.files.hash))])
    frozen = None
    if parsed.frozen is not None:
        frozen = _entries(parsed.frozen, [frozen_name(digest, rank) for rank, digest in enumerate(parsed.frozen.hash)])
    return Manifest(parsed.save_id, parsed.run_id, parsed.step, parsed.world_size, files, frozen, table, parsed.data)


def _entries(columns: _FileColumns, names: list[str]) -> list[FileEntry]:
    if len(columns.bytes) != len(names):
        raise ValueError(f"it lists {len(names)} hashes and {len(columns.bytes)} sizes of files")
    return list(map(FileEntry, names, columns.bytes, columns.hash))


def _problems(manifest: Manifest) -> list[str]:
    if len(manifest.files) != manifest.world_size:
        return [f"it lists {len(manifest.files)} files for {manifest.world_size} ranks"]
    if not manifest.run_id.isprintable():
        return [f"{_short(repr(manifest.run_id))} is not a name for a run"]
    return _frozen_problems(manifest) or manifest.table.problems(manifest.world_size)


def _frozen_problems(manifest: Manifest) -> list[str]:
    files, frozen = manifest.frozen, manifest.table.frozen
    if files is None:
        first = [manifest.table.names[number] for number in sorted(frozen)[:1]]
        return [f"{name}: it is frozen, but there are no files of frozen parameters" for name in first]
    if len(files) != manifest.world_size:
        return [f"it lists {len(files)} files of frozen parameters for {manifest.world_size} ranks"]
    return []


def _short(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[:most] + " ..."
