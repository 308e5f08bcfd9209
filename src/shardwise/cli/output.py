"""Output of the commands: printable text on stdout, and result files that are replaced atomically."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from shardwise.launch.file import replace
from shardwise.spec.errors import ConfigError, StorageError
from shardwise.spec.text import printable

#: Suffixes of configuration files. TOML is refused with an error that names it.
CONFIG_ENDINGS = (".yaml", ".yml", ".json", ".toml")


def show(text: str) -> None:
    """Print lines on stdout with control characters escaped."""
    sys.stdout.write(printable(text, is_block=True) + "\n")
    sys.stdout.flush()


def check_writable(path: Path | None) -> None:
    """Create the folder of ``path``, and refuse a path that could not be written after minutes of work.

    Raises:
        ConfigError: ``path`` is a folder.
        StorageError: The file cannot be written.
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
            path.resolve().unlink()  # the target of a link; a refused command leaves no empty file
    except OSError as error:
        raise _unwritable(path, error) from None


def write(path: Path, content: str) -> None:
    """Replace ``path`` by a file with ``content``. Links, pipes and devices are written to and not replaced.

    Raises:
        StorageError: The file cannot be written.
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
