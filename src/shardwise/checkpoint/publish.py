"""The end of a save, on rank 0: the manifest, the rename that commits, and the removal of older checkpoints.

This code runs in rank 0 itself, or in its writing process during training.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.manifest import encode, file_columns
from shardwise.checkpoint.outcome import failure_of, problem_of, report_name
from shardwise.checkpoint.storage import is_checkpoint_file, storage_of
from shardwise.checkpoint.store import publish_latest, retain
from shardwise.spec.errors import CheckpointError, StorageError
from shardwise.spec.run_files import CHECKPOINTS


def commit(directory: Path, manifest: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> None:
    """Write the manifest after the files of all ranks, and commit the save.

    ``manifest`` has all fields except the files; ``reports`` have the file entries ``own`` and ``frozen`` of each rank.

    Raises:
        OSError, CheckpointError, RefusedError, ValueError: The checkpoint was not published.
    """
    has_frozen = reports[0]["frozen"] is not None
    raw = encode(
        {
            **manifest,
            "files": file_columns([report["own"] for report in reports]),
            "frozen": file_columns([report["frozen"] for report in reports]) if has_frozen else None,
        }
    )
    storage_of(directory).publish(directory, manifest["save_id"], raw)


def update_latest(
    directory: Path, *, keep: int, run_id: str, known_good: Sequence[str | Path]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Point ``LATEST`` to a published and verified checkpoint, and remove older ones.

    ``LATEST`` is only written for a run's ``checkpoints`` folder. ``known_good`` were verified before.

    Returns:
        The kept checkpoints that are known to be good, and names of folders that were not removed, with reasons.

    Raises:
        CheckpointError, StorageError: A part of this failed.
    """
    root = directory.parent
    if root.name == CHECKPOINTS:
        root = root.parent
        publish_latest(root, directory)
    known = [directory, *(Path(path) for path in known_good)]
    kept = retain(root, keep, known_good=known, run_id=run_id)
    return [str(path) for path in kept.good], [(path.name, reason) for path, reason in kept.refused]


def remove_unfinished(temporary: Path) -> None:
    """Remove the folder of a failed save, as far as possible."""
    with contextlib.suppress(OSError, RefusedError), folders.open_folder(temporary.parent) as parent:
        folders.remove_folder(parent, temporary.name, is_checkpoint_file)


def publish(job: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Publish the checkpoint or remove its folder, in rank 0's writing process after all ranks have reported.

    Returns:
        ``good`` and ``refused`` from :func:`update_latest`, empty if nothing is to be removed; or ``failed`` and
        ``kind``; or ``after`` if the checkpoint was published and only :func:`update_latest` failed.
    """
    temporary, directory = Path(job["temporary"]), Path(job["directory"])
    failure = failure_of(reports)
    if failure is None:
        try:
            with folders.open_folder(temporary, follow=False) as folder:
                for rank in range(1, len(reports)):
                    os.unlink(report_name(rank), dir_fd=folder)
            commit(directory, job["manifest"], reports)
        except Exception as error:  # noqa: BLE001 - the ranks must be notified of any error
            failure = failure_of([problem_of(error)])
    if failure is not None:
        remove_unfinished(temporary)
        return failure
    if job["keep"] is None:
        return {"good": [], "refused": []}
    try:
        good, refused = update_latest(
            directory, keep=job["keep"], run_id=job["manifest"]["run_id"], known_good=job["good"]
        )
    except (CheckpointError, StorageError) as error:
        return {"good": [], "refused": [], "after": str(error)}
    return {"good": good, "refused": refused}
