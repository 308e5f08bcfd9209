"""Hashes that find damage: XXH3 of 128 bits, as fast as memory (ADR 23).

They do not keep out somebody who can write to the folder: who can change a file can change the manifest too.
"""

from __future__ import annotations

from typing import Any

import xxhash

from shardwise.checkpoint.storage import StoredFile

#: Bytes of a file that are read and hashed at a time: few enough to stay in a core's cache between the two.
_AT_ONCE = 2**20


def start() -> Any:
    """A new hash object, with ``update`` and ``hexdigest``."""
    return xxhash.xxh3_128()


def hash_file(file: StoredFile, num_bytes: int) -> str:
    """The hash of the first ``num_bytes`` bytes.

    Raises:
        RefusedError: The file is shorter, or cannot be read.
    """
    digest = start()
    buffer = memoryview(bytearray(min(_AT_ONCE, num_bytes)))
    for offset in range(0, num_bytes, _AT_ONCE):
        part = buffer[: min(_AT_ONCE, num_bytes - offset)]
        file.read_at(part, offset)
        digest.update(part)
    return digest.hexdigest()
