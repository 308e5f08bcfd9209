"""The manifest of a checkpoint: its description in JSON, checked before any other file is read.

It is written last, so a folder with a manifest is complete. It contains a hash of itself, so a flipped bit in a
learning rate is found as well as one in a weight.

Format version 2 added slices of tensors, which tensor and expert parallelism make: ``"slices": [[[0, 0, 64, 128,
192]]]`` means that elements of slice 0 are counted in rows 0 to 64 and 128 to 192. Version 3 writes equal pieces of
ranks at equal distances as one run, so that the manifest hardly grows with the number of ranks, and has files of frozen
parameters, which are named by their content, so that checkpoints share them as hard links. Version 4 has XXH3 hashes of
files (``"hash"``) where SHA-256 (``"sha256"``) was before. All versions are read.
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
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import plain
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.shard import Layout, Piece, frozen_layout, frozen_name, layout, shard_name
from shardwise.spec.extent import MAX_CELLS, Extent, describe_cuts
from shardwise.spec.precision import ITEM_BYTES
from shardwise.spec.slice import Cut, simplest
from shardwise.state.extents import coverage_problems

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 4
_READ_VERSIONS = (1, 2, 3, 4)
#: Fewer pieces than this are not worth a run.
_SHORTEST_RUN = 4

#: Largest manifest that is read, and most values in it. What they allow to be built in memory stays below 0.5 GB.
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_MANIFEST_ITEMS = 4 * 10**6

_MAX_NUMEL = 2**60
_FROZEN_FILE = re.compile(r"frozen-[0-9a-f]{16}-r[0-9]{5,9}\.safetensors")
_REPORT_FILE = re.compile(r"report-r[0-9]{5,9}\.json(\.part)?")
_SHARD_FILE = re.compile(r"shard-[0-9a-f]{16}-r[0-9]{5,9}\.safetensors")

_Natural = Annotated[int, Field(ge=0, lt=_MAX_NUMEL)]
_Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}|[0-9a-f]{64})$")]
_Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_SaveId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_Dims = Annotated[list[_Natural], Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileEntry(_Strict):
    """One rank's file.

    Attributes:
        name: File name; follows from the save and the rank.
        bytes: File size.
        hash: Hash of the whole file, of a kind that ``checkpoint.digest`` tells by its length.
    """

    name: str
    bytes: _Natural
    hash: _Digest = Field(validation_alias=AliasChoices("hash", "sha256"))


class TensorEntry(_Strict):
    """One logical tensor.

    Attributes:
        shape: Logical shape.
        dtype: Short name.
        stride: Strides where the tensor is dense but not contiguous in the usual order.
        pieces: ``[rank, start, stop]`` of each range in memory order, or ``[rank, start, stop, slice]`` of one in a
            slice; together exactly the whole tensor. Two more numbers, ``count`` and ``rank_step``, make it a run:
            ``count`` pieces of this length one after the other, of ranks that are ``rank_step`` apart.
        slices: For each slice the dimensions that it cuts, ascending: ``[dim, start, stop, start, stop, ...]``.
        is_frozen: The pieces are in the files of frozen parameters.
    """

    shape: _Dims
    dtype: Annotated[str, Field(max_length=32)]
    stride: _Dims | None = None
    pieces: list[Annotated[list[_Natural], Field(min_length=3, max_length=6)]]
    slices: list[list[Annotated[list[_Natural], Field(min_length=1)]]] | None = None
    is_frozen: bool = False

    @functools.cached_property
    def cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """The slices as tuples of cuts."""
        return tuple(
            tuple(Cut(dim, tuple(itertools.pairwise(marks))[::2]) for dim, *marks in held) for held in self.slices or ()
        )

    def extents(self, name: str) -> Iterator[tuple[int, Piece, Extent]]:
        """The rank that wrote it, the entry in its file and the range of the logical tensor, for every piece."""
        stride = None if self.stride is None else tuple(self.stride)
        for run in self.runs:
            cuts = self.cuts[run.slice] if run.slice >= 0 else ()
            for index in range(run.count):
                piece = run.piece(index, name, self.dtype)
                extent = Extent(name, tuple(self.shape), self.dtype, piece.start, piece.stop, stride, cuts)
                yield run.rank + index * run.rank_step, piece, extent

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """The pieces, a single one as a run of its own."""
        return tuple(Run.read(held) for held in self.pieces)


class Run(NamedTuple):
    """Pieces of one length, one after the other, of ranks at equal distances.

    Attributes:
        rank: Rank of the first piece.
        start: First element of the first piece.
        stop: One past the last element of the first piece.
        slice: Number of the slice in which elements are counted; -1: the whole tensor.
        count: Number of pieces.
        rank_step: Difference between the ranks of neighbouring pieces.
    """

    rank: int
    start: int
    stop: int
    slice: int = -1
    count: int = 1
    rank_step: int = 1

    @classmethod
    def read(cls, held: list[int]) -> Run:
        """From a list of the manifest."""
        rank, start, stop, *rest = held
        number = rest.pop(0) if len(rest) % 2 else -1
        return cls(rank, start, stop, number, *rest)

    def written(self) -> list[int]:
        """As a list of the manifest."""
        number = [] if self.slice < 0 else [self.slice]
        return [self.rank, self.start, self.stop, *number, *([] if self.count == 1 else [self.count, self.rank_step])]

    @property
    def end(self) -> int:
        """One past the last element of the last piece."""
        return self.start + self.count * (self.stop - self.start)

    @property
    def last_rank(self) -> int:
        """Rank of the last piece."""
        return self.rank + (self.count - 1) * self.rank_step

    def piece(self, index: int, name: str, dtype: str) -> Piece:
        """Piece number ``index``."""
        length = self.stop - self.start
        return Piece(name, dtype, self.start + index * length, self.stop + index * length, self.slice)

    def of_rank(self, rank: int) -> int | None:
        """The index of the piece of ``rank``; ``None`` where it has none."""
        index, rest = divmod(rank - self.rank, self.rank_step)
        return index if rest == 0 and 0 <= index < self.count else None


class Manifest(_Strict):
    """The description of a checkpoint.

    Attributes:
        format: Always ``shardwise-checkpoint``.
        format_version: Version of this description.
        save_id: Names one save; part of every file's name.
        run_id: The run that saved it.
        step: The step after which it was saved.
        world_size: Number of ranks that saved it.
        files: One file for each rank, in rank order.
        frozen: Files of frozen parameters, one for each rank, or ``None``.
        tensors: The logical tensors by name.
        data: State that is no tensor, the same for all ranks, packed by ``checkpoint.plain``.
        rank_data: Not written any more: each rank's own state, which is a tensor ``rank/<rank>`` today.
        checksum: Hash of all other fields.
    """

    format: Literal["shardwise-checkpoint"] = "shardwise-checkpoint"
    format_version: Literal[1, 2, 3, 4] = FORMAT_VERSION
    save_id: _SaveId
    run_id: Annotated[str, Field(max_length=256)]
    step: _Natural
    world_size: Annotated[int, Field(ge=1, lt=10**9)]
    files: list[FileEntry]
    frozen: list[FileEntry] | None = None
    tensors: dict[_Name, TensorEntry]
    data: dict[str, Any]
    rank_data: list[Any] | None = None
    checksum: _Hash = "0" * 64

    @functools.cached_property
    def _layouts(self) -> dict[int, Layout]:
        return {}

    @functools.cached_property
    def all_files(self) -> list[FileEntry]:
        """Every file: those of the ranks, then those of frozen parameters."""
        return [*self.files, *(self.frozen or [])]

    def extents(self, name: str) -> Iterator[tuple[int, Piece, Extent]]:
        """Every piece of a tensor, with the number of its file in ``all_files``."""
        entry = self.tensors[name]
        first = self.world_size if entry.is_frozen else 0
        for rank, piece, extent in entry.extents(name):
            yield first + rank, piece, extent

    def layout_of(self, number: int) -> Layout:
        """The layout that a file of ``all_files`` must have."""
        if number not in self._layouts:
            is_frozen, rank = divmod(number, self.world_size)
            pieces = [
                run.piece(index, name, entry.dtype)
                for name, entry in self.tensors.items()
                if entry.is_frozen == bool(is_frozen)
                for run in entry.runs
                if (index := run.of_rank(rank)) is not None
            ]
            self._layouts[number] = (
                frozen_layout(rank, pieces)
                if is_frozen
                else layout(save_id=self.save_id, run_id=self.run_id, step=self.step, rank=rank, pieces=pieces)
            )
        return self._layouts[number]

    def size_problem(self, number: int) -> str | None:
        """Why the size of a file of ``all_files`` cannot be right, or ``None``."""
        entry, plan = self.all_files[number], self.layout_of(number)
        if entry.bytes == plan.file_bytes:
            return None
        return f"{entry.name} is said to have {entry.bytes} bytes, its tensors make {plan.file_bytes}"


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name can be part of a checkpoint."""
    return name == MANIFEST_NAME or any(kind.fullmatch(name) for kind in (_SHARD_FILE, _FROZEN_FILE, _REPORT_FILE))


def extent_problem(extent: Extent) -> str | None:
    """Why an extent is invalid by itself, or ``None``."""
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
    """Why the cuts of an extent are invalid, or ``None``."""
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
    """Combine the ranges of all ranks.

    Args:
        extents: The ranges of each rank, by rank.

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
            if (extent.shape, extent.dtype, extent.stride) != (known.shape, known.dtype, known.stride):
                ours, theirs = describe(extent), describe(known)
                problems.append(f"{extent.name}: rank {rank} has {ours}, rank {owner} has {theirs}")
            elif extent.numel:
                pieces[extent.name][extent.cuts].append((extent.start, extent.stop, rank))
    entries = {}
    for name, (_, extent) in first.items():
        held = {cuts: sorted(pieces[name][cuts]) for cuts in sorted(pieces[name], key=_by_place)}
        problems += coverage_problems(name, extent.shape, held)
        slices = [cuts for cuts in held if cuts]
        numbers = {cuts: number for number, cuts in enumerate(slices)} | {(): -1}
        entries[name] = TensorEntry(
            shape=list(extent.shape),
            dtype=extent.dtype,
            stride=None if extent.stride is None else list(extent.stride),
            pieces=[run.written() for cuts in held for run in _runs(held[cuts], numbers[cuts])],
            slices=[[[cut.dim, *itertools.chain(*cut.ranges)] for cut in cuts] for cuts in slices] or None,
        )
    return entries, problems


def _runs(held: list[tuple[int, int, int]], number: int) -> Iterator[Run]:
    """Sorted ``(start, stop, rank)`` of one slice, with equal neighbours put together."""
    place = 0
    while place < len(held):
        start, stop, rank = held[place]
        length, count = stop - start, 1
        step = held[place + 1][2] - rank if place + 1 < len(held) else 0
        while step > 0 and place + count < len(held):
            if held[place + count] != (start + count * length, stop + count * length, rank + count * step):
                break
            count += 1
        if count < _SHORTEST_RUN:
            count, step = 1, 1
        yield Run(rank, start, stop, number, count, step)
        place += count


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
        RefusedError: The manifest is invalid; the caller adds the place.
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
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        newer = "; a newer shardwise has written it" if is_newer else ""
        raise RefusedError(
            f"it has format version {_short(repr(version))}; this version of shardwise reads {known}{newer}"
        )
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
    problems += _frozen_problems(manifest)
    for name, entry in manifest.tensors.items():
        problem = _version_problem(entry, manifest.format_version)
        if problem is not None:
            problems.append(f"{name}: {problem}")
        else:
            problems += _tensor_problems(name, entry, manifest.world_size)
    if problems:
        return problems
    if any(run.count > 1 for entry in manifest.tensors.values() for run in entry.runs):
        return []  # of very many files; each is compared when it is opened
    found = (manifest.size_problem(number) for number in range(len(manifest.all_files)))
    return [problem for problem in found if problem is not None]


def _frozen_problems(manifest: Manifest) -> list[str]:
    held = manifest.frozen
    if held is None:
        names = [name for name, entry in manifest.tensors.items() if entry.is_frozen]
        return [f"{names[0]}: it is frozen, but there are no files of frozen parameters"] if names else []
    if manifest.format_version < 3:
        return [f"it has files of frozen parameters, which format version {manifest.format_version} has not"]
    if len(held) != manifest.world_size:
        return [f"it lists {len(held)} files of frozen parameters for {manifest.world_size} ranks"]
    expected = [frozen_name(entry.hash, rank) for rank, entry in enumerate(held)]
    return [
        f"file {rank} of frozen parameters is called {_short(repr(entry.name))}, expected {name!r}"
        for rank, (entry, name) in enumerate(zip(held, expected, strict=True))
        if entry.name != name
    ]


def _version_problem(entry: TensorEntry, version: int) -> str | None:
    """Which feature of a tensor the format version does not have, or ``None``."""
    if version == 1 and (entry.slices is not None or any(len(piece) > 3 for piece in entry.pieces)):
        return "it has slices, which format version 1 has not"
    if version == 2 and any(len(piece) > 4 for piece in entry.pieces):
        return "it has runs, which format version 2 has not"
    return None


def _tensor_problems(name: str, entry: TensorEntry, world_size: int) -> list[str]:
    whole = logical_extent(name, entry)
    problem = extent_problem(whole)
    if problem is not None:
        return [problem]
    if whole.logical_numel >= _MAX_NUMEL:
        return [f"{name}: shape {whole.shape} is too large"]
    if any(run.count < 1 or run.rank_step < 1 or run.last_rank >= world_size for run in entry.runs):
        return [f"{name}: a piece belongs to a rank beyond {world_size - 1}"]
    problem = _slices_problem(whole, entry)
    if problem is not None:
        return [f"{name}: {problem}"]
    held: dict[tuple[Cut, ...], list[tuple[int, int, int]]] = {cuts: [] for cuts in entry.cuts}
    for run in entry.runs:
        if run.count > 1 and run.start >= run.stop:
            return [f"{name}: the range {run.start} to {run.stop} is empty"]
        held.setdefault(entry.cuts[run.slice] if run.slice >= 0 else (), []).append((run.start, run.end, run.rank))
    return coverage_problems(name, whole.shape, held)


def _slices_problem(whole: Extent, entry: TensorEntry) -> str | None:
    """Why a slice of a tensor is invalid by itself, or ``None``."""
    if any(len(cut) % 2 == 0 for held in entry.slices or () for cut in held):
        return "a cut is no dimension with ranges"
    if any(run.slice >= len(entry.cuts) for run in entry.runs):
        return f"a piece belongs to a slice beyond {len(entry.cuts) - 1}"
    if len(set(entry.cuts)) < len(entry.cuts) or () in entry.cuts:
        return "a slice is listed twice, or is none"
    problems = (_cuts_problem(dataclasses.replace(whole, cuts=cuts)) for cuts in entry.cuts)
    return next((problem for problem in problems if problem is not None), None)


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
