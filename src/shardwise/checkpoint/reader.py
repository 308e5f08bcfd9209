"""Loading: the manifest is checked, then the files are verified, then the requested ranges are copied.

All errors that can be known in advance are raised before any target is written. No file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shardwise.checkpoint import plain
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.manifest import FORMAT_VERSION, Manifest, decode, read_manifest
from shardwise.checkpoint.shard import Piece, check_header, read_block
from shardwise.checkpoint.storage import MANIFEST_NAME, StoredFile, Url, deepspeed_advice, place_of, step_of, storage_of
from shardwise.checkpoint.table import describe, extent_problem
from shardwise.comm.base import Comm
from shardwise.comm.control import broadcast_json, gather_json, refuse_different
from shardwise.comm.dtype import dtype_name
from shardwise.launch import inject
from shardwise.spec.errors import CheckpointError, StorageError
from shardwise.spec.extent import Block, Extent, describe_cuts, list_alike, shared
from shardwise.spec.precision import item_bytes
from shardwise.spec.text import aligned, printable, similar, size
from shardwise.weights.state.extents import Pairs

_MOST_LINES, _MOST_NAMES = 40, 5
#: Prefixes of names, and their keys in a summary.
_KINDS = {"optimizer": "optimizer", "average": "average", "buffer": "buffers", "rank": "ranks"}


def open_checkpoint(path: str | os.PathLike[str], *, comm: Comm | None = None) -> Checkpoint:
    """Open a checkpoint folder and check its manifest. No shard is opened yet.

    Args:
        path: The folder.
        comm: Ranks that open it together: if one of them fails, or sees a different save, all raise the same error.

    Collective:
        With ``comm``, a gather of small JSON to rank 0 and a broadcast of its verdict.
    """
    directory = place_of(path)
    if comm is None:
        return _open(directory)
    found: Checkpoint | None = None
    problem = ""
    try:
        found = _open(directory)
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - the other ranks must be notified and not wait
        problem = f"checkpoint {directory} cannot be opened: {type(error).__name__}: {error}."

    def judge(reports: list[list[str]]) -> str:
        for rank, (other, _) in enumerate(reports):
            if other:
                return f"rank {rank}: {other}"
        saves = [save for _, save in reports]
        try:
            refuse_different(
                comm,
                saves,
                f"checkpoint {directory} is not the same on all ranks: they see the saves"
                f" {', '.join(list(dict.fromkeys(saves))[:_MOST_LINES])}",
                "Give all ranks the same folder of one shared file system.",
                error=CheckpointError,
            )
        except CheckpointError as error:
            return str(error)
        return ""

    verdict = _decide_on_rank_0(comm, [problem, found.manifest.save_id if found else ""], judge)
    if verdict:
        raise CheckpointError(verdict)
    assert found is not None
    return found


def _open(directory: Path) -> Checkpoint:
    try:
        manifest = decode(read_manifest(directory))
        return Checkpoint(directory, manifest, plain.unpack(manifest.data))
    except StorageError:
        raise
    except (OSError, RefusedError) as error:
        names = storage_of(directory).list(directory)
        if isinstance(error, FileNotFoundError) or (isinstance(directory, Url) and not names):
            raise CheckpointError(f"there is no checkpoint {directory}.\n  {_suggest(directory)}") from None
        if isinstance(error, OSError):
            raise CheckpointError(
                f"checkpoint {directory} cannot be opened: {error.strerror}.\n  A checkpoint is a folder. A state dict"
                " of torch.save goes into a model by sw.load_full_state_dict(model, torch.load(path))."
            ) from None
        if MANIFEST_NAME not in names:
            raise CheckpointError(
                f"checkpoint {directory} was never committed: it has no {MANIFEST_NAME}.\n"
                f"  {_other_kind(directory, names)}"
            ) from None
        raise CheckpointError(
            f"checkpoint {directory}: {MANIFEST_NAME}: {error}.\n  Resume from another checkpoint."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"checkpoint {directory}: {MANIFEST_NAME}: {error}.") from None


def _other_kind(directory: Path, names: Collection[str]) -> str:
    """Say what kind of folder it is, if it has no manifest, and what to do with it."""
    newest = max((name for name in names if step_of(name) is not None), default=None)
    if newest is not None:
        return (
            f"It holds checkpoints. Give the path of one, such as {directory / newest}: sw.newest_checkpoint finds it."
        )
    if ".metadata" in names:
        return (
            "It is one of torch.distributed.checkpoint."
            f" Run: shardwise checkpoint import {printable(shlex.quote(str(directory)))} OUT --trust"
        )
    another = "A save was interrupted there, or it is another kind of folder. Give the path of a checkpoint."
    return deepspeed_advice(names) or another


@dataclass(frozen=True)
class _Copy:
    """A box of a piece that is copied into a part of a target."""

    piece: Piece
    block: Block
    target: Tensor


@dataclass
class _Plan:
    """The reads of one rank: copies by file, mismatches (name, saved, expected), and invalid targets."""

    copies: dict[int, list[_Copy]] = field(default_factory=dict)
    mismatches: list[list[str]] = field(default_factory=list)
    invalid_targets: list[str] = field(default_factory=list)


@dataclass
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: The checkpoint's folder.
        manifest: The checked manifest.
        data: The saved state other than tensors.
    """

    path: Path
    manifest: Manifest
    data: dict[str, Any]
    _verified: dict[int, tuple[object, ...]] = field(default_factory=dict, repr=False)

    @property
    def step(self) -> int:
        """The step after which the checkpoint was saved."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """Number of ranks that saved the checkpoint."""
        return self.manifest.world_size

    @property
    def tensors(self) -> dict[str, Extent]:
        """The logical tensors, each as the extent of all its elements."""
        return self.manifest.table.tensors

    def check_files(self) -> None:
        """Check that every file exists, is a plain file, and has its size. Fast, because no file is opened.

        Raises:
            CheckpointError: Lists every file that fails.
        """
        sizes = storage_of(self.path).list(self.path)
        self._agree(
            self._check(range(len(self.manifest.all_files)), lambda number: self._check_size(number, sizes)), None
        )

    def verify(self, comm: Comm | None = None) -> None:
        """Check every file's size, header and hash against the manifest, whose coverage was checked when it was opened.

        Args:
            comm: Ranks that share the work: each file is read by one of them, and all of them get the result.

        Raises:
            CheckpointError: Lists every file that fails, with the expected and the found value.

        Collective:
            With ``comm``, a gather of small JSON to rank 0 and a broadcast of its verdict.
        """
        self._verify(range(len(self.manifest.all_files)), comm)

    def read_into(
        self, pairs: Pairs, *, ignored: Collection[str] = (), verify: bool = True, comm: Comm | None = None
    ) -> list[str]:
        """Fill each flat target with its range of the saved tensor, whatever ranks and slices it was saved in.

        Args:
            pairs: Extents, each with the one-dimensional contiguous tensor that receives its elements.
            ignored: Names, or prefixes of names that end in ``/``, of saved tensors that no rank needs to request
                (``optimizer/``).
            verify: Check the hash of every file that is read, before anything is copied. An unchanged file that this
                object has verified before is not read twice. Without it only sizes and headers are checked.
            comm: All ranks that load together. With it every rank raises the same error, and each file is verified by
                one rank. Without it only ``pairs`` count as requested, and an error is raised on this rank alone.

        Returns:
            Names of the files that this rank has read.

        Raises:
            CheckpointError: Names, shapes, dtypes or strides differ (listed in a table; no dtype is ever cast), or a
                file is damaged. No target was written, unless a file changed during reading.

        Collective:
            With ``comm``, three gathers of small JSON to rank 0, each followed by a broadcast of its verdict. The bytes
            that other ranks receive hardly grow with the number of ranks. All ranks must call in one order.
        """
        inject.at("load_begin", self.step)
        plan = self._plan(pairs)
        numbers = sorted(plan.copies)
        requested = (self.manifest.table.numbers.get(extent.name) for extent, _ in pairs)
        report = {
            "requested": _encode_numbers(requested, len(self.tensors)),
            "mismatches": plan.mismatches,
            "invalid": plan.invalid_targets[:_MOST_LINES],
            "files": _encode_numbers(numbers, len(self.manifest.all_files)),
        }
        verdict = _decide_on_rank_0(comm, report, lambda reports: self._judge(reports, ignored))
        if verdict["problem"]:
            raise CheckpointError(verdict["problem"])
        if verify:
            self._verify(_decode_numbers(verdict["files"]), comm)
        else:
            self._agree(self._check(numbers, self._check_header), comm)
        problems = self._check(numbers, lambda number: self._copy(number, plan.copies[number]))
        self._agree(problems, comm)
        inject.at("after_load", self.step, lambda: (target for _, target in pairs))
        return [self.manifest.all_files[number].name for number in numbers]

    def summary(self) -> dict[str, Any]:
        """Return step, run, world and strategy, and the amounts of data, as plain values.

        ``strategy`` and ``mesh`` are taken from ``data``, ``None`` if missing. ``tensors`` has number, elements and
        bytes by kind: ``parameters``, ``buffers``, ``optimizer``, ``average`` (of the parameters), ``ranks`` (state of
        single ranks). ``slices`` has the shape and the slices of each tensor that was saved in slices.
        """
        kinds: dict[str, Counter[str]] = {}
        for name, whole in self.tensors.items():
            kind = _KINDS.get(name.split("/")[0], "parameters")
            found = kinds.setdefault(kind, Counter(number=0, numel=0, bytes=0))
            found.update(number=1, numel=whole.numel, bytes=whole.numel * item_bytes(whole.dtype))
        return {
            "path": str(self.path),
            "format_version": FORMAT_VERSION,
            "save_id": self.manifest.save_id,
            "run_id": self.manifest.run_id,
            "step": self.step,
            "world_size": self.world_size,
            "strategy": self.data.get("strategy"),
            "mesh": self.data.get("mesh"),
            "tensors": {kind: dict(found) for kind, found in kinds.items()},
            "slices": {
                name: {"shape": list(whole.shape), "slices": [describe_cuts(whole.shape, cuts) for cuts in slices]}
                for name, whole in self.tensors.items()
                if (slices := self.manifest.table.slices(name))
            },
            "bytes": sum(entry.bytes for entry in self.manifest.all_files),
            "frozen_bytes": sum(entry.bytes for entry in self.manifest.frozen or ()),
            "files": [entry._asdict() for entry in self.manifest.all_files],
            "data_keys": sorted(self.data),
        }

    def _judge(self, reports: list[dict[str, Any]], ignored: Collection[str]) -> dict[str, Any]:
        """On rank 0: return the problem with the ranks' requests, or the files that any rank reads."""
        invalid = [f"rank {rank}: {problem}" for rank, report in enumerate(reports) for problem in report["invalid"]]
        if invalid:
            lines = "".join(f"\n  - {problem}" for problem in invalid[:_MOST_LINES])
            return {"problem": f"checkpoint {self.path} cannot be read into these tensors:{lines}"}
        mismatches: dict[str, tuple[str, str]] = {}
        for report in reports:
            for name, saved, expected in report["mismatches"]:
                mismatches.setdefault(name, (saved, expected))
        requested = set(_decode_numbers(_union(report["requested"] for report in reports)))
        table = [(name, *columns) for name, columns in mismatches.items()]
        table += [
            (whole.name, describe(whole), "not there")
            for number, whole in enumerate(self.tensors.values())
            if number not in requested and not _matches(whole.name, ignored)
        ]
        if table:
            return {"problem": self._table(table)}
        return {"problem": "", "files": _union(report["files"] for report in reports)}

    def _plan(self, pairs: Pairs) -> _Plan:
        """Plan the copies from each file, and record mismatches."""
        plan, tensors = _Plan(), self.tensors
        for extent, target in pairs:
            problem = _target_problem(extent, target)
            if problem is not None:
                plan.invalid_targets.append(problem)
                continue
            saved = tensors.get(extent.name)
            if saved is None or (saved.shape, saved.dtype, saved.stride) != (extent.shape, extent.dtype, extent.stride):
                found = "not there" if saved is None else describe(saved)
                plan.mismatches.append([extent.name, found, describe(extent)])
                continue
            for rank, piece, stored in self.manifest.table.overlapping(extent):
                for block in shared(stored, extent):
                    number = self.manifest.file_of(extent.name, rank)
                    plan.copies.setdefault(number, []).append(_Copy(piece, block, target))
        return plan

    def _verify(self, ranks: Sequence[int], comm: Comm | None) -> None:
        mine = ranks if comm is None else [rank for i, rank in enumerate(ranks) if i % comm.size == comm.rank]
        self._agree(self._check(mine, self._check_content), comm)

    def _check(self, ranks: Collection[int], look: Callable[[int], None]) -> list[str]:
        """Run ``look(number)`` for these files, and return the errors."""
        problems = []
        try:
            for rank in ranks:
                try:
                    look(rank)
                except RefusedError as error:
                    name = self.manifest.all_files[rank].name
                    problems.append(f"{name} (rank {rank % self.world_size} wrote it): {error}")
        except OSError as error:
            problems.append(f"the folder cannot be read: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - the other ranks must be notified and not wait
            problems.append(f"{type(error).__name__}: {error}")
        return problems

    @contextlib.contextmanager
    def _opened(self, rank: int) -> Iterator[StoredFile]:
        entry, is_shared = self.manifest.all_files[rank], rank >= self.world_size
        with storage_of(self.path).open(self.path, entry.name, allows_links=is_shared) as file:
            _check_bytes(file.num_bytes, entry.bytes)
            expected = self.manifest.layout_of(rank).file_bytes
            if entry.bytes != expected:
                raise RefusedError(f"it is said to have {entry.bytes} bytes, its tensors make {expected}")
            yield file

    def _check_size(self, rank: int, sizes: Mapping[str, int | str]) -> None:
        entry = self.manifest.all_files[rank]
        _check_bytes(sizes.get(entry.name, "the file is missing"), entry.bytes)

    def _check_header(self, rank: int) -> None:
        with self._opened(rank) as file:
            check_header(file, self.manifest.layout_of(rank))

    def _check_content(self, rank: int) -> None:
        with self._opened(rank) as file:
            if self._verified.get(rank) == file.state:
                return
            check_header(file, self.manifest.layout_of(rank))
            entry = self.manifest.all_files[rank]
            found = file.hash()
            if found != entry.hash:
                raise RefusedError(
                    f"its content has the hash {found}, expected {entry.hash}; it holds {self._tensors_in(rank)}"
                )
            self._verified[rank] = file.state

    def _tensors_in(self, number: int) -> str:
        """Return names of the tensors with pieces in a file, shortened."""
        names = list(dict.fromkeys(piece.name for piece in self.manifest.layout_of(number).offsets))
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return f"{', '.join(names[:_MOST_NAMES])}{more}"

    def _copy(self, rank: int, copies: list[_Copy]) -> None:
        with self._opened(rank) as file:
            plan = self.manifest.layout_of(rank)
            check_header(file, plan)
            for copy in sorted(copies, key=lambda copy: plan.offsets[copy.piece]):  # in file order, for read-ahead
                read_block(file, plan.offsets[copy.piece], copy.piece.dtype, copy.block, copy.target)
                inject.at("load_mid_shard", self.step)

    def _agree(self, found: list[str], comm: Comm | None) -> None:
        """Raise on all ranks if any rank found a problem."""
        verdict = _decide_on_rank_0(comm, found[: _MOST_LINES + 1], self._damage)
        if verdict:
            raise CheckpointError(verdict)

    def _damage(self, reports: list[list[str]]) -> str:
        """Describe the damaged files; empty if there are none."""
        problems = [problem for report in reports for problem in report]
        if not problems:
            return ""
        lines = "".join(f"\n  - {problem}" for problem in problems[:_MOST_LINES])
        more = f"\n  - and {len(problems) - _MOST_LINES} more files" if len(problems) > _MOST_LINES else ""
        return (
            f"checkpoint {self.path} (step {self.step}) is damaged:{lines}{more}\n"
            "  Nothing was loaded from it. Resume from another checkpoint."
        )

    def _table(self, rows: list[tuple[str, str, str]]) -> str:
        shown = [("tensor", "saved", "expected"), *rows[:_MOST_LINES]]
        lines = "".join(f"\n  {line}" for line in aligned(shown, words=range(3)))
        more = f"\n  and {len(rows) - _MOST_LINES} more" if len(rows) > _MOST_LINES else ""
        return (
            f"checkpoint {self.path} (step {self.step}) does not fit: {len(rows)} "
            f"tensor{'s differ' if len(rows) > 1 else ' differs'}.{lines}{more}\n"
            "  Build the model and the optimizer that were saved, or choose another checkpoint."
        )


def _decide_on_rank_0(comm: Comm | None, report: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """Broadcast rank 0's decision on the reports of all ranks.

    Collective:
        With ``comm``, a gather of JSON to rank 0 and a broadcast from there.
    """
    if comm is None:
        return decide([report])
    reports = gather_json(comm, report)
    decision: list[Any] = []
    if comm.rank == 0:
        try:
            decision = ["", decide(reports)]
        except Exception as error:  # noqa: BLE001 - the other ranks must be notified and not wait
            decision = [f"what the ranks report cannot be compared: {type(error).__name__}: {error}.", None]
    problem, answer = broadcast_json(comm, decision)
    if problem:
        raise CheckpointError(problem)
    return answer


def _encode_numbers(numbers: Iterable[int | None], total: int) -> str:
    """Encode a set of numbers below ``total`` as a text with one bit for each."""
    marks = np.zeros(total, dtype=bool)
    marks[[number for number in numbers if number is not None]] = True
    return np.packbits(marks).tobytes().hex()


def _union(texts: Iterable[str]) -> str:
    """Return the union of sets encoded by :func:`_encode_numbers`, encoded."""
    first, *others = (np.frombuffer(bytes.fromhex(text), np.uint8) for text in texts)
    return functools.reduce(np.bitwise_or, others, first).tobytes().hex()


def _decode_numbers(text: str) -> list[int]:
    """Return the numbers in a text of :func:`_encode_numbers`, ascending."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))).tolist()


def _check_bytes(found: int | str, expected: int) -> None:
    if found != expected:
        raise RefusedError(found if isinstance(found, str) else f"the file has {found} bytes, expected {expected}")


def _target_problem(extent: Extent, target: Tensor) -> str | None:
    problem = extent_problem(extent)
    if problem is not None:
        return problem
    dtype = dtype_name(target.dtype)
    if target.dim() != 1 or target.numel() != extent.numel or dtype != extent.dtype or not target.is_contiguous():
        return (
            f"{extent.name}: the target has shape {tuple(target.shape)}, stride {target.stride()} and dtype {dtype}, "
            f"expected a contiguous ({extent.numel},) of {extent.dtype}"
        )
    return None


def _matches(name: str, ignored: Collection[str]) -> bool:
    return any(name == known or (known.endswith("/") and name.startswith(known)) for known in ignored)


def _suggest(directory: Path) -> str:
    if not isinstance(directory, Url) and not directory.parent.is_dir():
        return f"There is no folder {directory.parent} either."
    names = [name for name, kind in storage_of(directory).list(directory.parent).items() if isinstance(kind, str)]
    near = similar(directory.name, names)
    if near:
        return f"Near it there is {', '.join(near)}."
    return f"{directory.parent} holds {', '.join(names[:8]) if names else 'no folder'}."


def describe_summary(summary: dict[str, Any]) -> str:
    """Return a summary as a few lines of text."""
    strategy, mesh = summary["strategy"], summary["mesh"]
    over = " x ".join(f"{axis}={count}" for axis, count in mesh.items() if count != 1) if isinstance(mesh, dict) else ""
    frozen = summary["frozen_bytes"]
    shared_with = f", of which {size(frozen)} frozen, shared with other checkpoints" if frozen else ""
    saved_by = [f"{summary['world_size']} ranks"]
    saved_by += [] if strategy is None else [ascii(strategy)[:200]]
    saved_by += [ascii(over)[1:-1][:200]] if over else []
    rows = [
        ("checkpoint", summary["path"]),
        ("step", str(summary["step"])),
        ("run", summary["run_id"]),
        ("saved by", ", ".join(saved_by)),
        ("files", f"{len(summary['files'])}, {size(summary['bytes'])}{shared_with}"),
    ]
    rows += [
        (kind, f"{found['number']} tensors, {found['numel']:,} elements, {size(found['bytes'])}")
        for kind, found in summary["tensors"].items()
    ]
    return "\n".join([*aligned(rows, words=range(2)), *describe_slices(summary["slices"])])


def describe_slices(slices: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the tensors that were saved in slices, with one line for equal layers."""
    lines = list_alike(
        {
            name: " ".join(found["slices"][:4])
            + (f" and {len(found['slices']) - 4} more" if found["slices"][4:] else "")
            for name, found in slices.items()
        }
    )
    more = [f"  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return (
        [f"in slices   {len(slices)} tensors", *(f"  {line}" for line in lines[:_MOST_LINES]), *more] if lines else []
    )
