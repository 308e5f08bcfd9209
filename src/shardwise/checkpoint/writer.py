"""Saving: every rank writes its own file, rank 0 publishes all of them at once or nothing.

::

    checkpoints/step-00000100.tmp-<save id>/     created by rank 0; never read
        shard-<save id>-r00000.safetensors       one file for each rank: written, hashed, fsynced
        shard-<save id>-r00001.safetensors
        frozen-<hash>-r00000.safetensors         frozen parameters: a hard link to the file of a checkpoint beside it
        manifest.json                            rank 0, when all files are there
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
from shardwise.checkpoint.combine import Combined, described
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
from shardwise.launch import fault
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
    """Save one checkpoint, or raise the same error on every rank and leave nothing behind.

    Beside the tensors it holds one chunk of a few megabytes, wherever they lie.

    Args:
        directory: Where the checkpoint will be, for example ``checkpoints/step-00000100``. Must not exist. All ranks
            must see the same file system.
        comm: All ranks that hold pieces.
        tensors: This rank's pieces: flat one-dimensional tensors. Over all ranks, every element of every logical tensor
            must be held exactly once; of replicated tensors each rank gives a part, or one rank gives all; of slices
            that several ranks hold, one rank's. An empty extent makes a zero-sized tensor known.
        data: State that is no tensor and equal on all ranks: None, bool, int, float, str, bytes, list, tuple and dict.
        step: The step after which this is the state.
        run_id: Names the run.
        frozen: Names of tensors that hardly ever change. They go into a file of their own, named by its content; if
            another checkpoint in the same folder has that file, it gets a hard link and is not written again.
        allow_non_finite: Save NaN and infinity too; otherwise they are refused, but in buffers and frozen tensors.

    Returns:
        ``directory``.

    Raises:
        CheckpointError: The pieces do not make whole tensors, the directory exists, ranks disagree, or ``data`` holds
            something else. On all ranks, with the same text.
        NonFiniteError: A parameter or optimizer state is not finite, on any rank. On all ranks, with the same text.
        StorageError: A disk is full or refuses, on any rank. On all ranks, with the same text.
        CommError: A peer is gone. The unfinished files stay in ``<directory>.tmp-*``, which ``retain`` removes.

    Collective:
        Two gathers of small JSON to rank 0, which combines the reports, each followed by a broadcast of the verdict;
        where there are slices, a scatter of their numbers. The bytes that a rank other than 0 receives do not grow with
        the number of ranks. All ranks must call in the same order.
    """
    save = _Save(Path(directory), comm, step=step, run_id=run_id, allows_non_finite=allow_non_finite)
    with save.removing_on_failure():
        save.prepare(tensors, data, frozen)
        save.write_and_publish()
    return save.directory


#: Names that a rank reports of what is not finite.
_MOST_NAMES = 5
#: How often the end of a process looks whether its file has been written.
_POLL_S = 0.05


class Saving:
    """A save that goes on while its ranks train: their processes write, and rank 0's publishes.

    Attributes:
        directory: Where the checkpoint will be.
    """

    def __init__(self, save: _Save, background: Background) -> None:
        self.directory = save.directory
        self._save, self._background = save, background

    def failure(self) -> str | None:
        """Why this rank's part has failed, on rank 0 the save; ``None`` where it has not, or not yet. Does not wait."""
        outcome = self._background.poll() or {}
        found = outcome.get("failed", outcome.get("problem"))
        return None if found is None or folders.exists(self.directory) else str(found)

    def wait(self, limit_s: float) -> str | None:
        """Wait for this rank's process, not longer than this; why its part has failed, if it has. Not a collective."""
        end = time.monotonic() + limit_s
        while self._background.poll() is None:
            if time.monotonic() > end:
                return f"it was not finished within {limit_s:.0f} s of the end (call sw.finish_save before)"
            time.sleep(_POLL_S)
        return self.failure()

    def finish(self) -> dict[str, Any]:
        """Wait until the checkpoint is published.

        Returns:
            ``good``, ``refused`` and where only that went wrong ``after``, as of ``publish.publish``.

        Raises:
            CheckpointError, StorageError: The save has failed on some rank. On all ranks, with the same text; nothing
                is left behind.

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
    """:func:`write`, which returns as soon as this rank's tensors have been copied (as much memory again).

    The save before of ``background`` must have been finished. With ``keep`` older checkpoints are removed when this one
    is published and its files have been read again and compared; ``known_good`` were verified before.

    Raises:
        CheckpointError, StorageError, NonFiniteError: As :func:`write`, but for what is found later, which
            ``Saving.finish`` raises.

    Collective:
        A gather of small JSON to rank 0 and a broadcast from there; where there are slices, a scatter of their numbers.
    """
    save = _Save(Path(directory), comm, step=step, run_id=run_id, allows_non_finite=allow_non_finite)
    with save.removing_on_failure():
        save.prepare(tensors, data, frozen)
    save.hand_over(background, keep=keep, known_good=known_good)
    return Saving(save, background)


class _Save:
    """One save on one rank: ``prepare`` and ``write_and_publish``, each ended by an exchange of outcomes.

    All ranks send their reports to rank 0 alone, which combines them and broadcasts the verdict.
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
        self._slice_numbers: list[list[int]] = []  # on rank 0, by rank: the slice of each of its ranges
        self.data: dict[str, Any] = {}

    def prepare(self, tensors: Pairs, data: dict[str, Any], frozen: Collection[str]) -> None:
        """Agree on what will be written, and prove that it is whole, before a byte of it is."""

        def local() -> dict[str, Any]:
            fault.at("save_begin", self.step)
            if len(self.run_id) > 256 or not self.run_id.isprintable():
                raise CheckpointError(f"{self.run_id!r} is no name for a run")
            self._check_tensors(tensors)
            self.data = plain.pack(data)
            linked = frozen if self._shared(f"-r{self.comm.rank:05d}.safetensors") else ()
            found: dict[str, Any] = {
                "target": self.directory.name,
                "step": self.step,
                "run_id": self.run_id,
                "data": hashlib.sha256(plain.dumps(self.data)).hexdigest(),
                "extents": described([extent for extent, _ in tensors], frozen),
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
                held = self.frozen_pieces if extent.name in frozen else self.pieces
                held[Piece(extent.name, extent.dtype, extent.start, extent.stop, number)] = tensor
        self.has_frozen = answer["has_frozen"]

    def _combine(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: put together what all ranks hold, and refuse what is not a whole state or does not fit."""
        problems = _disagreements(reports)
        combined = Combined((rank, report.pop("extents")) for rank, report in enumerate(reports))
        problems += combined.problems
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems[:20])
            more = f"\n  - and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise _ToldError(CheckpointError, f"what the ranks gave does not make one state:{lines}{more}")
        non_finite_on = {rank: report["non_finite"] for rank, report in enumerate(reports) if report["non_finite"]}
        if non_finite_on:
            lines = "".join(f"\n  - rank {rank}: {', '.join(names)}" for rank, names in [*non_finite_on.items()][:20])
            raise _ToldError(
                NonFiniteError,
                f"there is NaN or infinity in what it would hold:{lines}\n"
                "  Nothing was written; earlier checkpoints are as they were. Go back to one of them with a lower"
                " learning rate, or look at the samples since. What is not finite rightly is saved with"
                " allow_non_finite=True (checkpoint.allow_non_finite=true).",
            )
        needed, free = sum(report["bytes"] for report in reports), reports[0]["free"]
        if needed > free:
            raise _ToldError(
                StorageError, f"no space left on device: {size(needed)} needed, {size(free)} free.{AFTERWARDS}"
            )
        self.columns = combined.table.columns()
        has_slices = any(combined.table.partitions.slices)
        self._slice_numbers = list(combined.slice_numbers()) if has_slices else []
        has_frozen = bool(combined.table.frozen)
        return {"save_id": reports[0]["save_id"], "has_slices": has_slices, "has_frozen": has_frozen}

    def write_and_publish(self) -> None:
        """Write this rank's file; when all are there rank 0 publishes them."""
        rank = self.comm.rank

        def local() -> dict[str, Any]:
            assert self.temporary is not None
            fault.at("before_shard_open", self.step)
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
        """Copy what this rank writes and have its background process write and publish it.

        What fails here is in the report that this rank's process leaves for rank 0's.
        """
        assert self.temporary is not None
        plan: Layout | None = layout(
            save_id=self.save_id, run_id=self.run_id, step=self.step, rank=self.comm.rank, pieces=self.pieces
        )
        report: dict[str, Any] = {"frozen": None}
        try:
            fault.at("before_shard_open", self.step)
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
        """Wait for the background processes. Returns what rank 0's says, on every rank.

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
            if "problem" in outcome and folders.exists(self.directory):  # killed when it had published
                return {"good": [], "refused": [], "after": outcome["problem"]}
            failure = failure_of([outcome]) if "problem" in outcome else outcome if "failed" in outcome else None
            if failure is not None:
                raise _ToldError(_KINDS[failure["kind"]], failure["failed"])
            return outcome

        try:
            return self._exchange(local, decide)
        except BaseException:
            background.close()  # rank 0's may be waiting for a report that will not come
            raise

    def _manifest(self) -> dict[str, Any]:
        """On rank 0: the manifest but for the files."""
        return {
            "save_id": self.save_id,
            "run_id": self.run_id,
            "step": self.step,
            "world_size": self.comm.size,
            "data": self.data,
            **self.columns,
        }

    def _write_frozen(self, folder: int) -> dict[str, Any]:
        """Link the file of frozen parameters that a checkpoint beside this one holds, or write it."""
        plan = frozen_layout(self.comm.rank, self.frozen_pieces)
        digest = hash_content(plan, self.frozen_pieces)
        name = frozen_name(digest, self.comm.rank)
        if not any(folders.link(path, folder, name, plan.file_bytes) for path in self._shared(name)):
            written = write_shard(folder, name, plan, self.frozen_pieces)
            if written != digest:
                raise CheckpointError(f"frozen parameters of rank {self.comm.rank} changed while they were saved")
        return {"name": name, "bytes": plan.file_bytes, "hash": digest}

    def _shared(self, ending: str) -> list[Path]:
        """Files of frozen parameters with this end of the name in the checkpoints beside this one, newest first."""
        beside = sorted(self.directory.parent.glob("*/frozen-*"), reverse=True)
        return [path for path in beside if path.name.endswith(ending) and _UNPUBLISHED.search(path.parent.name) is None]

    @contextlib.contextmanager
    def removing_on_failure(self) -> Iterator[None]:
        """Rank 0 removes the temporary folder when the save fails in a way that all ranks know of."""
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
        temporary.mkdir()  # an error where it exists
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
        """Run this rank's part, have rank 0 decide on what all report, and raise on all if anything failed on any.

        Returns:
            Rank 0's decision.

        Collective:
            A gather of small JSON to rank 0 and a broadcast from there.
        """
        interrupt: BaseException | None = None
        try:
            report: dict[str, Any] = {"result": local()}
        except Exception as error:  # noqa: BLE001 - whatever it was, the other ranks must learn of it and not wait
            report = problem_of(error)
        except BaseException as error:  # noqa: BLE001 - raised again below, when the others know
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
        """The message of rank 0 to all ranks: its decision, or what failed."""
        failure = failure_of(reports)
        if failure is not None:
            return failure
        try:
            return {"answer": decide([report["result"] for report in reports])}
        except _ToldError as told:
            return {"failed": told.text, "kind": told.kind.__name__}
        except Exception as error:  # noqa: BLE001 - as in _exchange
            return failure_of([problem_of(error)]) or {}

    def _subject(self) -> str:
        return f"step {self.step} was not saved to {self.directory}"


#: Folders of saves and deletions under way.
_UNPUBLISHED = re.compile(r"\.tmp-|^\.trash-")


#: What a save can raise on all ranks, by name.
_KINDS: dict[str, type[ShardwiseError]] = {
    kind.__name__: kind for kind in (CheckpointError, StorageError, NonFiniteError)
}


class _ToldError(Exception):
    """An error that rank 0 has found in the reports of all ranks: its class and text."""

    def __init__(self, kind: type[ShardwiseError], text: str) -> None:
        super().__init__()
        self.kind, self.text = kind, text


class _Interrupted(BaseException):
    """This rank was interrupted in its part; ``cause`` is raised once the others know."""

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
