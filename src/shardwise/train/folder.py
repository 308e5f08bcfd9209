"""The folder of a run: which one it is, its files, and how they are replaced. ``train.lock`` keeps it for one run.

Without ``--run-dir`` a run lives in ``runs/NAME``. If that holds a run already, a new one goes to ``runs/NAME-2``, then
``-3`` and so on, and ``--resume`` means the newest of them. A folder given by ``--run-dir`` is taken as it is: if it
holds a run, a new one is refused.
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
from shardwise.spec.run_files import CHECKPOINTS, CONFIG, LOGS, METRICS, RUN_ID
from shardwise.spec.text import printable, size

#: Words of ``--resume`` for the newest checkpoint, whichever it is.
NEWEST = ("latest", "latest-good")
#: Of a run's folder, in characters: its name is part of what checkpoints say of their run.
_LONGEST_NAME = 200
#: Bytes that are read of a file of one line.
_LONGEST_SMALL = 256
#: Network file systems may remember for so long that a file or folder was not there.
APPEARS_S = 40.0


def holds_run(directory: Path) -> bool:
    """Whether a run has begun in ``directory``. Logs and empty folders are those of a launcher about to begin one."""
    checkpoints = directory / CHECKPOINTS
    return (
        (directory / CONFIG).exists()
        or (directory / METRICS).exists()
        or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    )


def run_of(path: str) -> Path | None:
    """The run's folder that a path names, itself or by one of the run's checkpoints; ``None`` for any other path."""
    place = Path(path).expanduser()
    return next((run for run in (place, place.parent.parent) if place.is_dir() and holds_run(run)), None)


def is_stored(wanted: str | None, upload_to: str | None) -> bool:
    """Whether ``--resume WANTED`` means a checkpoint that is on a store, and need not be on this machine."""
    if wanted is None or upload_to is None or isinstance(place_of(wanted), Url):
        return wanted is not None and isinstance(place_of(wanted), Url)
    from shardwise.checkpoint.store import find_latest

    found = find_latest(upload_to)
    return found.path is not None or bool(found.rejected)


def stores_lost(directory: Path, upload_to: str | None) -> bool:
    """Whether a store holds the run of a folder that has been lost: the run's id begins with the folder's name."""
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
    """Refuse a disk on which not one checkpoint of ``num_bytes`` has room: the run would train and save nothing."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise StorageError(
            f"a checkpoint has at least {size(num_bytes)}, and the disk of {printable(directory)} has {size(free)}"
            " free.\n  Make room, or name a folder elsewhere (--run-dir). --set checkpoint.every=null --set"
            " checkpoint.final=false trains without saving."
        )


def choose(
    name: str,
    given: Path | None,
    *,
    is_resuming: bool = False,
    wanted: str | None = None,
    base: Path = Path("runs"),
    upload_to: str | None = None,
) -> Path:
    """The folder of a run; nothing is created.

    Args:
        name: Name of the run, which names the folder in ``base`` where none is given.
        given: The folder that ``--run-dir`` names.
        is_resuming: Whether a run is continued; otherwise a new one begins.
        wanted: The checkpoint to continue from, for messages.
        base: The folder that holds the runs' folders.
        upload_to: Where the run's checkpoints are copied to. A run that is resumed from there needs no folder here.
    """
    if given is not None:
        is_lost = wanted in NEWEST and (given / LOGS).is_dir()  # of a start that ended before the run had begun
        if is_resuming and not (holds_run(given) or is_lost or is_stored(wanted, upload_to)):
            raise CheckpointError(f"{printable(given)} holds no run to resume{_advice(wanted)}")
        if not is_resuming and holds_run(given):
            raise ConfigError(
                f"{printable(given)} holds a run already.\n  Continue it with --resume, or name another folder."
            )
        return given
    taken = _numbered(base, name)
    if is_resuming:
        found = newest(name, base)
        if found is None and is_stored(wanted, upload_to):
            return base / name
        if found is None:
            near = f" There are: {', '.join(sorted(_names(base)))}." if _names(base) else ""
            if wanted is not None and wanted not in NEWEST:
                own = run_of(wanted)
                near = f" {wanted} is {'no run and no checkpoint of one' if own is None else f'of the run in {own}'}."
            raise CheckpointError(
                f"no run {name!r} to resume in {printable(base)}.{printable(near)}\n  Name its folder with --run-dir."
            )
        return found
    return base / name if not taken else base / f"{name}-{max(taken) + 1}"


def newest(name: str, base: Path = Path("runs")) -> Path | None:
    """The newest folder with a run of this name, where none was given; ``None`` where there is none."""
    taken = _numbered(base, name)
    return taken[max(taken)] if taken else None


def _advice(wanted: str | None) -> str:
    own = None if wanted is None else run_of(wanted)
    if own is None:
        held = Path(wanted).expanduser().glob("*") if wanted and wanted not in NEWEST else ()
        return f".\n  {deepspeed_advice(each.name for each in held) or 'Start it without --resume.'}"
    return (
        f": {printable(str(wanted))} is of the run in {printable(own)}, and a run continues in its own folder.\n"
        "  Name that one with --run-dir, or copy the whole folder and name the copy."
    )


def create(directory: Path) -> None:
    """Make the folder and those inside it, and see that they can be written."""
    if not directory.name.isprintable() or len(directory.name) > _LONGEST_NAME:
        raise ConfigError(
            f"{printable(directory.name)} is no name for a run's folder: expected at most {_LONGEST_NAME} characters"
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
    """The first 256 bytes of a small file, stripped; a RefusedError where it is no plain file with one link."""
    with open_folder(directory) as folder, open_for_reading(folder, name) as (file, status):
        raw = bytearray(min(status.st_size, _LONGEST_SMALL))
        read_at(file, memoryview(raw), 0)
    return raw.decode(errors="replace").strip()


def read_run_id(directory: Path) -> str | None:
    """The id of the run in ``directory``, as in its checkpoints; ``None`` if it has not begun."""
    if not os.path.lexists(directory / RUN_ID):
        return None
    try:
        return read_small(directory, RUN_ID)
    except (OSError, RefusedError) as error:
        raise CheckpointError(
            f"{printable(directory / RUN_ID)} cannot be read ({error}): it says which checkpoints are this run's.\n"
            "  Remove it to take any that are in the folder."
        ) from None


def leave_probe(directory: Path) -> str:
    """Make an empty file of a new name in ``directory``; its name."""
    name = f".shared-{secrets.token_hex(8)}"
    (directory / name).touch()
    return name


def finds(directory: Path, name: str) -> bool:
    """Whether ``directory`` has the file, on this machine too; waits while the file system may not know of it yet."""
    end = time.monotonic() + APPEARS_S
    while not (directory / name).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old content or the new, never a part."""
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
    """Runs of this name by number; the first has no number in its name."""
    found: dict[int, Path] = {}
    for held in _names(base):
        match = re.fullmatch(re.escape(name) + r"(?:-([2-9]|[1-9][0-9]{1,8}))?", held)
        if match is not None:
            found[int(match.group(1) or 1)] = base / held
    return found
