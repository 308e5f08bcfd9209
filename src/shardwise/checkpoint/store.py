"""The checkpoints of one run: finding the newest good one, and removing old ones.

::

    <run>/LATEST                            "checkpoints/step-00000200": a hint for people, always checked before use
    <run>/checkpoints/step-00000100/        published
    <run>/checkpoints/step-00000200/
    <run>/checkpoints/step-00000300.tmp-…/  a save that is running, or was interrupted
    <run>/checkpoints/.trash-…/             a deletion that is running, or was interrupted
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.manifest import decode, read_manifest
from shardwise.checkpoint.reader import Checkpoint, open_checkpoint
from shardwise.checkpoint.storage import MANIFEST_NAME, SUPERSEDED_NAME, Url, place_of, step_of, storage_of
from shardwise.launch import inject
from shardwise.launch.file import replace
from shardwise.spec.errors import CheckpointError, StorageError
from shardwise.spec.run_files import CHECKPOINTS

LATEST = "LATEST"

#: Minimum number of good checkpoints that are kept.
LEAST_KEPT = 2

_TEMPORARY = re.compile(r"step-[0-9]{8,18}\.tmp-[0-9a-f]{16}")
_SUPERSEDED = re.compile(r"superseded-step-([0-9]{8,18})-[0-9a-f]{8}")
_TRASH = re.compile(
    r"\.trash-(step-[0-9]{8,18}(\.tmp-[0-9a-f]{16})?|superseded-step-[0-9]{8,18}-[0-9a-f]{8})-[0-9a-f]{16}"
)


def step_directory(root: str | os.PathLike[str], step: int) -> Path:
    """Return the folder of the checkpoint of ``step`` in the run at ``root``."""
    return place_of(root) / CHECKPOINTS / f"step-{step:08d}"


def checkpoints_of(root: str | os.PathLike[str]) -> Path:
    """Return the folder with the checkpoints of ``root``: a run's ``checkpoints`` if it exists, else ``root``."""
    root = place_of(root)
    folder = root / CHECKPOINTS
    return folder if (folder.is_dir() if not isinstance(folder, Url) else storage_of(folder).list(folder)) else root


def newest_checkpoint(path: str | os.PathLike[str], *, allow_older: bool = False) -> Path | None:
    """Return the newest checkpoint of a run, for ``sw.load``. Each rank may call it; it does not communicate.

    Args:
        path: A run's folder, or any folder with checkpoints named ``step-00000100``; or such a place on an object
            store, ``s3://bucket/runs/demo``.
        allow_older: If the newest checkpoint is damaged, return an older one. Only manifests and sizes are checked
            here; ``sw.load`` checks hashes.

    Returns:
        The checkpoint's folder; ``None`` if ``path`` has no checkpoint.

    Raises:
        CheckpointError: No checkpoint is good, or the newest is not and ``allow_older`` is false.
        StorageError: The object store cannot be reached.
    """
    found = find_latest(path)
    return found.require(allow_older=allow_older) if found.path is not None or found.rejected else None


def publish_latest(root: str | os.PathLike[str], step_dir: str | os.PathLike[str]) -> None:
    """Point ``LATEST`` to a published checkpoint, atomically. Only one rank may call this."""
    root, target = Path(root), Path(step_dir)
    if step_of(target.name) is None or target.absolute().parent != (root / CHECKPOINTS).absolute():
        raise CheckpointError(f"{target} is not one of the checkpoints of {root}.")
    open_checkpoint(target)
    inject.at("before_latest", step_of(target.name))
    try:
        replace(root / LATEST, f"{CHECKPOINTS}/{target.name}\n", is_durable=True)
        folders.sync_folder(root)
        inject.at("after_latest", step_of(target.name))
    except OSError as error:
        raise StorageError(f"{root / LATEST} was not replaced: {error.strerror}.") from error


@dataclass(frozen=True)
class Latest:
    """The result of :func:`find_latest`."""

    root: Path
    path: Path | None  # the newest good checkpoint, or ``None``
    step: int | None  # its step
    run_id: str | None  # the id of its run
    #: Newer checkpoints that are not good, each with the reason; without a good one, all checkpoints.
    rejected: tuple[tuple[Path, str], ...]
    unfinished: tuple[Path, ...]  # folders of saves that were interrupted or are running

    def require(self, *, allow_older: bool = False) -> Path:
        """Return ``path``, or raise an error that says why there is none.

        Args:
            allow_older: If the newest checkpoint is damaged, return an older one.
        """
        reasons = "".join(f"\n  - {path.name}: {reason}" for path, reason in self.rejected)
        if self.path is not None and (allow_older or not self.rejected):
            return self.path
        if self.path is not None:
            raise CheckpointError(
                f"the newest checkpoint of {self.root} cannot be used:{reasons}\n"
                f"  The newest good one is {self.path.name}; it is used only when you say so: name its folder"
                " (`shardwise train`: --resume latest-good; in Python: allow_older=True)."
            )
        if self.rejected:
            raise CheckpointError(
                f"none of the checkpoints of {self.root} can be used:{reasons}\n"
                "  A run does not start from the beginning by itself."
            )
        left = f" {len(self.unfinished)} unfinished saves were left there." if self.unfinished else ""
        raise CheckpointError(
            f"there is no checkpoint in {self.root / CHECKPOINTS}.{left}\n  Name another run, or a step-* folder."
        )


def find_latest(root: str | os.PathLike[str], *, verify: bool = False, run_id: str | None = None) -> Latest:
    """Find the newest good checkpoint of a run by checking the checkpoints themselves.

    Args:
        root: The run's folder, or the folder with the checkpoints.
        verify: Also check the hashes of all files; otherwise manifests and sizes are checked.
        run_id: Skip checkpoints of other runs; by default checkpoints of any run are good.

    Returns:
        The result. Problems of checkpoints are raised only by :meth:`Latest.require`.

    Raises:
        StorageError: The object store cannot be reached.
    """
    root = place_of(root)
    listing = _list(root)
    rejected = []
    found: Checkpoint | None = None
    for path in reversed(listing.steps):
        found, reason = _judge(path, verify=verify)
        if found is not None and run_id is not None and found.manifest.run_id != run_id:
            found, reason = (
                None,
                f"it is of the run {found.manifest.run_id!r}, and this is {run_id!r} (its path takes it)",
            )
        if found is not None:
            break
        rejected.append((path, reason))
    return Latest(
        root=root,
        path=None if found is None else found.path,
        step=None if found is None else found.step,
        run_id=None if found is None else found.manifest.run_id,
        rejected=tuple(rejected),
        unfinished=tuple(listing.unfinished),
    )


@dataclass(frozen=True)
class Retained:
    """The result of :func:`retain`."""

    #: Checkpoints that are verified and kept, newest first. Pass them to the next call as ``known_good``.
    good: tuple[Path, ...]
    #: Folders that could not be removed, and checkpoints that are not good, each with the reason.
    refused: tuple[tuple[Path, str], ...]


def retain(
    root: str | os.PathLike[str], keep: int, *, known_good: Collection[Path] = (), run_id: str | None = None
) -> Retained:
    """Remove checkpoints older than the newest ``keep`` good ones, and remains of interrupted saves and deletions.

    Checkpoints that a resume has set aside (``superseded-step-...``) are removed once their steps have been made again.

    Good means verified, including hashes, and of this run. At least two good checkpoints are always kept: while there
    are fewer, nothing is removed. Damaged checkpoints are never removed, only reported.

    Only one rank may call this, when no save is running and no other run uses the folder.

    Args:
        root: The run's folder, or the folder with the checkpoints.
        keep: Number of checkpoints to keep; 1 counts as 2.
        known_good: Checkpoints that were already verified after they were written, so that they are not read again:
            those of ``Retained.good``, and one just verified by all ranks together.
        run_id: Remove only checkpoints of this run; by default of the run of the newest good one.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep} would leave no checkpoint.\n  Set it to at least 1.")
    listing = _list(place_of(root))
    good: list[Path] = []
    refused: list[tuple[Path, str]] = []
    to_remove: list[Path] = []
    known = {path.absolute() for path in known_good}
    for path in reversed(listing.steps):
        has_enough = len(good) >= max(keep, LEAST_KEPT)
        found, reason = _judge(path, verify=not has_enough and path.absolute() not in known)
        if found is None:
            refused.append((path, reason))
        elif run_id not in {None, found.manifest.run_id}:
            refused += [(path, f"it belongs to the run {found.manifest.run_id!r}")] if has_enough else []
        elif has_enough:
            to_remove.append(path)
        else:
            good.append(path)
            run_id = found.manifest.run_id
    to_remove.reverse()
    to_remove += _superseded_again(listing, step_of(good[0].name) if good else None, run_id)
    for path in (*to_remove, *listing.unfinished, *listing.trash):
        reason = _remove(path)
        refused += [(path, reason)] if reason else []
    return Retained(good=tuple(good), refused=tuple(refused))


def _superseded_again(listing: _Listing, newest: int | None, run_id: str | None) -> list[Path]:
    """Return checkpoints up to step ``newest`` that a resume of this run had set aside, and has made again since."""
    found_again = []
    for step, path in listing.superseded:
        found, _ = _judge(path, verify=False, step=step) if newest is not None and step <= newest else (None, "")
        if found is not None and found.manifest.run_id == run_id:
            found_again.append(path)
    return found_again


def _remove(path: Path) -> str | None:
    """Remove a checkpoint, or return why it cannot be removed."""
    try:
        storage_of(path).remove(path)
    except RefusedError as error:
        return str(error)
    except OSError as error:
        return str(error.strerror or error)
    return None


@dataclass
class _Listing:
    steps: list[Path] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)
    superseded: list[tuple[int, Path]] = field(default_factory=list)
    trash: list[Path] = field(default_factory=list)


def _list(root: Path) -> _Listing:
    listing = _Listing()
    folder, storage = checkpoints_of(root), storage_of(root)
    for name in storage.list(folder):
        path = folder / name
        if step_of(name) is not None:
            names = set(storage.list(path)) if isinstance(path, Url) else {MANIFEST_NAME}
            if MANIFEST_NAME in names:
                listing.steps.append(path)
            elif SUPERSEDED_NAME in names:
                listing.superseded.append((step_of(name) or 0, path))
            elif names:
                listing.unfinished.append(path)
        elif _TEMPORARY.fullmatch(name):
            listing.unfinished.append(path)
        elif match := _SUPERSEDED.fullmatch(name):
            listing.superseded.append((int(match[1]), path))
        elif _TRASH.fullmatch(name):
            listing.trash.append(path)
    listing.steps.sort(key=lambda path: step_of(path.name) or 0)
    return listing


def _judge(path: Path, *, verify: bool, step: int | None = None) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint if it is good, else the reason in one line. With ``step`` it is one that was set aside."""
    try:
        if not isinstance(path, Url) and path.is_symlink():
            return None, "it is a symbolic link"
        if step is not None and isinstance(path, Url):
            found = Checkpoint(path, decode(read_manifest(path, SUPERSEDED_NAME)), {})
        else:
            found = open_checkpoint(path)
        if found.step != (step_of(path.name) if step is None else step):
            return None, f"its manifest is that of step {found.step}"
        if verify:
            found.verify()
        else:
            found.check_files()
    except (CheckpointError, RefusedError) as error:
        lines = [line.strip(" -") for line in str(error).splitlines()]
        return None, lines[0] if len(lines) < 3 else "; ".join(lines[1:-1])
    return found, ""
