"""Files of token ids: our own format, NumPy's ``.npy``, and Megatron's ``.bin`` with its ``.idx``; all memory-mapped.

Our format has a header of 64 bytes, then ids of 2 or 4 bytes. Only this header contains the vocabulary size; ids of the
other formats are compared with the model's.
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
_AT_ONCE = 1 << 24

_NUMPY = b"\x93NUMPY"
#: Megatron-LM's index (megatron/core/datasets/indexed_dataset.py): magic, version, code of the dtype, sequences,
#: documents; then lengths (int32), pointers (int64) and the first sequence of each document (int64).
_MEGATRON = b"MMIDIDX\x00\x00"
_INDEX = struct.Struct("<9sQBQQ")
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class DataError(CheckpointError):
    """Training data that is missing, damaged, too small, or does not fit the model. Exit code 65."""


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """The dtype, position and number of the ids in a file."""

    dtype: np.dtype  # unsigned, so that a negative id is above every vocabulary
    offset: int  # bytes before the first id
    num_tokens: int
    vocab_size: int | None  # ids are below it; ``None``: unknown


def is_token_file(path: Path) -> bool:
    """Return whether ``path`` is a file of ids, from its first bytes or those of its index file."""
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
    return begin == MAGIC or begin.startswith(_NUMPY) or (path.suffix == ".bin" and _is_index(path.with_suffix(".idx")))


def is_index_of_tokens(path: Path) -> bool:
    """Return whether ``path`` is only the index of a file of ids, which divides it into documents."""
    return path.suffix == ".idx" and path.with_suffix(".bin").is_file() and _is_index(path)


def _is_index(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MEGATRON)) == _MEGATRON
    except OSError:
        return False


def read_header(path: Path) -> TokenHeader:
    """Read the header of a file of ids, and check it against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if raw.startswith(_NUMPY):
        return _of_numpy(path)
    if not raw.startswith(MAGIC) and path.suffix == ".bin":
        return _of_megatron(path, size)
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
    return TokenHeader(_DTYPES[item_bytes], HEADER_BYTES, num_tokens, vocab_size)


def _of_numpy(path: Path) -> TokenHeader:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: cannot be read as an array: {error}.\n  Write it again with numpy.save.") from None
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.dtype.byteorder == ">":
        raise DataError(
            f"{path}: an array of {found.dtype} with shape {found.shape}, expected integers in one dimension.\n"
            "  Save ids as numpy.save(path, ids.astype('uint32').ravel())."
        )
    return TokenHeader(_unsigned(found.dtype), getattr(found, "offset", 0), len(found), None)


def _of_megatron(path: Path, size: int) -> TokenHeader:
    index = path.with_suffix(".idx")
    with index.open("rb") as file:
        raw = file.read(_INDEX.size)
    if len(raw) < _INDEX.size:
        raise DataError(f"{index}: {len(raw)} bytes, an index has at least {_INDEX.size}.\n  {_AGAIN_THERE}")
    _, version, code, num_sequences, num_documents = _INDEX.unpack(raw)
    if version != 1 or code not in _INDEX_DTYPES:
        raise DataError(
            f"{index}: version {version} with dtype code {code}, expected version 1 and integers.\n  {_AGAIN_THERE}"
        )
    expected = _INDEX.size + num_sequences * 12 + num_documents * 8
    if index.stat().st_size < expected:  # an index of a multimodal data set is longer
        raise DataError(
            f"{index}: {num_sequences:,} sequences and {num_documents:,} documents need {expected:,} bytes, the file"
            f" has {index.stat().st_size:,}: truncated.\n  {_AGAIN_THERE}"
        )
    dtype = np.dtype(_INDEX_DTYPES[code])
    num_tokens = size // dtype.itemsize
    if num_sequences:
        lengths_at, last = _INDEX.size, num_sequences - 1
        (length,) = np.fromfile(index, "<i4", 1, offset=lengths_at + 4 * last)
        (pointer,) = np.fromfile(index, "<i8", 1, offset=lengths_at + 4 * num_sequences + 8 * last)
        if int(pointer) + int(length) * dtype.itemsize > size:
            raise DataError(
                f"{path}: {size:,} bytes, its index ends at {int(pointer) + int(length) * dtype.itemsize:,}:"
                f" truncated.\n  {_AGAIN_THERE}"
            )
    return TokenHeader(_unsigned(dtype), 0, num_tokens, None)


def _unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"<u{dtype.itemsize}")


def map_tokens(path: Path) -> np.ndarray:
    """Map the tokens of a file read-only; nothing is read yet."""
    header = read_header(path)
    if header.num_tokens == 0:
        return np.zeros(0, header.dtype)
    return np.memmap(path, header.dtype, "r", offset=header.offset, shape=(header.num_tokens,))


def check_tokens(path: Path, vocab_size: int, *, num_bytes: int | None = None) -> None:
    """Refuse ids that are not below ``vocab_size``, in the first ``num_bytes`` of tokens or in all. About 1 GB/s."""
    header = read_header(path)
    count = header.num_tokens if num_bytes is None else min(header.num_tokens, num_bytes // header.dtype.itemsize)
    for start in range(0, count, _AT_ONCE):
        offset = header.offset + start * header.dtype.itemsize
        chunk = np.fromfile(path, header.dtype, min(_AT_ONCE, count - start), offset=offset)
        if int(chunk.max()) >= vocab_size:
            raise unknown_token(path, start, chunk, vocab_size)


def unknown_token(path: Path | int, start: int, chunk: np.ndarray, vocab_size: int) -> DataError:
    """Return the error for a file's tokens from ``start`` on, one of which is not below ``vocab_size``."""
    index = int(np.argmax(chunk >= vocab_size))
    return DataError(
        f"{path}: token {start + index:,} is {int(chunk[index])}, but the vocabulary has {vocab_size:,} ids.\n"
        "  Use a model whose vocab_size covers the file, or tokenize the text again."
    )


def write_tokens(path: Path, chunks: Iterable[np.ndarray], *, vocab_size: int, should_replace: bool = False) -> int:
    """Write a token file durably and rename it; return the number of tokens. Ids take 2 bytes if they fit, else 4."""
    if path.exists() and not should_replace:
        raise ConfigError(f"{path} exists.\n  Name another file, or pass --force to replace it.")
    item_bytes = 2 if vocab_size <= 1 << 16 else 4
    count = 0
    with replacing(path, is_durable=True) as file:
        file.write(bytes(HEADER_BYTES))
        for chunk in chunks:
            file.write(_pack(chunk, item_bytes, vocab_size))
            count += len(chunk)
        file.seek(0)
        file.write(_HEADER.pack(MAGIC, 1, item_bytes, vocab_size, count, bytes(32)))
    return count


def _pack(chunk: np.ndarray, item_bytes: int, vocab_size: int) -> bytes:
    if chunk.size and int(chunk.max()) >= vocab_size:
        raise DataError(
            f"token id {int(chunk.max())} does not fit a vocabulary of {vocab_size:,}.\n  Raise the vocabulary size."
        )
    return chunk.astype(_DTYPES[item_bytes]).tobytes()


_AGAIN = "Write it again with `shardwise data tokenize`."
_AGAIN_THERE = "Write it again with Megatron's preprocess_data.py."
