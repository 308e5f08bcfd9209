"""Atomic replacement of files: other processes see the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, *, is_durable: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that replaces ``path`` when the block ends, and is removed when the block raises.

    Args:
        path: The file to replace, which need not exist.
        is_durable: Sync the content to the disk first, so that it survives a power cut.

    Yields:
        The new file, under a temporary name in the same folder.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def replace(path: Path, content: str | bytes, *, is_durable: bool = False) -> None:
    """Write ``content`` (text as UTF-8) to ``path`` atomically, as :func:`replacing` does."""
    with replacing(path, is_durable=is_durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
