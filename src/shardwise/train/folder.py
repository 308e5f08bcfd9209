"""A run's folder: choosing it, its files, and replacing them atomically. ``train.lock`` reserves it for one run.

Without ``--run-dir`` the folder of a run is ``runs/NAME``. If a run exists there already, a new one goes to
``runs/NAME-2``, then ``-3`` and so on, and ``--resume`` means the newest of them. A folder given by ``--run-dir`` is
used as it is: a new run is refused there if it already contains a run.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.folder import RefusedError, open_folder, open_for_reading, read_at
from shardwise.checkpoint.storage import Url, deepspeed_advice, place_of
from shardwise.launch.file import replace
from shardwise.spec.errors import CheckpointError, ConfigError, StorageError
from shardwise.spec.run_files import BEST, CHECKPOINTS, CONFIG, LOGS, METRICS, RUN_ID
from shardwise.spec.text import printable, size

#: Values of ``--resume`` for the newest checkpoint.
NEWEST = ("latest", "latest-good")
#: Maximum length of a run folder's name, which is part of the run id in checkpoints.
_LONGEST_NAME = 200
#: Maximum bytes that are read from a file of one line.
_LONGEST_SMALL = 256
#: Seconds for which network file systems may cache that a file or folder does not exist.
APPEARS_S = 40.0


def holds_run(directory: Path) -> bool:
    """Return whether ``directory`` has a run. Logs and empty folders alone belong to a run that has not started."""
    checkpoints = directory / CHECKPOINTS
    return (
        (directory / CONFIG).exists()
        or (directory / METRICS).exists()
        or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    )


def run_of(path: str) -> Path | None:
    """Return the run's folder for the path of a run, its best/ or one of its checkpoints; ``None`` for another path."""
    base = Path(path).expanduser()
    run = next((each for each in (base, base.parent.parent) if base.is_dir() and holds_run(each)), None)
    return run.parent if run is not None and run.name == BEST and holds_run(run.parent) else run


def is_stored(resume: str | None, upload_to: str | None) -> bool:
    """Return whether ``--resume WANTED`` means a checkpoint on a store, which need not be on this machine."""
    if resume is None or upload_to is None or isinstance(place_of(resume), Url):
        return resume is not None and isinstance(place_of(resume), Url)
    from shardwise.checkpoint.store import find_latest

    found = find_latest(upload_to)
    return found.path is not None or bool(found.rejected)


def has_lost_run(directory: Path, upload_to: str | None) -> bool:
    """Return whether a store has the run of a lost folder: the run's id begins with the folder's name."""
    from shardwise.checkpoint.store import find_latest

    found = None if upload_to is None else find_latest(upload_to)
    if found is not None and found.run_id is not None and found.run_id.rpartition("-")[0] != directory.name:
        raise ConfigError(
            f"checkpoint.upload_to={found.root} holds checkpoints of the run {printable(found.run_id)}, not of"
            f" {printable(directory)}, which holds no run.\n  Continue that run in a folder of its name (the id without"
            " its last part), or name another place for this one."
        )
    return found is not None and (found.path is not None or bool(found.rejected))


def check_room(directory: Path, num_bytes: int) -> None:
    """Refuse a disk without room for one checkpoint of ``num_bytes``: the run could save nothing."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise StorageError(
            f"a checkpoint has at least {size(num_bytes)}, and the disk of {printable(directory)} has {size(free)}"
            " free.\n  Make room, or name a folder elsewhere (--run-dir). --set checkpoint.every=null --set"
            " checkpoint.final=false trains without saving."
        )


def choose(
    name: str,
    run_dir: Path | None,
    *,
    is_resuming: bool = False,
    resume: str | None = None,
    base: Path = Path("runs"),
    upload_to: str | None = None,
) -> Path:
    """Choose the folder of a run; nothing is created.

    Args:
        name: Name of the run, which is the folder's name in ``base`` if ``run_dir`` is ``None``.
        run_dir: The folder given by ``--run-dir``.
        is_resuming: Whether a run is continued; otherwise a new one starts.
        resume: The checkpoint to continue from.
        base: The folder that contains the runs' folders.
        upload_to: The place that checkpoints are copied to. A run resumed from there needs no local folder.
    """
    if run_dir is not None:
        is_lost = resume in NEWEST and (run_dir / LOGS).is_dir()  # from a launch that failed before the run started
        if is_resuming and not (holds_run(run_dir) or is_lost or is_stored(resume, upload_to)):
            raise CheckpointError(f"{printable(run_dir)} holds no run to resume{_advice(resume)}")
        if not is_resuming and holds_run(run_dir):
            raise ConfigError(
                f"{printable(run_dir)} holds a run already.\n  Continue it with --resume (sw.train: resume=True), or"
                " name another folder."
            )
        return run_dir
    numbered = _numbered(base, name)
    if is_resuming:
        found = newest_first(name, base)
        if not found and is_stored(resume, upload_to):
            return base / name
        if not found:
            near = f" There are: {', '.join(sorted(_names(base)))}." if _names(base) else ""
            if resume is not None and resume not in NEWEST:
                run = run_of(resume)
                near = f" {resume} is {'no run and no checkpoint of one' if run is None else f'of the run in {run}'}."
            raise CheckpointError(
                f"no run {name!r} to resume in {printable(base)}.{printable(near)}\n  Name its folder with --run-dir."
            )
        return found[0]
    return base / name if not numbered else base / f"{name}-{max(numbered) + 1}"


def newest_first(name: str, base: Path = Path("runs")) -> list[Path]:
    """Return the folders with a run of this name in ``base``, the newest first."""
    numbered = _numbered(base, name)
    return [numbered[number] for number in sorted(numbered, reverse=True)]


def _advice(resume: str | None) -> str:
    run = None if resume is None else run_of(resume)
    if run is None:
        paths = Path(resume).expanduser().glob("*") if resume and resume not in NEWEST else ()
        return f".\n  {deepspeed_advice(each.name for each in paths) or 'Start it without --resume.'}"
    return (
        f": {printable(str(resume))} is of the run in {printable(run)}, and a run continues in its own folder.\n"
        "  Name that one with --run-dir, or copy the whole folder and name the copy."
    )


def create(directory: Path) -> None:
    """Create the folder and its subfolders, and check that they are writable."""
    if not directory.name.isprintable() or len(directory.name) > _LONGEST_NAME:
        raise ConfigError(
            f"{printable(directory.name)} is not a name for a run's folder: expected at most {_LONGEST_NAME} characters"
            " that can be printed.\n  Name another one with --run-dir or in sw.Run."
        )
    try:
        for part in (directory, directory / LOGS, directory / CHECKPOINTS):
            part.mkdir(parents=True, exist_ok=True)
            probe = part / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise StorageError(
            f"{printable(error.filename or directory)} cannot be written: {error.strerror}.\n"
            "  Name a folder that can, with --run-dir or in sw.Run."
        ) from None


def read_small(directory: Path, name: str) -> str:
    """Return the first 256 bytes of a small file, stripped; raise a RefusedError for links and special files."""
    with open_folder(directory) as folder, open_for_reading(folder, name) as (file, status):
        raw = bytearray(min(status.st_size, _LONGEST_SMALL))
        read_at(file, memoryview(raw), 0)
    return raw.decode(errors="replace").strip()


def read_run_id(directory: Path) -> str | None:
    """Return the id of the run in ``directory``, as in its checkpoints; ``None`` if it has not started."""
    if not os.path.lexists(directory / RUN_ID):
        return None
    try:
        return read_small(directory, RUN_ID)
    except (OSError, RefusedError) as error:
        raise CheckpointError(
            f"{printable(directory / RUN_ID)} cannot be read ({error}): it says which checkpoints are this run's.\n"
            "  Remove it to take any that are in the folder."
        ) from None


def write_probe(directory: Path) -> str:
    """Create an empty file with a new name in ``directory``, and return its name."""
    name = f".shared-{secrets.token_hex(8)}"
    (directory / name).touch()
    return name


def wait_for_file(directory: Path, name: str) -> bool:
    """Return whether ``directory`` has the file; wait while a network file system may not show it yet."""
    end = time.monotonic() + APPEARS_S
    while not (directory / name).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically: readers see the old content or the new, never a part."""
    try:
        replace(path, text, is_durable=True)
    except OSError as error:
        raise StorageError(
            f"{printable(path)} cannot be written: {error.strerror}.\n  Free space on the disk."
        ) from None


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """:func:`replace_text` with ``value`` as indented JSON."""
    replace_text(path, json.dumps(value, indent=2) + "\n")


def _names(base: Path) -> list[str]:
    return [path.name for path in base.iterdir() if path.is_dir() and holds_run(path)] if base.is_dir() else []


def _numbered(base: Path, name: str) -> dict[int, Path]:
    """Return the runs of this name by number; the first one has no number in its name."""
    found: dict[int, Path] = {}
    for other in _names(base):
        match = re.fullmatch(re.escape(name) + r"(?:-([2-9]|[1-9][0-9]{1,8}))?", other)
        if match is not None:
            found[int(match.group(1) or 1)] = base / other
    return found
