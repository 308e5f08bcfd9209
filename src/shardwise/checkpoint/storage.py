"""Storage of checkpoints: folders of a file system, or an object store, with the same five methods.

A checkpoint in a folder is written next to its final place and committed by a rename. An object store cannot rename:
files are written in place, under names that no other save uses, and the manifest, which is written last, commits them.
A folder without a manifest on an object store is therefore an unfinished save.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import xxhash

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import RefusedError
from shardwise.launch import inject
from shardwise.spec.errors import CheckpointError, ConfigError, StorageError
from shardwise.spec.text import printable

MANIFEST_NAME = "manifest.json"
#: On an object store: the manifest's name in a checkpoint whose steps are made again.
SUPERSEDED_NAME = "superseded-manifest.json"

#: Object stores by scheme, with the package that fsspec needs for it.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "memory": "fsspec"}
#: ``pathlib`` merges the two slashes of a URL into one.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//|/[^/])")
#: Bytes of an object that are fetched at a time.
_BLOCK_BYTES = 16 * 2**20
#: Bytes of a file that are read and hashed at a time; they fit into the cache of a core.
_HASHED_BYTES = 2**20
#: Environment variables whose values are never shown.
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)

#: The user in a URL (for Azure it is a container), and signatures in its options.
_USER = re.compile(r"(:/+)(?:(?!arn:)[^/\n:@]+:(?!\d+/)[^\n]*|(?<!\babfs://)(?<!\baz://)[^/\n]*)@")
_SIGNED = re.compile(
    r"([?&](?:sig|[^=&/\s]*(?:signature|token|credential|secret|password|key)[^=&/\s]*)=)[^&\s'\"]+", re.IGNORECASE
)

_STEP = re.compile(r"step-([0-9]{8,18})")
_FROZEN_FILE = re.compile(r"frozen-[0-9a-f]{16}-r[0-9]{5,9}\.safetensors")
_OTHER_FILE = re.compile(r"shard-[0-9a-f]{16}-r[0-9]{5,9}\.safetensors|report-r[0-9]{5,9}\.json(\.part)?")


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; ``None`` for another name."""
    match = _STEP.fullmatch(name)
    if match is None or name != f"step-{int(match[1]):08d}":
        return None
    return int(match[1])


def deepspeed_advice(names: Iterable[str]) -> str:
    """Return advice for a folder with these names if it is a checkpoint of DeepSpeed; else an empty string."""
    if not any(name == "zero_to_fp32.py" or name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names):
        return ""
    return (
        "It is a checkpoint of DeepSpeed. Run `python zero_to_fp32.py . OUT --safe_serialization` in the folder that"
        " holds this script, and load the weights in OUT into the model before sw.parallelize."
    )


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file of this name can be part of a checkpoint."""
    is_manifest = name in {MANIFEST_NAME, SUPERSEDED_NAME}
    return is_manifest or any(kind.fullmatch(name) for kind in (_FROZEN_FILE, _OTHER_FILE))


class Url(PosixPath):
    """A place on an object store, ``s3://bucket/runs/demo``, with the interface of a path."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def absolute(self) -> Url:
        """Return the place itself."""
        return self


def redacted(text: str) -> str:
    """Return ``text`` without the secrets in URLs."""
    return _SIGNED.sub(r"\1***", _USER.sub(r"\1", text))


def without_secrets(value: Any, *, takes_options: bool = True) -> Any:
    """Return ``value``; raise a ConfigError if it is a URL with credentials, or of a store with options."""
    text = redacted(value) if isinstance(value, str) else value
    if text != value or (not takes_options and re.search(r"^[^/]+/+[^/]*@|[?#]", value)):
        raise ConfigError(
            f"{printable(re.sub('[?#].*', '', text))} was given with credentials or options, which would be in the"
            " run's files.\n  Leave them out: they are read from the environment, such as AWS_ACCESS_KEY_ID or"
            " AWS_PROFILE."
        )
    return value


def place_of(path: str | os.PathLike[str]) -> Path:
    """Return the place that ``path`` names: a URL of an object store, or a path of the file system."""
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        return Path(text)
    without_secrets(text, takes_options=False)
    if match[1] not in _PACKAGES:
        known = ", ".join(f"{scheme}://" for scheme in _PACKAGES)
        raise ConfigError(f"{printable(text)} is not a URL of an object store.\n  Use {known} or a path.")
    return Url(text)


@dataclass(frozen=True)
class StoredFile:
    """An open file. ``read_at`` fills a buffer from an offset on, or raises a RefusedError."""

    num_bytes: int
    state: tuple[object, ...]  # changes when the file changes
    read_at: Callable[[memoryview, int], None]

    def hash(self) -> str:
        """Return the hash of the content: XXH3 of 128 bits, as fast as memory (ADR 23)."""
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_HASHED_BYTES, self.num_bytes)))
        for offset in range(0, self.num_bytes, _HASHED_BYTES):
            part = buffer[: min(_HASHED_BYTES, self.num_bytes - offset)]
            self.read_at(part, offset)
            digest.update(part)
        return digest.hexdigest()


def temporary_of(directory: Path, save_id: str) -> Path:
    """Return the folder in which the save ``save_id`` of a checkpoint's folder is written."""
    return directory.with_name(f"{directory.name}.tmp-{save_id}")


def refuse_existing(directory: Path) -> None:
    """Raise a CheckpointError if the checkpoint's folder exists."""
    if folders.exists(directory):
        raise CheckpointError(f"{directory} exists, and a checkpoint never goes into a folder that exists")


def local_file(file: int) -> StoredFile:
    """Return an open local file, given its descriptor."""
    status = os.fstat(file)
    state = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    return StoredFile(status.st_size, state, functools.partial(folders.read_at, file))


class Storage:
    """Checkpoints in folders, opened relative to descriptors and never through links. Base class of other storages."""

    def list(self, folder: Any) -> dict[str, int | str]:
        """Return the names in a folder, each with its size or why it is not a plain file; empty if it is missing."""
        found: dict[str, int | str] = {}
        with contextlib.suppress(OSError), folders.open_folder(folder) as opened:
            for name in folders.names(opened):
                try:
                    is_shared = _FROZEN_FILE.fullmatch(name) is not None
                    found[name] = folders.status_of(opened, name, allows_links=is_shared).st_size
                except RefusedError as error:
                    found[name] = str(error)
        return found

    @contextlib.contextmanager
    def open(self, folder: Any, name: str, *, allows_links: bool = False) -> Iterator[StoredFile]:
        """Open a file; raise a RefusedError if it is missing or not a plain file."""
        with (
            folders.open_folder(folder) as opened,
            folders.open_for_reading(opened, name, allows_links=allows_links) as (file, _),
        ):
            yield local_file(file)

    def write(self, directory: Any, save_id: str, name: str, source: int) -> None:
        """Copy an open local file to a file of the save ``save_id``, which will be published at ``directory``."""
        temporary = temporary_of(directory, save_id)
        temporary.mkdir(parents=True, exist_ok=True)
        with folders.open_folder(temporary, follow=False) as folder:
            folders.copy_file(source, folder, name)

    def publish(self, directory: Any, save_id: str, manifest: bytes) -> None:
        """Commit the save ``save_id`` at ``directory``; all of its files must be written."""
        temporary, step = temporary_of(directory, save_id), step_of(directory.name)
        with folders.open_folder(temporary, follow=False) as folder:
            inject.at("before_manifest", step)
            folders.write_file(folder, MANIFEST_NAME, manifest)
            os.fsync(folder)
            inject.at("after_manifest", step)
        refuse_existing(directory)
        inject.at("before_rename", step)
        temporary.rename(directory)
        inject.at("after_rename", step)
        try:
            folders.sync_folder(directory.parent)
        except OSError:
            directory.rename(temporary)  # not published, because a power cut could lose the rename
            raise

    def remove(self, directory: Any, *, is_kept: bool = False) -> None:
        """Remove a checkpoint so that no part of it is ever taken for a checkpoint; refuse folders with other files.

        With ``is_kept`` its files stay, but it is no longer found as a checkpoint.
        """
        step, name = step_of(directory.name), directory.name
        if is_kept:
            directory.rename(directory.with_name(f"superseded-{name}-{secrets.token_hex(4)}"))
            return
        with folders.open_folder(directory.parent, follow=False) as parent:
            folders.check_removable(parent, name, is_checkpoint_file)
            inject.at("gc_before_delete", step)
            if not name.startswith(".trash-"):
                name = f".trash-{name}-{secrets.token_hex(8)}"
                os.rename(directory.name, name, src_dir_fd=parent, dst_dir_fd=parent)
                os.fsync(parent)
            inject.at("gc_mid_delete", step)
            folders.remove_folder(parent, name, is_checkpoint_file)
            os.fsync(parent)


FOLDERS = Storage()


class _Objects(Storage):
    """An object store, accessed through a file system of fsspec."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def list(self, folder: Url) -> dict[str, int | str]:
        found: dict[str, int | str] = {}
        with _as_storage_error(folder, "listed"), contextlib.suppress(FileNotFoundError):
            for entry in self._files.ls(str(folder), detail=True):
                parent, _, name = f"/{entry['name'].strip('/')}".rpartition("/")
                if str(folder).endswith(f"/{parent}"):  # skip the marker object of the folder
                    found[name] = entry["size"] if entry["type"] == "file" else "it is a folder"
        return dict(sorted(found.items()))

    @contextlib.contextmanager
    def open(self, folder: Url, name: str, *, allows_links: bool = False) -> Iterator[StoredFile]:
        del allows_links  # object stores have none
        place = str(folder / name)
        with contextlib.ExitStack() as stack:
            with _as_storage_error(place, "opened"):
                try:
                    handle = stack.enter_context(self._files.open(place, "rb", block_size=_BLOCK_BYTES))
                except FileNotFoundError:
                    raise RefusedError("the file is missing") from None

            def read_at(target: memoryview, offset: int) -> None:
                with _as_storage_error(place, "read"):
                    handle.seek(offset)
                    if handle.readinto(target) != target.nbytes:
                        raise RefusedError("the file ends before its content does")

            yield StoredFile(handle.size, (str(getattr(handle, "details", id(handle))),), read_at)

    def write(self, directory: Url, save_id: str, name: str, source: int) -> None:
        del save_id  # already part of the name
        with _as_storage_error(directory / name, "written"):
            self._files.put_file(f"/proc/self/fd/{source}", str(directory / name))

    def publish(self, directory: Url, save_id: str, manifest: bytes) -> None:
        del save_id
        with _as_storage_error(directory / MANIFEST_NAME, "written"):
            self._files.pipe_file(str(directory / MANIFEST_NAME), manifest)

    def remove(self, directory: Url, *, is_kept: bool = False) -> None:
        names, step = list(self.list(directory)), step_of(directory.name)
        odd = next((name for name in names if not is_checkpoint_file(name)), None)
        if odd is not None:
            raise RefusedError(f"it holds {odd!r}, which is not part of a checkpoint")
        with _as_storage_error(directory, "removed"):
            if is_kept:
                self._files.cp_file(str(directory / MANIFEST_NAME), str(directory / SUPERSEDED_NAME))
                names = [MANIFEST_NAME]
            inject.at("store_before_delete", step)
            for name in sorted(names, key=lambda name: name not in {MANIFEST_NAME, SUPERSEDED_NAME}):
                self._files.rm_file(str(directory / name))
                inject.at("store_mid_delete", step)


def storage_of(place: Path) -> Storage:
    """Return the storage of a place; raise a ConfigError if the package for this store is not installed."""
    return _objects(str(place).partition(":")[0]) if isinstance(place, Url) else FOLDERS


@functools.cache
def _objects(scheme: str) -> Storage:
    package = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        advice = "shardwise[s3]" if package == "s3fs" else package
        raise ConfigError(f"{scheme}:// needs {package}, which is not installed.\n  Install {advice}.")
    # Listings are not cached, because another process uploads and removes files.
    return _Objects(importlib.import_module("fsspec").filesystem(scheme, use_listings_cache=False))


@contextlib.contextmanager
def _as_storage_error(place: Url | str, what: str) -> Iterator[None]:
    """Turn any error of fsspec in this block into a StorageError without credentials."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:  # noqa: BLE001 - each package has its own errors
        text = " ".join(str(error).split())
        for name, value in os.environ.items():
            if len(value) >= 8 and _SECRET.search(name):
                text = text.replace(value, "***")
        raise StorageError(
            f"{printable(str(place))} cannot be {what}: {type(error).__name__}: {printable(text[:400])}.\n"
            "  See that the store can be reached from this machine, and that the environment has credentials that may"
            " list, read, write and delete there (AWS_ENDPOINT_URL, AWS_PROFILE, AWS_ACCESS_KEY_ID, ...)."
        ) from None
