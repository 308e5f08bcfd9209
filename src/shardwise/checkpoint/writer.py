"""Saving: every rank writes its own file, and rank 0 publishes all files at once, or none.

::

    checkpoints/step-00000100.tmp-<save id>/     created by rank 0; never read
        shard-<save id>-r00000.safetensors       one file for each rank: written, hashed, fsynced
        shard-<save id>-r00001.safetensors
         frozen-<hash>-r00000.safetensors         frozen parameters: a hard link to the file of another checkpoint
         manifest.json                            by rank 0, after all files are written
    checkpoints/step-00000100/                   the same folder, renamed: the commit
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import plain
from shardwise.checkpoint.background import Background
from shardwise.checkpoint.combine import Combined, encode_ranges
from shardwise.checkpoint.finite import non_finite
from shardwise.checkpoint.outcome import AFTERWARDS, failure_of, name_space, problem_of
from shardwise.checkpoint.publish import commit, remove_unfinished
from shardwise.checkpoint.shard import (
    Layout,
    Piece,
    frozen_layout,
    frozen_name,
    hash_content,
    layout,
    shard_name,
    write_shard,
)
from shardwise.checkpoint.storage import refuse_existing, temporary_of
from shardwise.checkpoint.table import extent_problem
from shardwise.comm.base import Comm
from shardwise.comm.control import broadcast_json, gather_json, scatter_json
from shardwise.comm.dtype import dtype_name
from shardwise.launch import inject
from shardwise.spec.errors import CheckpointError, NonFiniteError, ShardwiseError, StorageError
from shardwise.spec.extent import Extent
from shardwise.spec.precision import item_bytes
from shardwise.spec.text import size
from shardwise.weights.state.extents import Pairs


def write(
    directory: str | os.PathLike[str],
    comm: Comm,
    tensors: Pairs,
    data: dict[str, Any],
    *,
    step: int,
    run_id: str,
    frozen: Collection[str] = (),
    allow_non_finite: bool = False,
) -> Path:
    """Save one checkpoint, or raise the same error on every rank and leave no files behind.

    Needs a few megabytes of memory in addition to the tensors, on any device.

    Args:
        directory: The checkpoint's folder, for example ``checkpoints/step-00000100``. Must not exist. All ranks must
            see the same file system.
        comm: All ranks that own pieces.
        tensors: This rank's pieces: flat one-dimensional tensors. Over all ranks, every element of every logical tensor
            must occur exactly once: for replicated tensors each rank gives a part, or one rank gives everything; a
            slice that several ranks hold is given by one of them. An empty extent declares a zero-sized tensor.
        data: State other than tensors, equal on all ranks: None, bool, int, float, str, bytes, list, tuple and dict.
        step: The step after which this is the state.
        run_id: The id of the run.
        frozen: Names of tensors that hardly ever change. They go into a separate file, named by its content; if another
            checkpoint in the same folder has that file, it gets a hard link and is not written again.
        allow_non_finite: Save NaN and infinity too. Otherwise they are refused, except in buffers and frozen tensors.

    Returns:
        ``directory``.

    Raises:
        CheckpointError: The pieces do not cover the tensors, the directory exists, ranks disagree, or ``data`` has
            other values. The same error is raised on all ranks.
        NonFiniteError: A parameter or optimizer state is not finite, on any rank. Raised on all ranks.
        StorageError: Writing failed on any rank, for example because a disk is full. Raised on all ranks.
        CommError: A peer is gone. The unfinished files stay in ``<directory>.tmp-*``, which ``retain`` removes.

    Collective:
        Two gathers of small JSON to rank 0, which combines the reports, each followed by a broadcast of the verdict;
        with slices, a scatter of their numbers. The bytes that a rank other than 0 receives do not grow with the number
        of ranks. All ranks must call in the same order.
    """
    save = _Save(Path(directory), comm, step=step, run_id=run_id, allows_non_finite=allow_non_finite)
    with save.removing_on_failure():
        save.prepare(tensors, data, frozen)
        save.write_and_publish()
    return save.directory


#: Maximum number of names of non-finite tensors that a rank reports.
_MOST_NAMES = 5
#: Seconds between checks of whether a file has been written, at the end of a process.
_POLL_S = 0.05


class Saving:
    """A save that runs during training: the ranks' processes write, and rank 0's process publishes.

    Attributes:
        directory: The future folder of the checkpoint.
    """

    def __init__(self, save: _Save, background: Background) -> None:
        self.directory = save.directory
        self._save, self._background = save, background

    def failure(self) -> str | None:
        """Return why this rank's part, or on rank 0 the save, has failed; ``None`` if it has not. Does not wait."""
        outcome = self._background.poll() or {}
        found = outcome.get("failed", outcome.get("problem"))
        return None if found is None or folders.exists(self.directory) else str(found)

    def wait(self, limit_s: float) -> str | None:
        """Wait at most ``limit_s`` for this rank's process; return why its part has failed, if so. Not a collective."""
        end = time.monotonic() + limit_s
        while self._background.poll() is None:
            if time.monotonic() > end:
                return f"it was not finished within {limit_s:.0f} s of the end (call sw.finish_save before)"
            time.sleep(_POLL_S)
        return self.failure()

    def finish(self) -> dict[str, Any]:
        """Wait until the checkpoint is published.

        Returns:
            ``good``, ``refused``, and ``after`` if only that part failed, as in ``publish.publish``.

        Raises:
            CheckpointError, StorageError: The save failed on some rank. Raised on all ranks; no files are left behind.

        Collective:
            A gather of small JSON to rank 0 and a broadcast from there. All ranks must call.
        """
        with self._save.removing_on_failure():
            return self._save.finish(self._background)


def begin_write(
    directory: str | os.PathLike[str],
    comm: Comm,
    tensors: Pairs,
    data: dict[str, Any],
    background: Background,
    *,
    step: int,
    run_id: str,
    frozen: Collection[str] = (),
    keep: int | None = None,
    known_good: Sequence[str] = (),
    allow_non_finite: bool = False,
) -> Saving:
    """Save as :func:`write`, but return after this rank's tensors are copied, which needs as much memory again.

    The previous save of ``background`` must have been finished. With ``keep`` older checkpoints are removed after this
    one is published and its files have been read again and compared; ``known_good`` were verified before.

    Raises:
        CheckpointError, StorageError, NonFiniteError: As :func:`write`. Later errors are raised by ``Saving.finish``.

    Collective:
        A gather of small JSON to rank 0 and a broadcast from there; with slices, a scatter of their numbers.
    """
    save = _Save(Path(directory), comm, step=step, run_id=run_id, allows_non_finite=allow_non_finite)
    with save.removing_on_failure():
        save.prepare(tensors, data, frozen)
    save.hand_over(background, keep=keep, known_good=known_good)
    return Saving(save, background)


class _Save:
    """One save on one rank: ``prepare`` and ``write_and_publish``, each of which ends with an exchange of outcomes.

    All ranks send their reports only to rank 0, which combines them and broadcasts the verdict.
    """

    def __init__(self, directory: Path, comm: Comm, *, step: int, run_id: str, allows_non_finite: bool = False) -> None:
        self.allows_non_finite = allows_non_finite
        self.directory = directory
        self.comm = comm
        self.step = step
        self.run_id = run_id
        self.save_id = ""
        self.temporary: Path | None = None
        self.pieces: dict[Piece, Tensor] = {}
        self.frozen_pieces: dict[Piece, Tensor] = {}
        self.has_frozen = False
        self.columns: dict[str, Any] = {}  # on rank 0: the manifest's table
        self._slice_numbers: list[list[int]] = []  # on rank 0: the slice of each range, by rank
        self.data: dict[str, Any] = {}

    def prepare(self, tensors: Pairs, data: dict[str, Any], frozen: Collection[str]) -> None:
        """Agree on what will be written, and check that it is complete, before a byte is written."""

        def local() -> dict[str, Any]:
            inject.at("save_begin", self.step)
            if len(self.run_id) > 256 or not self.run_id.isprintable():
                raise CheckpointError(f"{self.run_id!r} is not a name for a run")
            self._check_tensors(tensors)
            self.data = plain.pack(data)
            linked = frozen if self._shared(f"-r{self.comm.rank:05d}.safetensors") else ()
            found: dict[str, Any] = {
                "target": self.directory.name,
                "step": self.step,
                "run_id": self.run_id,
                "data": hashlib.sha256(plain.dumps(self.data)).hexdigest(),
                "extents": encode_ranges([extent for extent, _ in tensors], frozen),
                "non_finite": []
                if self.allows_non_finite
                else non_finite([(extent, tensor) for extent, tensor in tensors if extent.name not in frozen])[
                    :_MOST_NAMES
                ],
                "bytes": sum(
                    extent.numel * item_bytes(extent.dtype) for extent, _ in tensors if extent.name not in linked
                ),
            }
            if self.comm.rank == 0:
                found |= self._make_temporary()
            return found

        answer = self._exchange(local, self._combine)
        self.save_id = answer["save_id"]
        self.temporary = temporary_of(self.directory, self.save_id)
        numbers = scatter_json(self.comm, self._slice_numbers) if answer["has_slices"] else [-1] * len(tensors)
        for (extent, tensor), number in zip(tensors, numbers, strict=True):
            if extent.numel:
                pieces = self.frozen_pieces if extent.name in frozen else self.pieces
                pieces[Piece(extent.name, extent.dtype, extent.start, extent.stop, number)] = tensor
        self.has_frozen = answer["has_frozen"]

    def _combine(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: combine the reports of all ranks; refuse a state that is incomplete or does not fit the disk."""
        problems = _disagreements(reports)
        combined = Combined((rank, report.pop("extents")) for rank, report in enumerate(reports))
        problems += combined.problems
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems[:20])
            more = f"\n  - and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise _VerdictError(CheckpointError, f"what the ranks gave does not make one state:{lines}{more}")
        non_finite_on = {rank: report["non_finite"] for rank, report in enumerate(reports) if report["non_finite"]}
        if non_finite_on:
            lines = "".join(f"\n  - rank {rank}: {', '.join(names)}" for rank, names in [*non_finite_on.items()][:20])
            raise _VerdictError(
                NonFiniteError,
                f"there is NaN or infinity in what it would hold:{lines}\n"
                "  Nothing was written; earlier checkpoints are as they were. Go back to one of them with a lower"
                " learning rate, or look at the samples since. What is not finite rightly is saved with"
                " allow_non_finite=True (checkpoint.allow_non_finite=true).",
            )
        needed, free = sum(report["bytes"] for report in reports), reports[0]["free"]
        if needed > free:
            raise _VerdictError(
                StorageError, f"no space left on device: {size(needed)} needed, {size(free)} free.{AFTERWARDS}"
            )
        self.columns = combined.table.columns()
        has_slices = any(combined.table.partitions.slices)
        self._slice_numbers = list(combined.slice_numbers()) if has_slices else []
        has_frozen = bool(combined.table.frozen)
        return {"save_id": reports[0]["save_id"], "has_slices": has_slices, "has_frozen": has_frozen}

    def write_and_publish(self) -> None:
        """Write this rank's file; rank 0 publishes all files when they are complete."""
        rank = self.comm.rank

        def local() -> dict[str, Any]:
            assert self.temporary is not None
            inject.at("before_shard_open", self.step)
            plan = layout(save_id=self.save_id, run_id=self.run_id, step=self.step, rank=rank, pieces=self.pieces)
            name = shard_name(self.save_id, rank)
            try:
                with folders.open_folder(self.temporary, follow=False) as folder:
                    digest = write_shard(folder, name, plan, self.pieces, self.step)
                    frozen = self._write_frozen(folder) if self.has_frozen else None
            except OSError as error:
                error.filename = self.temporary / name
                name_space(error, self.temporary, plan.file_bytes)
                if isinstance(error, FileNotFoundError) and not folders.exists(self.temporary):
                    error.filename = self.temporary
                    error.strerror = (
                        "this rank does not find the folder that rank 0 has made (all ranks need the same folder, of a"
                        " file system that all machines share)"
                    )
                raise
            return {"own": {"name": name, "bytes": plan.file_bytes, "hash": digest}, "frozen": frozen}

        self._exchange(local, self._publish)

    def hand_over(self, background: Background, *, keep: int | None, known_good: Sequence[str]) -> None:
        """Copy this rank's content and let its background process write and publish it.

        Errors here become part of the report of this rank's process to rank 0's process.
        """
        assert self.temporary is not None
        plan: Layout | None = layout(
            save_id=self.save_id, run_id=self.run_id, step=self.step, rank=self.comm.rank, pieces=self.pieces
        )
        report: dict[str, Any] = {"frozen": None}
        try:
            inject.at("before_shard_open", self.step)
            if self.has_frozen:
                with folders.open_folder(self.temporary, follow=False) as folder:
                    report["frozen"] = self._write_frozen(folder)
        except Exception as error:  # noqa: BLE001 - as in _exchange
            report, plan = problem_of(error), None
        job: dict[str, Any] = {
            "temporary": str(self.temporary.absolute()),
            "directory": str(self.directory.absolute()),
            "rank": self.comm.rank,
            "world_size": self.comm.size,
            "step": self.step,
            "keep": keep,
            "report": report,
        }
        if plan is not None:
            job["own"] = {"name": shard_name(self.save_id, self.comm.rank), "bytes": plan.file_bytes}
        if self.comm.rank == 0:
            job["manifest"] = self._manifest()
            job["good"] = list(known_good)
        try:
            background.begin(job, plan, self.pieces)
        except OSError as error:
            background.begin({**job, "report": problem_of(error)}, None, {})

    def finish(self, background: Background) -> dict[str, Any]:
        """Wait for the background processes; return the outcome of rank 0's process, on every rank.

        Collective:
            A gather of small JSON to rank 0 and a broadcast from there.
        """

        def local() -> dict[str, Any]:
            outcome = background.wait() if self.comm.rank else {}
            if "problem" in outcome:
                raise (StorageError if outcome["is_storage"] else CheckpointError)(outcome["problem"])
            return outcome

        def decide(reports: list[dict[str, Any]]) -> dict[str, Any]:
            del reports
            outcome = background.wait()
            if "problem" in outcome and folders.exists(self.directory):  # killed after publishing
                return {"good": [], "refused": [], "after": outcome["problem"]}
            failure = failure_of([outcome]) if "problem" in outcome else outcome if "failed" in outcome else None
            if failure is not None:
                raise _VerdictError(_KINDS[failure["kind"]], failure["failed"])
            return outcome

        try:
            return self._exchange(local, decide)
        except BaseException:
            background.close()  # rank 0's process may wait for a report that will not come
            raise

    def _manifest(self) -> dict[str, Any]:
        """On rank 0: return the manifest without the files."""
        return {
            "save_id": self.save_id,
            "run_id": self.run_id,
            "step": self.step,
            "world_size": self.comm.size,
            "data": self.data,
            **self.columns,
        }

    def _write_frozen(self, folder: int) -> dict[str, Any]:
        """Link the file of frozen parameters from another checkpoint in the same folder, or write it."""
        plan = frozen_layout(self.comm.rank, self.frozen_pieces)
        digest = hash_content(plan, self.frozen_pieces)
        name = frozen_name(digest, self.comm.rank)
        if not any(folders.link(path, folder, name, plan.file_bytes) for path in self._shared(name)):
            written = write_shard(folder, name, plan, self.frozen_pieces)
            if written != digest:
                raise CheckpointError(f"frozen parameters of rank {self.comm.rank} changed while they were saved")
        return {"name": name, "bytes": plan.file_bytes, "hash": digest}

    def _shared(self, ending: str) -> list[Path]:
        """Return other checkpoints' files of frozen parameters whose names end like this, newest first."""
        paths = sorted(self.directory.parent.glob("*/frozen-*"), reverse=True)
        return [path for path in paths if path.name.endswith(ending) and _UNPUBLISHED.search(path.parent.name) is None]

    @contextlib.contextmanager
    def removing_on_failure(self) -> Iterator[None]:
        """Make rank 0 remove the temporary folder if the save in this block fails with an error known to all ranks."""
        try:
            yield
        except (CheckpointError, StorageError, NonFiniteError, _Interrupted) as error:
            if self.comm.rank == 0 and self.temporary is not None:
                remove_unfinished(self.temporary)
            if isinstance(error, _Interrupted):
                raise error.cause from None
            raise

    def _publish(self, reports: list[dict[str, Any]]) -> None:
        """On rank 0: write the manifest and commit."""
        commit(self.directory, self._manifest(), reports)

    def _make_temporary(self) -> dict[str, Any]:
        refuse_existing(self.directory)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        save_id = secrets.token_hex(8)
        temporary = temporary_of(self.directory, save_id)
        temporary.mkdir()  # raises if it exists
        self.temporary = temporary
        return {"save_id": save_id, "free": shutil.disk_usage(temporary).free}

    @staticmethod
    def _check_tensors(tensors: Pairs) -> None:
        problems = []
        known: set[Extent] = set()
        for extent, tensor in tensors:
            problem = extent_problem(extent)
            if problem is not None:
                problems.append(problem)
            elif tensor.dim() != 1 or tensor.numel() != extent.numel or dtype_name(tensor.dtype) != extent.dtype:
                problems.append(
                    f"{extent.name}: the tensor has shape {tuple(tensor.shape)} and dtype {dtype_name(tensor.dtype)}, "
                    f"expected ({extent.numel},) and {extent.dtype}"
                )
            elif extent.numel:
                if extent in known:
                    problems.append(f"{extent.name}: elements {extent.start} to {extent.stop} are given twice")
                known.add(extent)
        if problems:
            raise CheckpointError("; ".join(problems[:10]))

    def _exchange(
        self, local: Callable[[], dict[str, Any]], decide: Callable[[list[dict[str, Any]]], dict[str, Any] | None]
    ) -> dict[str, Any]:
        """Run this rank's part, let rank 0 decide on all reports, and raise on all ranks if a part failed on any.

        Returns:
            Rank 0's decision.

        Collective:
            A gather of small JSON to rank 0 and a broadcast from there.
        """
        interrupt: BaseException | None = None
        try:
            report: dict[str, Any] = {"result": local()}
        except Exception as error:  # noqa: BLE001 - the other ranks must be notified of any error
            report = problem_of(error)
        except BaseException as error:  # noqa: BLE001 - raised again below, after the others are notified
            interrupt = error
            report = _interrupted(error)
        reports = gather_json(self.comm, report)
        verdict: dict[str, Any] = {}
        if self.comm.rank == 0:
            try:
                verdict = self._verdict(reports, decide)
            except BaseException as error:  # noqa: BLE001 - as above
                interrupt = error
                verdict = failure_of([_interrupted(error)]) or {}
        verdict = broadcast_json(self.comm, verdict)
        if interrupt is not None:
            raise _Interrupted(interrupt)
        if "failed" in verdict:
            raise _KINDS[verdict["kind"]](f"{self._subject()}: {verdict['failed']}")
        return verdict["answer"] or {}

    @staticmethod
    def _verdict(
        reports: list[dict[str, Any]], decide: Callable[[list[dict[str, Any]]], dict[str, Any] | None]
    ) -> dict[str, Any]:
        """Return rank 0's message to all ranks: its decision, or the failure."""
        failure = failure_of(reports)
        if failure is not None:
            return failure
        try:
            return {"answer": decide([report["result"] for report in reports])}
        except _VerdictError as error:
            return {"failed": error.text, "kind": error.kind.__name__}
        except Exception as error:  # noqa: BLE001 - as in _exchange
            return failure_of([problem_of(error)]) or {}

    def _subject(self) -> str:
        return f"step {self.step} was not saved to {self.directory}"


#: Folders of running saves and deletions.
_UNPUBLISHED = re.compile(r"\.tmp-|^\.trash-")


#: The errors that a save can raise on all ranks, by name.
_KINDS: dict[str, type[ShardwiseError]] = {
    kind.__name__: kind for kind in (CheckpointError, StorageError, NonFiniteError)
}


class _VerdictError(Exception):
    """An error that rank 0 has found in the reports of all ranks, as class and text."""

    def __init__(self, kind: type[ShardwiseError], text: str) -> None:
        super().__init__()
        self.kind, self.text = kind, text


class _Interrupted(BaseException):
    """Raised if this rank was interrupted in its part; ``cause`` is raised after the others are notified."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


def _interrupted(error: BaseException) -> dict[str, Any]:
    return {"problem": f"interrupted by {type(error).__name__}", "is_storage": False}


def _disagreements(reports: list[dict[str, Any]]) -> list[str]:
    problems = []
    for rank, report in enumerate(reports):
        problems += [
            f"{key} is {report[key]!r} on rank {rank} and {reports[0][key]!r} on rank 0"
            for key in ("target", "step", "run_id")
            if report[key] != reports[0][key]
        ]
        if report["data"] != reports[0]["data"]:
            problems.append(f"data differs between rank {rank} and rank 0; what is a rank's own belongs in rank_state")
    return problems
