"""Token files: a 64-byte header and an array of uint16 or uint32, read by memory map.

::

    0   8 bytes   b"SWTOKENS"
    8   uint32    format version, 1
    12  uint32    bytes per token, 2 or 4
    16  uint64    vocabulary size
    24  uint64    number of tokens
    32  32 bytes  zero
    64  tokens, little-endian
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.launch.file import replacing
from shardwise.spec.errors import CheckpointError, ConfigError

MAGIC = b"SWTOKENS"
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sIIQQ32s")
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_CHUNK = 1 << 24


class DataError(CheckpointError):
    """Training data that is missing, damaged, too small, or does not fit the model. Exit code 65."""


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """What the first 64 bytes of a token file say."""

    item_bytes: int
    vocab_size: int
    num_tokens: int


def is_token_file(path: Path) -> bool:
    """Whether ``path`` begins as a token file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> TokenHeader:
    """Read and check the header against the file's real size.

    Raises:
        DataError: The header is damaged, or the file is shorter or longer than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{path}: {size} bytes, a token file has at least {HEADER_BYTES}.\n  {_AGAIN}")
    magic, version, item_bytes, vocab_size, num_tokens, zero = _HEADER.unpack(raw)
    if magic != MAGIC or version != 1 or item_bytes not in _DTYPES or zero != bytes(32):
        raise DataError(f"{path}: the header is not that of a token file of version 1.\n  {_AGAIN}")
    expected = HEADER_BYTES + num_tokens * item_bytes
    if size != expected:
        raise DataError(
            f"{path}: {num_tokens:,} tokens of {item_bytes} bytes need {expected:,} bytes, the file has {size:,}: "
            f"{'truncated' if size < expected else 'bytes are left over'}.\n  {_AGAIN}"
        )
    if not 1 <= vocab_size <= 1 << (8 * item_bytes):
        raise DataError(f"{path}: a vocabulary of {vocab_size:,} in tokens of {item_bytes} bytes.\n  {_AGAIN}")
    return TokenHeader(item_bytes, vocab_size, num_tokens)


def map_tokens(path: Path) -> np.ndarray:
    """The tokens of a file as a read-only memory map; nothing is read yet."""
    header = read_header(path)
    if header.num_tokens == 0:
        return np.zeros(0, _DTYPES[header.item_bytes])
    return np.memmap(path, _DTYPES[header.item_bytes], "r", offset=HEADER_BYTES, shape=(header.num_tokens,))


def check_tokens(path: Path, vocab_size: int, *, num_bytes: int | None = None) -> None:
    """Refuse ids that the model has no embedding for, in the first ``num_bytes`` of tokens or in all. About 1 GB/s.

    Raises:
        DataError: A token id is too large; file and position are named.
    """
    header = read_header(path)
    dtype = _DTYPES[header.item_bytes]
    count = header.num_tokens if num_bytes is None else min(header.num_tokens, num_bytes // header.item_bytes)
    for start in range(0, count, _CHUNK):
        chunk = np.fromfile(path, dtype, min(_CHUNK, count - start), offset=HEADER_BYTES + start * header.item_bytes)
        if int(chunk.max()) >= vocab_size:
            raise unknown_token(path, start, chunk, vocab_size)


def unknown_token(path: Path | int, start: int, chunk: np.ndarray, vocab_size: int) -> DataError:
    """The error for a file's tokens from ``start`` on, of which one is not below ``vocab_size``."""
    place = int(np.argmax(chunk >= vocab_size))
    return DataError(
        f"{path}: token {start + place:,} is {int(chunk[place])}, but the vocabulary has {vocab_size:,} ids.\n"
        "  Use a model whose vocab_size covers the file, or tokenize the text again."
    )


def write_tokens(path: Path, chunks: Iterable[np.ndarray], *, vocab_size: int, should_replace: bool = False) -> int:
    """Write a token file: beside its place, flushed, then renamed. uint16 where the vocabulary fits, else uint32.

    Returns:
        The number of tokens.

    Raises:
        ConfigError: The file exists and ``should_replace`` is false.
    """
    if path.exists() and not should_replace:
        raise ConfigError(f"{path} exists.\n  Name another file, or pass --force to replace it.")
    item_bytes = 2 if vocab_size <= 1 << 16 else 4
    count = 0
    with replacing(path, is_durable=True) as file:
        file.write(bytes(HEADER_BYTES))
        for chunk in chunks:
            file.write(_packed(chunk, item_bytes, vocab_size))
            count += len(chunk)
        file.seek(0)
        file.write(_HEADER.pack(MAGIC, 1, item_bytes, vocab_size, count, bytes(32)))
    return count


def _packed(chunk: np.ndarray, item_bytes: int, vocab_size: int) -> bytes:
    if chunk.size and int(chunk.max()) >= vocab_size:
        raise DataError(
            f"token id {int(chunk.max())} does not fit a vocabulary of {vocab_size:,}.\n  Raise the vocabulary size."
        )
    return chunk.astype(_DTYPES[item_bytes]).tobytes()


_AGAIN = "Write it again with `shardwise data tokenize`."
