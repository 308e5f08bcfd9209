"""Copies a published checkpoint to another place, an object store or a folder, and commits it there.

Files are checked against their hashes before they are copied, so that a damaged checkpoint is not published again.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.manifest import FileEntry, Manifest, decode, read_manifest
from shardwise.checkpoint.publish import remove_unfinished
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.storage import MANIFEST_NAME, Url, local_file, place_of, step_of, storage_of, temporary_of
from shardwise.checkpoint.store import find_latest, retain
from shardwise.launch import inject
from shardwise.spec.errors import CheckpointError, StorageError


def upload(job: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a checkpoint of a run to a store, and remove checkpoints older than the kept ones there.

    Args:
        job: ``upload``, the checkpoint; ``to``, the folder of checkpoints on the store; ``keep``; and ``run_id``.

    Returns:
        ``removed``: names of unfinished saves that were removed; ``refused``: names that were not removed, with
        reasons; ``is_gone``: set if the checkpoint was removed before it was opened.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # all files are open at the same time
    source, place = Path(job["upload"]), place_of(job["to"])
    inject.at("store_begin", step_of(source.name))
    is_copied = copy_checkpoint(source, place / source.name)
    if not is_copied:
        return {"removed": [], "refused": []} | ({"is_gone": True} if is_copied is None else {})
    try:
        unfinished = find_latest(place).unfinished
        # Their files were checked against the hashes before they were written, so they are not read back.
        known = [place / name for name in storage_of(place).list(place)]
        kept = retain(place, job["keep"], known_good=known, run_id=job["run_id"])
    except StorageError as error:  # the copy is committed; the next upload removes older ones
        return {"removed": [], "refused": [("what is older", str(error))]}
    inject.at("store_end", step_of(source.name))
    refused = {path.name: reason for path, reason in kept.refused}
    return {"removed": [path.name for path in unfinished if path.name not in refused], "refused": [*refused.items()]}


def copy_checkpoint(source: Path, target: Path) -> bool | None:
    """Copy a checkpoint unless it is there already. Return whether it was copied; ``None`` if ``source`` is gone.

    Files that are there already are not copied again, and files that do not belong to it are removed first. All files
    are opened first, so that they can be read to the end even if ``source`` is removed meanwhile.
    """
    is_opened = False
    try:
        raw = read_manifest(source)
        manifest = decode(raw)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(folders.open_folder(source, follow=False))
            opened = [folders.open_for_reading(folder, entry.name, allows_links=True) for entry in manifest.all_files]
            files = [stack.enter_context(each)[0] for each in opened]
            is_opened = True
            return _copy_files(manifest, files, target, raw)
    except StorageError:
        raise
    except (OSError, RefusedError) as error:
        if not is_opened and not source.exists():
            return None
        if isinstance(error, OSError):
            raise StorageError(f"{target} was not written: {error.strerror or error}.") from error
        raise CheckpointError(f"{source} was not copied to {target}: {error}.") from None


def _copy_files(manifest: Manifest, files: Sequence[int], target: Path, raw: bytes) -> bool:
    storage, step = storage_of(target), step_of(target.name)
    stored, wanted = storage.list(target), {entry.name: entry.bytes for entry in manifest.all_files}
    if stored == {**wanted, MANIFEST_NAME: len(raw)}:
        return False
    if not stored.keys() <= wanted.keys():
        theirs = manifest.run_id
        with contextlib.suppress(CheckpointError):  # a damaged or uncommitted checkpoint is replaced
            theirs = open_checkpoint(target).manifest.run_id
        if theirs != manifest.run_id:
            raise CheckpointError(
                f"{target} is a checkpoint of the run {theirs!r}, and this is {manifest.run_id!r}: it is left as it is."
                "\n  Two runs have one checkpoint.upload_to. Name another place for one of them."
            )
        storage.remove(target)
        stored = {}
    if not isinstance(target, Url):
        remove_unfinished(temporary_of(target, manifest.save_id))

    def write(entry: FileEntry, file: int) -> None:
        found = local_file(file).hash()
        if found != entry.hash:
            raise RefusedError(f"the content of {entry.name} has the hash {found}, expected {entry.hash}")
        if stored.get(entry.name) != entry.bytes:
            inject.at("store_before_file", step)
            storage.write(target, manifest.save_id, entry.name, file)
            inject.at("store_after_file", step)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, manifest.all_files, files))
    if isinstance(target, Url) and storage.list(target) != wanted:
        raise StorageError(f"{target} does not hold what was written there: another run uses it, or the store lost it.")
    inject.at("store_before_manifest", step)
    storage.publish(target, manifest.save_id, raw)
    inject.at("store_after_manifest", step)
    return True
