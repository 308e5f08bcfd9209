"""Hashes that find damage: XXH3 of 128 bits, as fast as memory (ADR 23); SHA-256 in files of earlier versions.

Neither keeps out somebody who can write to the folder: who can change a file can change the manifest too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import xxhash

from shardwise.checkpoint import folder as folders

#: The hash that files are written with.
KIND = "xxh3_128"
#: Bytes of a file that are read and hashed at a time: few enough to stay in a core's cache between the two.
_AT_ONCE = 2**20
#: By name, with the number of hexadecimal digits.
_KINDS: dict[str, tuple[Callable[[], Any], int]] = {"xxh3_128": (xxhash.xxh3_128, 32), "sha256": (hashlib.sha256, 64)}


def start(kind: str = KIND) -> Any:
    """A new hash object, with ``update`` and ``hexdigest``."""
    return _KINDS[kind][0]()


def kind_of(digest: str) -> str:
    """Which hash has as many digits.

    Raises:
        ValueError: None has.
    """
    for kind, (_, digits) in _KINDS.items():
        if len(digest) == digits:
            return kind
    raise ValueError(f"a hash of {len(digest)} digits is unknown")


def hash_file(file: int, num_bytes: int, kind: str = KIND) -> str:
    """The hash of this kind of the first ``num_bytes`` bytes.

    Raises:
        RefusedError: The file is shorter, or cannot be read.
    """
    digest = start(kind)
    buffer = memoryview(bytearray(min(_AT_ONCE, num_bytes)))
    for offset in range(0, num_bytes, _AT_ONCE):
        part = buffer[: min(_AT_ONCE, num_bytes - offset)]
        folders.read_at(file, part, offset)
        digest.update(part)
    return digest.hexdigest()
