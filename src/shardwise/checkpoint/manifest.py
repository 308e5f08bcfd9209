"""The manifest: what a checkpoint says about itself, in JSON, checked before anything else of it is read.

It is written last, so a folder with a manifest is complete. A hash of the manifest itself is part of it, so a flipped
bit in a learning rate is found as one in a weight is.

Format version 2 has slices of tensors, which tensor and expert parallelism make: ``"slices": [[[0, 0, 64, 128, 192]]]``
says that elements of slice 0 are counted in rows 0 to 64 and 128 to 192. Version 1 has none, and is read as ever.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import plain
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.shard import Layout, Piece, layout, shard_name
from shardwise.spec.extent import MAX_CELLS, Extent, describe_cuts, tiling_problems
from shardwise.spec.precision import ITEM_BYTES
from shardwise.spec.slice import Cut, simplest

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
_READ_VERSIONS = (1, 2)

#: Largest manifest that is read, and most values in it. What they allow to be built in memory stays below 0.5 GB.
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_MANIFEST_ITEMS = 4 * 10**6

_MAX_NUMEL = 2**60
_SHARD_FILE = re.compile(r"shard-[0-9a-f]{16}-r[0-9]{5,9}\.safetensors")

_Natural = Annotated[int, Field(ge=0, lt=_MAX_NUMEL)]
_Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_SaveId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_Dims = Annotated[list[_Natural], Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileEntry(_Strict):
    """One rank's file.

    Attributes:
        name: Its name; follows from the save and the rank.
        bytes: Its size.
        sha256: Hash of all of it.
    """

    name: str
    bytes: _Natural
    sha256: _Hash


class TensorEntry(_Strict):
    """One logical tensor.

    Attributes:
        shape: Logical shape.
        dtype: Short name.
        stride: Where it is dense but not contiguous in the usual order.
        pieces: ``[rank, start, stop]`` of each range in memory order, or ``[rank, start, stop, slice]`` of one in a
            slice; together exactly the whole tensor.
        slices: Of each slice the dimensions that it cuts, ascending: ``[dim, start, stop, start, stop, ...]``.
    """

    shape: _Dims
    dtype: Annotated[str, Field(max_length=32)]
    stride: _Dims | None = None
    pieces: list[Annotated[list[_Natural], Field(min_length=3, max_length=4)]]
    slices: list[list[Annotated[list[_Natural], Field(min_length=1)]]] | None = None

    @functools.cached_property
    def cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """The slices as the engine has them; slice -1 is the whole."""
        return tuple(
            tuple(Cut(dim, tuple(itertools.pairwise(marks))[::2]) for dim, *marks in held) for held in self.slices or ()
        )

    def extents(self, name: str) -> Iterator[tuple[int, Piece, Extent]]:
        """Every piece with the rank that wrote it, as the file has it and as what it holds."""
        stride = None if self.stride is None else tuple(self.stride)
        for rank, start, stop, *number in self.pieces:
            index = number[0] if number else -1
            cuts = self.cuts[index] if number else ()
            extent = Extent(name, tuple(self.shape), self.dtype, start, stop, stride, cuts)
            yield rank, Piece(name, self.dtype, start, stop, index), extent


class Manifest(_Strict):
    """What a checkpoint holds.

    Attributes:
        format: Always ``shardwise-checkpoint``.
        format_version: Version of this description.
        save_id: Names one save; part of every file's name.
        run_id: The run that saved it.
        step: The step after which it was saved.
        world_size: Ranks that saved it; there are as many files, in rank order.
        files: One entry for each rank.
        tensors: By logical name.
        data: State that is no tensor, the same for all ranks, packed as ``checkpoint.plain`` does.
        rank_data: State that each rank has of its own, by rank, or ``None``.
        checksum: Hash of all the rest.
    """

    format: Literal["shardwise-checkpoint"] = "shardwise-checkpoint"
    format_version: Literal[1, 2] = FORMAT_VERSION
    save_id: _SaveId
    run_id: Annotated[str, Field(max_length=256)]
    step: _Natural
    world_size: Annotated[int, Field(ge=1, lt=10**9)]
    files: list[FileEntry]
    tensors: dict[_Name, TensorEntry]
    data: dict[str, Any]
    rank_data: list[Any] | None = None
    checksum: _Hash = "0" * 64

    @functools.cached_property
    def layouts(self) -> list[Layout]:
        """What each rank's file must look like."""
        pieces: list[list[Piece]] = [[] for _ in range(self.world_size)]
        for name, entry in self.tensors.items():
            for rank, start, stop, *number in entry.pieces:
                pieces[rank].append(Piece(name, entry.dtype, start, stop, *number))
        return [
            layout(save_id=self.save_id, run_id=self.run_id, step=self.step, rank=rank, pieces=held)
            for rank, held in enumerate(pieces)
        ]


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name can be part of a checkpoint."""
    return name == MANIFEST_NAME or _SHARD_FILE.fullmatch(name) is not None


def extent_problem(extent: Extent) -> str | None:
    """What is wrong with an extent by itself, or ``None``."""
    if not extent.name or len(extent.name) > 1024 or not extent.name.isprintable():
        return f"{extent.name[:80]!r} is no name for a tensor"
    if extent.dtype not in ITEM_BYTES:
        return f"{extent.name}: dtype {extent.dtype!r} is unknown"
    problem = _cuts_problem(extent)
    if problem is not None:
        return f"{extent.name}: {problem}"
    if not 0 <= extent.start <= extent.stop <= extent.slice_numel:
        part = f"slice {describe_cuts(extent.shape, extent.cuts)} of " if extent.cuts else ""
        return (
            f"{extent.name}: elements {extent.start} to {extent.stop} are no range of {part}a tensor of shape"
            f" {extent.shape}"
        )
    if extent.stride is not None and len(extent.stride) != len(extent.shape):
        return f"{extent.name}: stride {extent.stride} does not belong to shape {extent.shape}"
    return None


def _cuts_problem(extent: Extent) -> str | None:
    """What is wrong with the slice that an extent counts in, or ``None``."""
    for cut in extent.cuts:
        if not 0 <= cut.dim < len(extent.shape):
            return f"a cut of dimension {cut.dim} does not belong to shape {extent.shape}"
        end = 0
        for start, stop in sorted(cut.ranges):
            if not end <= start <= stop <= extent.shape[cut.dim]:
                return f"the range {start} to {stop} of dimension {cut.dim} overlaps another, or is none of it"
            end = stop
    if math.prod(len(cut.ranges) or 1 for cut in extent.cuts) > MAX_CELLS:
        return f"its slice is more than {MAX_CELLS} boxes"
    if simplest(extent.shape, extent.cuts) != extent.cuts:
        return "its slice is not given in the simplest form"
    return None


def combine(extents: Mapping[int, Iterable[Extent]]) -> tuple[dict[str, TensorEntry], list[str]]:
    """Put together what every rank holds.

    Args:
        extents: By rank.

    Returns:
        An entry for each logical tensor, and every problem: tensors that ranks describe differently, elements that no
        rank holds or that are held twice.
    """
    first: dict[str, tuple[int, Extent]] = {}
    pieces: dict[str, dict[tuple[Cut, ...], list[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(list))
    problems = []
    for rank, held in extents.items():
        for extent in held:
            owner, known = first.setdefault(extent.name, (rank, extent))
            ours, theirs = describe(extent), describe(known)
            if ours != theirs:
                problems.append(f"{extent.name}: rank {rank} has {ours}, rank {owner} has {theirs}")
            elif extent.numel:
                pieces[extent.name][extent.cuts].append((extent.start, extent.stop, rank))
    entries = {}
    for name, (_, extent) in first.items():
        held = {cuts: sorted(pieces[name][cuts]) for cuts in sorted(pieces[name], key=_by_place)}
        problems += _whole(name, extent.shape, held)
        slices = [cuts for cuts in held if cuts]
        numbers = {cuts: [number] for number, cuts in enumerate(slices)} | {(): []}
        entries[name] = TensorEntry(
            shape=list(extent.shape),
            dtype=extent.dtype,
            stride=None if extent.stride is None else list(extent.stride),
            pieces=[[rank, start, stop, *numbers[cuts]] for cuts in held for start, stop, rank in held[cuts]],
            slices=[[[cut.dim, *itertools.chain(*cut.ranges)] for cut in cuts] for cuts in slices] or None,
        )
    return entries, problems


def _by_place(cuts: tuple[Cut, ...]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    return [(cut.dim, cut.ranges) for cut in cuts]


def encode(manifest: Manifest) -> bytes:
    """The manifest as it is written, its checksum filled in.

    Raises:
        ValueError: It is larger than what would be read.
    """
    content = manifest.model_dump()
    content["checksum"] = _checksum(content)
    raw = plain.dumps(content)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest would have {len(raw)} bytes, more than the {MAX_MANIFEST_BYTES} that are read")
    plain.loads(raw, max_items=MAX_MANIFEST_ITEMS)
    return raw


def decode(raw: bytes) -> Manifest:
    """Parse and check a manifest.

    Raises:
        RefusedError: What is wrong; the caller adds the place.
    """
    try:
        content = plain.loads(raw, max_items=MAX_MANIFEST_ITEMS)
    except ValueError as error:
        raise RefusedError(f"it is not a manifest: {_short(str(error))}") from None
    if not isinstance(content, dict) or content.get("format") != "shardwise-checkpoint":
        raise RefusedError("it is not a manifest: 'format' is not 'shardwise-checkpoint'")
    version = content.get("format_version")
    if version not in _READ_VERSIONS or isinstance(version, bool):
        known = " and ".join(map(str, _READ_VERSIONS))
        raise RefusedError(f"it has format version {_short(repr(version))}; this version of shardwise reads {known}")
    if content.get("checksum") != _checksum(content):
        raise RefusedError("its checksum does not match its content: it was damaged or changed by hand")
    try:
        manifest = Manifest.model_validate(content)
    except pydantic.ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)[:5]]
        raise RefusedError(f"it is not a manifest: {_short('; '.join(lines), 600)}") from None
    problems = _problems(manifest)
    if problems:
        raise RefusedError("; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""))
    return manifest


def read_manifest(folder: int) -> Manifest:
    """Read the manifest of an open folder.

    Raises:
        RefusedError: It is missing or wrong.
    """
    with folders.open_for_reading(folder, MANIFEST_NAME) as (file, status):
        if status.st_size > MAX_MANIFEST_BYTES:
            raise RefusedError(f"it has {status.st_size} bytes, more than the {MAX_MANIFEST_BYTES} that are read")
        raw = bytearray(status.st_size)
        folders.read_at(file, memoryview(raw), 0)
    return decode(bytes(raw))


def _problems(manifest: Manifest) -> list[str]:
    if len(manifest.files) != manifest.world_size:
        return [f"it lists {len(manifest.files)} files for {manifest.world_size} ranks"]
    if manifest.rank_data is not None and len(manifest.rank_data) != manifest.world_size:
        return [f"it has the state of {len(manifest.rank_data)} ranks, expected {manifest.world_size}"]
    if not manifest.run_id.isprintable():
        return [f"{_short(repr(manifest.run_id))} is no name for a run"]
    problems = []
    for rank, entry in enumerate(manifest.files):
        expected = shard_name(manifest.save_id, rank)
        if entry.name != expected:
            problems.append(f"file {rank} is called {_short(repr(entry.name))}, expected {expected!r}")
    for name, entry in manifest.tensors.items():
        if manifest.format_version == 1 and (entry.slices is not None or any(len(p) > 3 for p in entry.pieces)):
            problems.append(f"{name}: it has slices, which format version 1 has not")
        else:
            problems += _tensor_problems(name, entry, manifest.world_size)
    if problems:
        return problems
    return [
        f"{entry.name} is said to have {entry.bytes} bytes, its tensors make {plan.file_bytes}"
        for entry, plan in zip(manifest.files, manifest.layouts, strict=True)
        if entry.bytes != plan.file_bytes
    ]


def _tensor_problems(name: str, entry: TensorEntry, world_size: int) -> list[str]:
    whole = logical_extent(name, entry)
    problem = extent_problem(whole)
    if problem is not None:
        return [problem]
    if whole.logical_numel >= _MAX_NUMEL:
        return [f"{name}: shape {whole.shape} is too large"]
    if any(piece[0] >= world_size for piece in entry.pieces):
        return [f"{name}: a piece belongs to a rank beyond {world_size - 1}"]
    problem = _slices_problem(whole, entry)
    if problem is not None:
        return [f"{name}: {problem}"]
    held: dict[tuple[Cut, ...], list[tuple[int, int, int]]] = {cuts: [] for cuts in entry.cuts}
    for rank, start, stop, *number in entry.pieces:
        held.setdefault(entry.cuts[number[0]] if number else (), []).append((start, stop, rank))
    return _whole(name, whole.shape, held)


def _slices_problem(whole: Extent, entry: TensorEntry) -> str | None:
    """What is wrong with the slices of a tensor, each by itself, or ``None``."""
    if any(len(cut) % 2 == 0 for held in entry.slices or () for cut in held):
        return "a cut is no dimension with ranges"
    if any(number >= len(entry.cuts) for _, _, _, *numbers in entry.pieces for number in numbers):
        return f"a piece belongs to a slice beyond {len(entry.cuts) - 1}"
    if len(set(entry.cuts)) < len(entry.cuts) or () in entry.cuts:
        return "a slice is listed twice, or is none"
    problems = (_cuts_problem(dataclasses.replace(whole, cuts=cuts)) for cuts in entry.cuts)
    return next((problem for problem in problems if problem is not None), None)


def _whole(name: str, shape: tuple[int, ...], held: Mapping[tuple[Cut, ...], list[tuple[int, int, int]]]) -> list[str]:
    """What keeps the ranges ``(start, stop, rank)`` of each slice from being exactly the whole tensor."""
    problems = []
    for cuts, ranges in held.items():
        numel = Extent(name, shape, "", 0, 0, cuts=cuts).slice_numel
        problems += _coverage(f"{name}{describe_cuts(shape, cuts)}" if cuts else name, numel, ranges)
    return problems or (tiling_problems(name, shape, list(held)) if held else _coverage(name, math.prod(shape), []))


def _coverage(name: str, numel: int, held: list[tuple[int, int, int]]) -> list[str]:
    """Gaps and overlaps of sorted ``(start, stop, rank)`` in ``numel`` elements."""
    problems = []
    end, last = 0, -1
    for start, stop, rank in held:
        if start > end:
            problems.append(f"{name}: no rank holds elements {end} to {start}")
        elif start < end:
            problems.append(f"{name}: elements {start} to {min(end, stop)} are held by rank {last} and by rank {rank}")
        if start >= stop:
            problems.append(f"{name}: the range {start} to {stop} is empty")
        end, last = max(end, stop), rank
    if end < numel:
        problems.append(f"{name}: no rank holds elements {end} to {numel}")
    elif end > numel:
        problems.append(f"{name}: element {end - 1} is outside of its {numel}")
    return problems


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(plain.dumps({key: value for key, value in content.items() if key != "checksum"})).hexdigest()


def _short(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[:most] + " ..."


def logical_extent(name: str, entry: TensorEntry) -> Extent:
    """The extent that covers all of a tensor."""
    shape = tuple(entry.shape)
    stride = None if entry.stride is None else tuple(entry.stride)
    return Extent(name=name, shape=shape, dtype=entry.dtype, start=0, stop=math.prod(shape), stride=stride)


def describe(extent: Extent) -> str:
    """A tensor's shape, dtype and, where it is unusual, stride, in a few words."""
    return f"{tuple(extent.shape)} {extent.dtype}" + ("" if extent.stride is None else f" stride {extent.stride}")
