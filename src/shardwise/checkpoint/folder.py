"""Access to a checkpoint's folder: files are opened by name relative to its descriptor, and links are never followed.

Callers have checked names from files against strict patterns. Anything except a regular file with one link is refused
before it is opened.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path


class RefusedError(Exception):
    """A file that may not be opened, or is missing. The text has no path; the caller adds the place."""


@contextlib.contextmanager
def open_folder(path: str | os.PathLike[str], *, follow: bool = True, parent: int | None = None) -> Iterator[int]:
    """Open the folder at ``path`` and yield its descriptor, which is closed at the end.

    Links in ``path``, which is relative to ``parent`` or the current folder, come from the caller and are followed.
    Without ``follow`` the last component must not be a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    folder = os.open(path, flags, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def open_for_reading(folder: int, name: str, *, allows_links: bool = False) -> Iterator[tuple[int, os.stat_result]]:
    """Open the regular file ``name`` of ``folder``.

    With ``allows_links`` the file may have several hard links, because checkpoints share it.

    Yields:
        Its descriptor and its status.
    """
    status_of(folder, name, allows_links=allows_links)
    try:
        # Non-blocking, so that opening does not wait for a writer if the file was replaced by a pipe meanwhile.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise RefusedError("the file is missing") from None
    except OSError as error:
        raise RefusedError(f"the file cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(file)
        _check_regular(status, allows_links=allows_links)
        yield file, status
    finally:
        os.close(file)


def status_of(folder: int, name: str, *, allows_links: bool) -> os.stat_result:
    """Return the status of the regular file ``name`` of ``folder`` without opening it."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        raise RefusedError("the file is missing") from None
    except OSError as error:
        raise RefusedError(f"the file cannot be opened: {error.strerror}") from None
    _check_regular(status, allows_links=allows_links)
    return status


def read_at(file: int, target: memoryview, offset: int) -> None:
    """Fill ``target`` with the content of ``file`` from ``offset`` on."""
    while target:
        try:
            count = os.preadv(file, [target], offset)
        except OSError as error:
            raise RefusedError(f"the file cannot be read: {error.strerror}") from None
        if count == 0:
            raise RefusedError(f"the file ends at byte {offset}, before its content does")
        target = target[count:]
        offset += count


def create(folder: int, name: str) -> int:
    """Create the file ``name``, which must not exist, and return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder)


def write_all(file: int, content: memoryview) -> None:
    """Write all of ``content``."""
    while content:
        content = content[os.write(file, content) :]


def copy_file(source: int, folder: int, name: str) -> None:
    """Copy the open file ``source`` to the new file ``name`` and sync it to the disk."""
    with os.fdopen(create(folder, name), "wb") as file:
        while os.sendfile(file.fileno(), source, None, 2**30):
            pass
        os.fsync(file.fileno())


def write_file(folder: int, name: str, content: bytes) -> None:
    """Write the new file ``name`` and sync it to the disk."""
    file = create(folder, name)
    try:
        write_all(file, memoryview(content))
        os.fsync(file)
    finally:
        os.close(file)


def link(source: Path, folder: int, name: str, num_bytes: int) -> bool:
    """Create a hard link ``name`` in an open folder to the regular file ``source``, if that has ``num_bytes`` bytes.

    Returns:
        Whether the link was created: the file may be missing, and some file systems have no hard links.
    """
    try:
        status = source.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
            return False
        os.link(source, name, dst_dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Sync a folder's entries (new names, renames) to the disk."""
    with open_folder(path) as folder:
        os.fsync(folder)


def remove_folder(parent: int, name: str, known: Callable[[str], bool]) -> None:
    """Remove the folder ``name`` of ``parent`` and the plain files in it.

    ``known`` returns whether a file name belongs to a checkpoint.

    Raises:
        RefusedError: It is a link, or contains something that is not part of a checkpoint. Nothing was removed.
        OSError: Removing failed.
    """
    check_removable(parent, name, known)
    with open_folder(name, follow=False, parent=parent) as folder:
        for entry in names(folder):
            os.unlink(entry, dir_fd=folder)
    os.rmdir(name, dir_fd=parent)


def check_removable(parent: int, name: str, known: Callable[[str], bool]) -> None:
    """Raise unless :func:`remove_folder` may remove the folder."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        raise RefusedError("it is not a folder of its own but a link or a file")
    with open_folder(name, follow=False, parent=parent) as folder:
        for entry in names(folder):
            status = os.stat(entry, dir_fd=folder, follow_symlinks=False)
            if not known(entry) or not stat.S_ISREG(status.st_mode):
                raise RefusedError(f"it holds {entry!r}, which is not part of a checkpoint")


def names(folder: int) -> list[str]:
    """Return the sorted names in an open folder."""
    return sorted(os.listdir(folder))


def exists(path: Path) -> bool:
    """Return whether anything has this name, including a dangling link."""
    return os.path.lexists(path)


def _check_regular(status: os.stat_result, *, allows_links: bool) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise RefusedError("it is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise RefusedError("it is not a regular file")
    if status.st_nlink != 1 and not allows_links:
        raise RefusedError(f"it has {status.st_nlink} hard links, expected one")
