"""Output of the verbs: safe text on stdout, an error as one block on stderr, result files written whole."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from shardwise.launch.file import replace
from shardwise.spec.errors import ConfigError, StorageError
from shardwise.spec.text import printable

#: How the names of configuration files end. TOML is refused by name.
CONFIG_ENDINGS = (".yaml", ".yml", ".json", ".toml")


def show(text: str) -> None:
    """Lines on stdout, control characters escaped."""
    sys.stdout.write(printable(text, is_block=True) + "\n")
    sys.stdout.flush()


def check_writable(path: Path | None) -> None:
    """Refuse early what could not be written after minutes of work; makes the folder.

    Raises:
        StorageError: It cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{printable(path)} is a folder.\n  Name a file to write.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.resolve().unlink()  # of a link what it points to; a verb that is refused leaves no empty file
    except OSError as error:
        raise _unwritable(path, error) from None


def write(path: Path, content: str) -> None:
    """Replace ``path`` by a file with ``content``; a link, a pipe or a device is written to and stays.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        if path.exists() and not stat.S_ISREG(path.lstat().st_mode):
            path.write_text(content, "utf-8")
        else:
            replace(path, content)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{printable(path)} cannot be written: {error.strerror}.\n  Name another file.")
